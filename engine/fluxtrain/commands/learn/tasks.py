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


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. `answers` are packages that a solution may not import."""

    number: int
    stage: int
    name: str  # of its files in `lessons`
    titles: tuple[str, str]  # by language
    checked_in: str  # the module of its check, `check_NAME`
    answers: tuple[str, ...]

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
        module = import_module(f"fluxtrain.commands.learn.{self.checked_in}")
        check: Callable[[ModuleType], str] = getattr(module, f"check_{self.name}")
        return check


TASKS = (
    Task(
        number=1,
        stage=0,
        name="lora",
        titles=("LoRA by hand", "手寫 LoRA"),
        checked_in="model_checks",
        answers=("peft", "fluxtrain"),
    ),
    Task(
        number=2,
        stage=0,
        name="qlora",
        titles=("QLoRA: a base in 4 bits", "QLoRA：4 位元的基底"),
        checked_in="model_checks",
        answers=("bitsandbytes", "torchao", "peft", "fluxtrain"),
    ),
    Task(
        number=3,
        stage=1,
        name="sdk",
        titles=("An API and its SDK", "API 與 SDK"),
        checked_in="service_checks",
        answers=("openai", "fluxtrain"),
    ),
    Task(
        number=4,
        stage=2,
        name="parallel",
        titles=("Several GPUs: data parallel", "多 GPU：資料平行"),
        checked_in="model_checks",
        answers=("fluxtrain", "accelerate", "deepspeed"),
    ),
    Task(
        number=5,
        stage=3,
        name="registry",
        titles=("A registry of models", "模型註冊"),
        checked_in="service_checks",
        answers=("fluxtrain", "mlflow"),
    ),
    Task(
        number=6,
        stage=3,
        name="evaluation",
        titles=("Evaluation by log-likelihood", "以對數似然評測"),
        checked_in="model_checks",
        answers=("fluxtrain", "lm_eval"),
    ),
    Task(
        number=7,
        stage=3,
        name="adapters",
        titles=("Many adapters in one batch", "同一批次的多個 Adapter"),
        checked_in="model_checks",
        answers=("fluxtrain", "peft", "vllm"),
    ),
    Task(
        number=8,
        stage=3,
        name="metrics",
        titles=("Metrics from a journal", "從日誌取得監控指標"),
        checked_in="service_checks",
        answers=("fluxtrain", "prometheus_client"),
    ),
)
