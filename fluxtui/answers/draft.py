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
    DIAL,
    Answers,
    DataSource,
    ModelSource,
    StartSource,
    route,
)
from fluxtui.answers.configuring import answers_from_config
from fluxtui.answers.rows import BY_KEY, settled
from fluxtui.home import home_folder

_WORDS: dict[str, tuple[str, ...]] = {
    "start": get_args(StartSource),
    "model_source": get_args(ModelSource),
    "data_source": get_args(DataSource),
    "dial": DIAL,
}
_MAPPINGS = ("settings", "base", "dial_settings")


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


def load_draft(path: Path, begun: Answers | None = None) -> Answers | None:
    """Load the draft; None if it is missing, unreadable or equal to the defaults.

    None too if `begun` holds more than `--set` settings; these replace the draft's.
    """
    own = begun.overrides if begun else ()
    if begun is not None and begun != Answers(overrides=own):
        return None
    try:
        fields = read_json(path, follow=True)
        answers = _answers(fields) if fields is not None else None
    except (TypeError, ValueError, BadInput):
        return None
    if answers is None or dataclasses.replace(answers, step="start") == Answers():
        return None
    return dataclasses.replace(answers, overrides=own or answers.overrides)


def forget_draft(path: Path) -> None:
    """Remove the draft; it is no error if there is none."""
    path.unlink(missing_ok=True)


def _answers(fields: dict[str, Any]) -> Answers | None:
    known = {field.name for field in dataclasses.fields(Answers)}
    values = {name: value for name, value in fields.items() if name in known}
    if not all(_acceptable(name, value) for name, value in values.items()):
        return None
    values["overrides"] = tuple(values.get("overrides", ()))
    answers = Answers(**values)
    for key, value in answers.settings.items():
        settled(BY_KEY[key], value)
    there = answers.step in route(answers)
    return answers if there else dataclasses.replace(answers, step="start")


def _acceptable(name: str, value: object) -> bool:
    """Tell whether a field of the answers can have this value."""
    if name in _WORDS:
        return value in _WORDS[name]
    if name == "overrides":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if name == "settings":
        return isinstance(value, dict) and value.keys() <= BY_KEY.keys()
    return isinstance(value, dict if name in _MAPPINGS else str)


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
        odd = [field.name for field in dataclasses.fields(Answers)
               if field.name != "overrides"
               and not _acceptable(field.name, getattr(answers, field.name))]  # fmt: skip
    except (AttributeError, TypeError, ValueError, BadInput) as error:
        raise BadInput(f"its configuration cannot be understood: {error}") from error
    if odd:
        raise BadInput(f"its configuration cannot be understood: {', '.join(odd)}")
    return answers
