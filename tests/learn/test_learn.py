"""The learning path: each check passes a right solution and says what is wrong in wrong ones."""

from __future__ import annotations

import re
import time
from pathlib import Path

import peft  # noqa: F401 - it changes the environment when it is first imported
import pytest
from typer.testing import CliRunner

from fluxtrain.cli import app
from fluxtrain.commands.learn.checking import LIMIT_S, Wrong, check_file, load
from fluxtrain.commands.learn.tasks import LANGUAGES, TASKS, Task
from fluxtrain.errors import BadInput

SOLUTIONS = Path(__file__).parent / "solutions"
SLOW = ("sdk", "parallel")  # they wait, or start processes

# Task, what a learner writes in place of what, and what the check says about it.
MISTAKES = [
    ("lora", "self.scale = alpha / rank", "self.scale = 1.0", "alpha / rank is 3 here"),
    ("lora", "torch.zeros(base.out_features, rank)", "torch.ones(base.out_features, rank)",
     "B has to begin as zeros"),
    ("lora", "base.requires_grad_(False)", "base", "freeze the base"),
    ("lora", "self.scale * self.B @ self.A", "self.B @ self.A", "merged"),
    ("qlora", "blocks.abs().amax(1)", "blocks.abs().amax().expand(1)", "one for each block of 64"),
    ("qlora", "(codes[::2] << 4) | codes[1::2]", "(codes[1::2] << 4) | codes[::2]", "upper 4 bits"),
    ("qlora", "(scaled[..., None] - NF4).abs().argmin(-1).flatten()",
     "((scaled + 1) * 7.5).round().long().flatten()", "not evenly spaced"),
    ("sdk", ', "Idempotency-Key": str(uuid.uuid4())', "", "two jobs train"),
    ("sdk", "time.sleep(float(answer.headers.get(\"Retry-After\", 1)))", "pass", "Retry-After"),
    ("sdk", "return await asyncio.gather(*(self._wait(one, 0.1) for one in job_ids))",
     "return [await self._wait(one, 0.1) for one in job_ids]", "one after the other"),
    ("sdk", "if answer.is_error:", "if False:", "why"),
    ("parallel", "dist.all_reduce(parameter.grad)", "pass", "different weights"),
    ("parallel", "optimizer.step()", "raise SystemExit(0)", "ended before it was checked"),
    ("parallel", "square().sum()", "square().mean()", "divided by the number of all rows"),
    ("parallel", "parameter.grad /= total[1]", "pass", "divided by the number of all rows"),
    ("registry", " + content", "", "same size"),
    ("registry", "shutil.copytree(folder, self.root / version)",
     "(self.root / version).symlink_to(folder)", "copy its files"),
    ("registry", '.open("a")', '.open("w")', "never overwrite"),
    ("registry", "moves[-1][\"loss\"] - loss < min_gain", "False", "the gate stands open"),
    ("evaluation", "steps[at - 1, tokens", "steps[at, tokens", "predict token t + 1"),
    ("evaluation", "begin = len(context)", "begin = 1", "tokens of the context"),
    ("evaluation", " / len(one)", "", "divided by the numbers of tokens"),
    ("adapters", " * (chosen >= 0)", "", "the last one"),
    ("adapters", "scales[own]", "scales[0]", "a scale of its own"),
    ("adapters", "own = chosen.clamp(min=0)", "own = chosen[:1].expand_as(chosen)", "first row"),
    ("metrics", '.replace("\\n", "\\\\n")', "", "escape"),
    ("metrics", "step = event if event[\"event\"] == \"step\" else step",
     "step = max(step or event, event, key=lambda one: one.get('step', 0)) "
     "if event['event'] == 'step' else step", "the newest line"),
]  # fmt: skip


def task_of(name: str) -> Task:
    return next(task for task in TASKS if task.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_right_solution_passes_within_a_minute(task: Task) -> None:
    began_s = time.monotonic()
    shown = check_file(task, SOLUTIONS / f"{task.name}.py")
    assert shown and time.monotonic() - began_s < LIMIT_S


def mistaken(tmp_path: Path, name: str, right: str, wrong: str) -> Path:
    text = (SOLUTIONS / f"{name}.py").read_text()
    assert text.count(right) == 1, right
    own = tmp_path / "own.py"
    own.write_text(text.replace(right, wrong))
    return own


@pytest.mark.parametrize(
    ("name", "right", "wrong", "told"), [one for one in MISTAKES if one[0] not in SLOW]
)
def test_a_typical_mistake_is_told(
    tmp_path: Path, name: str, right: str, wrong: str, told: str
) -> None:
    check = task_of(name).find_check()
    assert check(load(SOLUTIONS / f"{name}.py"))
    with pytest.raises(Wrong, match=re.escape(told)):
        check(load(mistaken(tmp_path, name, right, wrong)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "right", "wrong", "told"), [one for one in MISTAKES if one[0] in SLOW]
)
def test_a_typical_mistake_among_several_processes_is_told(
    tmp_path: Path, name: str, right: str, wrong: str, told: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(told)):
        check_file(task_of(name), mistaken(tmp_path, name, right, wrong))


def test_what_ends_too_late_too_early_or_is_the_answer_is_told(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    for text, told in (
        ("while True:\n    pass\n", "did not end within 5 s"),
        ("import sys\nsys.exit(0)\n", "before it was checked"),
        ("def f():\n    from prometheus_client import Gauge\n", "line 2 imports prometheus_client"),
        ("__import__('fluxtrain.serve')\n", "line 1 imports fluxtrain.serve"),
        ("def exposition(journal, job)\n", "line 1: "),
        ("def exposition(journal, job):\n    return 1 / 0\n", "line 2: ZeroDivisionError"),
    ):
        own.write_text(text)
        with pytest.raises(BadInput, match=re.escape(told)):
            check_file(TASKS[7], own, 5.0 if "True" in text else LIMIT_S)
    with pytest.raises(BadInput, match="cannot be read"):
        check_file(TASKS[7], tmp_path / "none.py")


def test_every_task_has_texts_and_a_file_to_begin_with(tmp_path: Path) -> None:
    run = CliRunner().invoke
    for language in LANGUAGES:
        shown = run(app, ["learn", "--language", language]).output
        for task in TASKS:
            assert task.title(language) in shown
            text = run(app, ["learn", str(task.number), "--language", language]).output
            assert text.startswith(f"# {task.number}. ") and len(text.splitlines()) > 8
    for task in TASKS:
        own = tmp_path / f"{task.name}.py"
        assert run(app, ["learn", str(task.number), "--start", str(own)]).exit_code == 0
        assert "NotImplementedError" in own.read_text() or "raise" in own.read_text()
        names = re.findall(r"^(?:def|class) (\w+)", own.read_text(), re.M)
        solution = (SOLUTIONS / f"{task.name}.py").read_text()
        assert names and all(re.search(rf"\b{name}\b", solution) for name in names)
    again = run(app, ["learn", "1", "--start", str(own)])
    assert isinstance(again.exception, BadInput)
