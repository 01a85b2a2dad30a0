"""The questions about the training itself: rate, length, evaluation, and where the run lives.

Each is a field of the answers; None, or "" for a path, leaves it to the trainer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["rate", "share", "passes", "count", "when", "choice", "folder"]
Value = float | int | str | None
END = "end"
NOUNS: Mapping[Kind, str] = {
    "rate": "a number from 0 up, such as 2e-4",
    "share": "a share from 0 to below 1, such as 0.02",
    "passes": "a number above 0, such as 1.5",
    "when": "a whole number of steps from 1 up, or end",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingQuestion:
    """A question about the training.

    Attributes:
        field: of the answers.
        key: of the configuration; "" where no configuration has it.
        name: as it is shown.
        group: the head under which it stands.
        default: what is taken when nothing is answered, as it is shown.
        reason: why that is taken.
        turns: what people use, in the order in which keys walk through it.
        least: the least whole number.
        clears: the field that this one replaces.
    """

    field: str
    key: str
    group: str
    name: str
    kind: Kind
    default: str
    reason: str
    turns: tuple[Value, ...] = ()
    least: int = 1
    clears: str = ""

    @property
    def flag(self) -> str:
        """The option of the command line that answers it."""
        return "--" + self.field.replace("_", "-")


TRAINING_QUESTIONS = (
    TrainingQuestion(
        field="learning_rate", key="train.learning_rate", group="Learning", name="learning rate",
        kind="rate", default="auto",
        reason="2e-5 for all weights of a trained model, 2e-4 for adapters, 3e-3 for random ones",
        turns=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 3e-3),
    ),
    TrainingQuestion(
        field="schedule", key="train.schedule", group="Learning", name="schedule",
        kind="choice", default="cosine",
        reason="the rate falls slowly at first and reaches zero with the last step",
        turns=("cosine", "linear", "constant"),
    ),
    TrainingQuestion(
        field="warmup_steps", key="train.warmup_steps", group="Learning", name="warm-up steps",
        kind="count", default="auto", least=0,
        reason="3 % of the run, 100 steps at most: lets AdamW's moments settle",
        turns=(0, 10, 50, 100, 500),
    ),
    TrainingQuestion(
        field="epochs", key="train.epochs", group="Length", name="epochs",
        kind="passes", default="1", clears="steps",
        reason="one pass over the data; more than three rarely help",
        turns=(1.0, 2.0, 3.0, 5.0, 10.0),
    ),
    TrainingQuestion(
        field="steps", key="train.steps", group="Length", name="steps",
        kind="count", default="by epochs", clears="epochs",
        reason="the epochs decide; a number here replaces them",
        turns=(100, 200, 500, 1000, 5000),
    ),
    TrainingQuestion(
        field="sequence_length", key="data.sequence_length", group="Length",
        name="sequence length", kind="count", default="auto", least=2,
        reason="the smallest power of two that holds 99 % of the first samples",
        turns=(512, 1024, 2048, 4096, 8192),
    ),
    TrainingQuestion(
        field="accumulation", key="train.accumulation", group="Length", name="accumulation",
        kind="count", default="1",
        reason="batches summed up before each update; takes the memory of one",
        turns=(1, 2, 4, 8, 16, 32),
    ),
    TrainingQuestion(
        field="evaluate_every", key="train.evaluate_every", group="Evaluation",
        name="evaluate every", kind="when", default="auto",
        reason="a tenth of the run, and at most 10 % of the time; end: only after the last step",
        turns=(10, 50, 100, 500, 1000, END),
    ),
    TrainingQuestion(
        field="held_out", key="data.held_out", group="Evaluation", name="held out",
        kind="share", default="0.02",
        reason="the share of the data that is never trained on; 0: nothing, and no evaluation",
        turns=(0.0, 0.01, 0.02, 0.05, 0.1),
    ),
    TrainingQuestion(
        field="checkpoint_every", key="train.checkpoint_every", group="Run",
        name="save every", kind="when", default="auto",
        reason="a tenth of the run or 10 minutes, and at most 5 % of the time; end: only the last",
        turns=(50, 100, 500, 1000, END),
    ),
    TrainingQuestion(
        field="seed", key="train.seed", group="Run", name="seed",
        kind="count", default="0", least=0,
        reason="of dropout and of random weights; the same seed gives the same run",
        turns=(0, 1, 2, 3),
    ),
    TrainingQuestion(
        field="data_seed", key="data.seed", group="Run", name="seed of data",
        kind="count", default="0", least=0,
        reason="of the order of rows, and of what is held out",
        turns=(0, 1, 2, 3),
    ),
    TrainingQuestion(
        field="run_folder", key="", group="Run", name="output folder",
        kind="folder", default="auto",
        reason="a new folder below the runs, named after the time and the model",
    ),
)  # fmt: skip


def question_of(field: str) -> TrainingQuestion:
    """Return the question that asks for a field of the answers."""
    return next(one for one in TRAINING_QUESTIONS if one.field == field)


def answer_text(question: TrainingQuestion, value: Value) -> str:
    """Write a value as it is shown and typed; the default where there is none."""
    if value is None or value == "":
        return question.default
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def read_answer(question: TrainingQuestion, text: str) -> Value:
    """Read what was typed; nothing, or the word auto, leaves it to the trainer.

    Raises:
        ValueError: it cannot be used; the message says what can.
    """
    text = text.strip()
    if question.kind == "folder":
        return text if text != "auto" else ""
    if text in ("", "auto"):
        return None
    read = _read(question, text)
    if read is None:
        raise ValueError(f"{text!r} is not {_noun(question)}; nothing typed takes the default")
    return read


def changes_of(question: TrainingQuestion, value: Value) -> dict[str, Value]:
    """Return the fields that an answer changes: its own, and the one it replaces."""
    cleared = {question.clears: None} if question.clears and value is not None else {}
    return {question.field: value, **cleared}


def turned(question: TrainingQuestion, value: Value, offset: int) -> Value:
    """Return the usual value `offset` places on, the default among them; the ends meet."""
    stops: tuple[Value, ...] = (None, *question.turns)
    if value in stops:
        return stops[(stops.index(value) + offset) % len(stops)]
    numbers = [stop for stop in question.turns if isinstance(stop, int | float)]
    if not isinstance(value, int | float) or not numbers:
        return None
    beside = [n for n in numbers if (n > value if offset > 0 else n < value)]
    return (min(beside) if offset > 0 else max(beside)) if beside else None


def acceptable_training(question: TrainingQuestion, value: object) -> bool:
    """Tell whether a field of the answers can have this value."""
    if question.kind == "folder":
        return isinstance(value, str)
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, float | int | str):
        return False
    try:
        return _read(question, answer_text(question, value)) is not None
    except (ValueError, OverflowError):
        return False


def settled(question: TrainingQuestion, value: Any) -> Any:
    """Convert a configuration's value to an answer; None for the default.

    YAML takes 2e-4 for a word; it is a number here.
    """
    if value in (None, "auto") or isinstance(value, bool):
        return None if value in (None, "auto") else value
    read = _read(question, str(value)) if isinstance(value, str | int | float) else None
    default = None if question.default == "auto" else _read(question, question.default)
    return None if read is not None and read == default else value if read is None else read


def _noun(question: TrainingQuestion) -> str:
    if question.kind == "choice":
        return "one of " + ", ".join(map(str, question.turns))
    return NOUNS.get(question.kind) or f"a whole number from {question.least} up"


def _read(question: TrainingQuestion, text: str) -> Value:
    """Parse a text; None if it is no usable value."""
    if question.kind == "choice":
        return text if text in question.turns else None
    if question.kind == "when" and text == END:
        return END
    if question.kind in ("count", "when"):
        plain = text.replace(",", "").replace("_", "")
        whole = plain.isascii() and plain.isdecimal() and len(plain) <= 9
        return int(plain) if whole and int(plain) >= question.least else None
    try:
        number = float(text)
    except ValueError:
        return None
    least_ok = number > 0 if question.kind == "passes" else number >= 0
    most_ok = number < 1 if question.kind == "share" else math.isfinite(number)
    return number if least_ok and most_ok else None
