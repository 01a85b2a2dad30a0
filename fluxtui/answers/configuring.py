"""Converts answers to the trainer's configuration and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fluxtui.answers.answers import DEMO, DIAL, Answers, data_answer, model_answer
from fluxtui.answers.training import TRAINING_QUESTIONS, settled
from fluxtui.home import expanded

SETTINGS: dict[str, str] = {
    "data_format": "data.format",
    "batch_rows": "train.batch_rows",
    "offload": "placement.offload",
    "chunk_rows": "placement.chunk_rows",
    **{one.field: one.key for one in TRAINING_QUESTIONS if one.key},
}  # field of the answers: key of the configuration
METHOD = "method.name"
ADAPTERS: dict[str, str] = {
    "rank": "method.rank",
    "alpha": "method.alpha",
    "targets": "method.targets",
    "variant": "method.variant",
    "base_format": "method.base",
}  # the same of adapters, which methods but `full` have
PACKED_ALONE = ("base_format",)  # of them, what only qlora asks for
UNSET = (None, "auto")  # the trainer chooses
AGGRESSIVENESS = "placement.aggressiveness"


def chosen_settings(answers: Answers) -> dict[str, Any]:
    """Return the user's settings by dotted key; a plan's come before single ones."""
    values = {key: getattr(answers, field) for field, key in SETTINGS.items()}
    single = {key: value for key, value in values.items() if value not in UNSET}
    if answers.epochs is not None and answers.is_demo:
        single["train.steps"] = None  # the demo has a number of steps of its own
    return {**answers.dial_settings, **single, **method_settings(answers)}


def method_settings(answers: Answers) -> dict[str, Any]:
    """Return the method and its adapter settings; nothing for full training, the default."""
    if answers.method == "full":
        return {}
    found: dict[str, Any] = {METHOD: answers.method}
    for field, key in ADAPTERS.items():
        value = getattr(answers, field)
        asked = answers.method == "qlora" or field not in PACKED_ALONE
        if asked and value != getattr(Answers, field):
            found[key] = target_names(value) if field == "targets" else value
    return found


def target_names(text: str) -> list[str]:
    """Split a line into names of layers, at commas or spaces, with or without brackets."""
    return text.replace(",", " ").strip(" []").split()


def configuration(answers: Answers) -> dict[str, Any]:
    """Build the trainer's configuration: the base file's keys with the answers on top.

    Only what differs from the trainer's own defaults is written, so the file stays short and the
    defaults stay the trainer's; a setting at its default removes that of the base file.
    """
    merged: dict[str, Any] = {
        section: dict(value) if isinstance(value, Mapping) else value
        for section, value in answers.base.items()
    }
    _set(merged, "model.path", answers.model_path)
    _set(merged, "data.path", answers.data_sources)
    _set(merged, METHOD, answers.method)
    chosen = chosen_settings(answers)
    for key in dict.fromkeys((*SETTINGS.values(), *ADAPTERS.values(), *chosen)):
        section, _, name = key.partition(".")
        if key in chosen:
            _set(merged, key, chosen[key])
        elif name in merged.get(section, {}):
            del merged[section][name]
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
    """Settings as the arguments of a command."""
    return [argument for setting in settings for argument in ("--set", setting)]


def assignments(chosen: Mapping[str, Any]) -> list[str]:
    """Settings as `key=value`, whose values are YAML in one line."""
    return [f"{key}={in_a_line(value)}" for key, value in chosen.items()]


def in_a_line(value: object) -> str:
    """Write a value as YAML in one line."""
    import yaml

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
    """Read the wizard's answers out of a valid configuration: of a file, or of a run's run.json."""
    values = {field: _value(config, key) for field, key in SETTINGS.items()}
    values |= {one.field: settled(one, values.get(one.field)) for one in TRAINING_QUESTIONS}
    if values["steps"] is not None:
        values["epochs"] = None  # which then decide nothing
    return Answers(
        **model_answer(config.get("model", {}).get("path", DEMO)),
        **data_answer(config.get("data", {}).get("path", DEMO)),
        method=config.get("method", {}).get("name", "full"),
        **_adapter_answers(config),
        **{field: value for field, value in values.items() if value not in (*UNSET, "")},
        **_dial_answer(_value(config, AGGRESSIVENESS)),
        base=_without_stop_of_the_dial(config),
        step="strategy",
    )


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


def _adapter_answers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the adapter settings of a configuration."""
    values = {field: _value(config, key) for field, key in ADAPTERS.items()}
    if isinstance(values["targets"], list):
        values["targets"] = ", ".join(map(str, values["targets"]))
    return {field: value for field, value in values.items() if value not in UNSET}


def _dial_answer(value: object) -> dict[str, Any]:
    """Return the dial's stop; a share between two stops stays a setting that is carried through."""
    if value in DIAL and value != "auto":
        return {"dial": value, "dial_settings": {AGGRESSIVENESS: value}}
    return {}


def _without_stop_of_the_dial(config: Mapping[str, Any]) -> dict[str, Any]:
    section, _, name = AGGRESSIVENESS.partition(".")
    kept = dict(config)
    if _value(config, AGGRESSIVENESS) in DIAL:
        kept[section] = {key: value for key, value in config[section].items() if key != name}
    return kept


def _value(config: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return config.get(section, {}).get(name)


def _set(config: dict[str, Any], key: str, value: object) -> None:
    section, _, name = key.partition(".")
    config.setdefault(section, {})[name] = value
