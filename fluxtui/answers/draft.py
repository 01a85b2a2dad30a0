"""The answers so far, kept in the user's state folder so that a crash loses nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from fluxtrain.errors import BadInput
from fluxtrain.files.atomic import read_json
from fluxtui.answers.answers import (
    BASES,
    DATA_FORMATS,
    DIAL,
    METHODS,
    OFFLOADS,
    STEPS,
    VARIANTS,
    Answers,
    DataSource,
    ModelSource,
    StartSource,
    route,
)
from fluxtui.answers.configuring import answers_from_config
from fluxtui.answers.training import TRAINING_QUESTIONS, acceptable_training
from fluxtui.home import home_folder

_ALLOWED: dict[str, tuple[str, ...]] = {
    "start": get_args(StartSource),
    "model_source": get_args(ModelSource),
    "data_source": get_args(DataSource),
    "data_format": DATA_FORMATS,
    "method": METHODS,
    "variant": VARIANTS,
    "base_format": BASES,
    "dial": DIAL,
    "offload": OFFLOADS,
    "step": STEPS,
}
_NUMBERS = ("rank", "alpha", "batch_rows", "chunk_rows")
_TRAINING = {question.field: question for question in TRAINING_QUESTIONS}


def draft_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the draft lies: `$XDG_STATE_HOME/fluxtrain/draft.json`."""
    state = environment.get("XDG_STATE_HOME") or home_folder(environment) / ".local/state"
    return Path(state) / "fluxtrain" / "draft.json"


def save_draft(answers: Answers, path: Path) -> bool:
    """Write the answers in one atomic replacement; False where the folder cannot be written.

    A draft is a convenience: a full disk or a read-only home must not stop the wizard.
    """
    fields = dataclasses.asdict(answers)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(fields, indent=1), encoding="utf-8")
        temporary.replace(path)
    except (OSError, TypeError):
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True


def load_draft(path: Path) -> Answers | None:
    """Load the kept answers; None if there are none, if unreadable, or if they are the defaults."""
    try:
        fields = read_json(path, follow=True)
        answers = _answers(fields) if fields is not None else None
    except (TypeError, ValueError):
        return None
    if answers is None or dataclasses.replace(answers, step="start") == Answers():
        return None
    return answers


def forget_draft(path: Path) -> None:
    """Remove the draft; it is no error if there is none."""
    path.unlink(missing_ok=True)


def _answers(fields: dict[str, Any]) -> Answers | None:
    known = {field.name for field in dataclasses.fields(Answers)}
    values = {name: value for name, value in fields.items() if name in known}
    for name, value in values.items():
        if not acceptable(name, value):
            return None
    values["overrides"] = tuple(values.get("overrides", ()))
    answers = Answers(**values)
    there = answers.step in route(answers)
    return answers if there else dataclasses.replace(answers, step="start")


def acceptable(name: str, value: object) -> bool:
    """Tell whether a field of the answers can have this value."""
    if name in _ALLOWED:
        return isinstance(value, str) and value in _ALLOWED[name]
    if name in _TRAINING:
        return acceptable_training(_TRAINING[name], value)
    if name in _NUMBERS:
        return value is None or (type(value) is int and value > 0)
    if name == "overrides":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if name in ("base", "dial_settings"):
        return isinstance(value, dict)
    return isinstance(value, str)


def _without_trust(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out that code of the model may run: a run's record cannot say so for the user."""
    model = dict(config.get("model", {}))
    model.pop("trust_remote_code", None)
    return {**config, "model": model} if "model" in config else config


def answers_from_run(config: dict[str, Any]) -> Answers:
    """Read the wizard's answers from a run's own record, which anybody may have written.

    Raises:
        BadInput: it holds what no configuration does.
    """
    try:
        answers = answers_from_config(_without_trust(config))
    except (AttributeError, TypeError, ValueError) as error:
        raise BadInput(f"its configuration cannot be understood: {error}") from error
    for field in dataclasses.fields(Answers):
        value = getattr(answers, field.name)
        if field.name != "overrides" and not acceptable(field.name, value):
            raise BadInput(f"its configuration cannot be understood: {field.name} is {value!r:.60}")
    return answers
