"""Converts answers to the trainer's configuration and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput
from fluxtui.answers.answers import (
    DEMO,
    DIAL,
    Answers,
    data_answer,
    model_answer,
    with_method,
)
from fluxtui.answers.rows import BY_KEY, METHODS, ROWS, RUN_FOLDER, settled, value_text
from fluxtui.home import expanded

METHOD = "method.name"
AGGRESSIVENESS = "placement.aggressiveness"


def chosen_settings(answers: Answers) -> dict[str, Any]:
    """Return the user's settings by dotted key; a setting made alone wins over a plan's. Settings
    of other methods, and of data of another kind, are left out."""
    single = {
        key: value
        for key, value in answers.settings.items()
        if key != RUN_FOLDER and BY_KEY[key].is_for(answers.method, answers.of_images)
    }
    if "train.epochs" in single and answers.is_demo:
        single["train.steps"] = None  # the demo has a number of steps of its own
    return {**answers.dial_settings, **single}


def configuration(answers: Answers) -> dict[str, Any]:
    """Build the trainer's configuration: the base file's keys with the answers on top.

    Only what differs from the trainer's own defaults is written, so the file stays short and the
    defaults stay the trainer's.
    """
    merged: dict[str, Any] = {
        section: dict(value) if isinstance(value, Mapping) else value
        for section, value in answers.base.items()
    }
    paths = {"model.path": answers.model_path, "data.path": answers.data_sources}
    for key, value in {**paths, METHOD: answers.method, **chosen_settings(answers)}.items():
        section, _, name = key.partition(".")
        merged.setdefault(section, {})[name] = value
    return {section: value for section, value in merged.items() if value != {}}


def yaml_text(answers: Answers) -> str:
    """Write the configuration as YAML."""
    import yaml

    return yaml.safe_dump(configuration(answers), sort_keys=False, allow_unicode=True)


def set_arguments(answers: Answers) -> list[str]:
    """Return `--set` arguments: a demo run's settings, then the overrides."""
    chosen = chosen_settings(answers) if answers.is_demo else {}
    return as_arguments([*assignments(chosen), *answers.overrides])


def as_arguments(settings: Iterable[str]) -> list[str]:
    """Return settings as the arguments of a command."""
    return [argument for setting in settings for argument in ("--set", setting)]


def assignments(chosen: Mapping[str, Any]) -> list[str]:
    """Return settings as `key=value`, whose values are YAML in one line."""
    return [f"{key}={in_a_line(value)}" for key, value in chosen.items()]


def in_a_line(value: object) -> str:
    """Write a value as YAML in one line."""
    import yaml

    if isinstance(value, float):
        return value_text(value) if float(value_text(value)) == value else repr(value)
    text = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=1 << 20)
    return text.strip()[1:-1]


def flat_configuration(answers: Answers) -> dict[str, Any]:
    """Return the configuration by dotted keys, without the trainer's defaults."""
    found = {
        f"{section}.{name}": value
        for section, values in configuration(answers).items()
        for name, value in values.items()
    }
    return {key: value for key, value in found.items() if (key, value) != (METHOD, "full")}


def answers_from_config(config: Mapping[str, Any]) -> Answers:
    """Read the wizard's answers out of a valid configuration: of a file, or of a run's run.json.

    Raises:
        BadInput: the trainer would refuse a setting that the wizard asks.
    """
    if not all(isinstance(values, Mapping) for values in config.values()):
        raise BadInput("a section holds no settings")
    base = {section: dict(values) for section, values in config.items()}
    settings = {}
    for row in ROWS:
        section, _, name = row.key.partition(".")
        value = base.get(section, {}).pop(name, None)
        if value is not None and (value := settled(row, value)) is not None:
            settings[row.key] = value
    if "train.steps" in settings:
        settings.pop("train.epochs", None)  # which then decide nothing
    dial: dict[str, Any] = {}
    stop = base.get("placement", {}).get("aggressiveness")
    if stop in DIAL:  # a share between two stops stays a setting that is carried through
        del base["placement"]["aggressiveness"]
        if stop != "auto":
            dial = {"dial": stop, "dial_settings": {AGGRESSIVENESS: stop}}
    answers = Answers(
        **model_answer(base.get("model", {}).get("path", DEMO)),
        **data_answer(base.get("data", {}).get("path", DEMO)),
        **dial,
        settings=settings,
        base={section: values for section, values in base.items() if values},
        step="strategy",
    )
    return with_method(answers, str(config.get("method", {}).get("name", METHODS[0])))


def answers_from_file(path: str, overrides: tuple[str, ...] = ()) -> Answers:
    """Read a configuration file and check it as the trainer would.

    Raises:
        BadInput: all that is wrong with it, or with `overrides`.
    """
    from fluxtrain.config.schema import load_config
    from fluxtrain.config.text import parse_yaml, read_text

    place = Path(expanded(path))
    load_config(place, list(overrides))
    answers = answers_from_config(parse_yaml(read_text(place), str(place)))
    return dataclasses.replace(
        answers, start="file", config_path=path, loaded_from=path, overrides=overrides
    )
