"""The eight tasks, their stages, and where their texts and starter files lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

LESSONS = Path(__file__).parent / "lessons"
LANGUAGES = ("en", "zh")
STAGES = {
    "en": ("Basics", "A service", "Several GPUs", "In production"),
    "zh": ("基礎理論", "服務設計", "進階訓練", "生產部署"),
}


@dataclass(frozen=True)
class Task:
    """One task."""

    number: int
    stage: int
    name: str  # of its files in `lessons`
    titles: tuple[str, str]  # by language
    checked_in: str  # what its check, `check_NAME`, is of: model or service

    def title(self, language: str) -> str:
        """Return its title."""
        return self.titles[LANGUAGES.index(language)]

    def text(self, language: str) -> str:
        """Return what it teaches and asks for."""
        file = LESSONS / f"{self.number:02}_{self.name}.{language}.md"
        return file.read_text(encoding="utf-8")

    def starter(self) -> str:
        """Return the file that a learner begins with."""
        file = LESSONS / f"{self.number:02}_{self.name}.py"
        return file.read_text(encoding="utf-8")

    def find_check(self) -> Callable[[ModuleType], str]:
        """Import its check."""
        module = import_module(f"fluxtrain.commands.learn.{self.checked_in}_checks")
        check: Callable[[ModuleType], str] = getattr(module, f"check_{self.name}")
        return check


# What a solution may not import, as it has it ready.
ANSWERS = (
    *("fluxtrain", "peft", "bitsandbytes", "torchao", "openai", "accelerate", "deepspeed"),
    *("mlflow", "lm_eval", "vllm", "prometheus_client"),
)
TASKS = (
    Task(1, 0, "lora", ("LoRA by hand", "手寫 LoRA"), "model"),
    Task(2, 0, "qlora", ("QLoRA: a base in 4 bits", "QLoRA：4 位元的基底"), "model"),
    Task(3, 1, "sdk", ("An API and its SDK", "API 與 SDK"), "service"),
    Task(4, 2, "parallel", ("Several GPUs: data parallel", "多 GPU：資料平行"), "model"),
    Task(5, 3, "registry", ("A registry of models", "模型註冊"), "service"),
    Task(6, 3, "evaluation", ("Evaluation by log-likelihood", "以對數似然評測"), "model"),
    Task(7, 3, "adapters", ("Many adapters in one batch", "同一批次的多個 Adapter"), "model"),
    Task(8, 3, "metrics", ("Metrics from a journal", "從日誌取得監控指標"), "service"),
)
