"""A starter file: the ten settings that matter, each with a comment; the others have defaults."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from fluxtrain.commands.paths import refuse_missing_paths
from fluxtrain.config.loader import Loader
from fluxtrain.config.schema import RunConfig, settings, validate
from fluxtrain.config.text import parse_yaml
from fluxtrain.errors import BadInput, NoSpace

COMMENTS = {
    "model.path": "a folder in Hugging Face format, or a hub id such as Qwen/Qwen2.5-0.5B",
    "data.path": "a .jsonl, .csv, .parquet or .txt file, a folder, hf://datasets/owner/name",
    "data.sequence_length": "tokens in a row; auto: by the lengths of your data",
    "data.held_out": "the share of the data that is evaluated on, and never trained on",
    "method.name": "full: every weight; lora: small adapters; qlora: beside packed weights",
    "train.epochs": "passes over the data; or `steps: 1000` in place of it",
    "train.learning_rate": "the peak; auto: 2e-5 for full, 2e-4 for adapters",
    "train.batch_rows": "rows of a step; auto: by free memory and the data",
    "train.evaluate_every": "steps between evaluations; auto: ten in the run",
    "train.final_model": "which weights are saved at the end: last, or best by evaluation",
}
_HEAD = """\
# A run of FluxTrain. What is not here has its default: `fluxtrain schema` lists every setting.
#
#   fluxtrain inspect {path}   shows the data as the model will see it
#   fluxtrain plan {path}      says what the run needs, and how long it takes
#   fluxtrain train {path}     trains; `--run-dir PATH` says where its files go
"""
_COLUMN = 32  # where comments begin, unless a value is longer


def starter(path: str, model: str | None, data: str | None) -> str:
    """Return the text of a starter file that is named `path`.

    Raises BadInput for a model or data that is not there.
    """
    given = {"model.path": model, "data.path": data}
    defaults = {setting.key: setting.value for setting in settings(RunConfig())}
    lines = [_HEAD.format(path=path)]
    section = ""
    for key, comment in COMMENTS.items():
        owner, _, name = key.partition(".")
        if owner != section:
            lines.append(f"{owner}:" if not section else f"\n{owner}:")
            section = owner
        value = given.get(key) or defaults[key]
        lines.append(f"  {name}: {_scalar(value)}".ljust(_COLUMN) + f"  # {comment}")
    text = "\n".join(lines) + "\n"
    refuse_missing_paths(validate(parse_yaml(text, path), path))
    return text


def write_starter(path: Path, model: str | None, data: str | None) -> None:
    """Write a starter file; a file that is there already stays as it is.

    Raises BadInput where it is there, or cannot be written, and NoSpace on a full disk.
    """
    if path.is_dir():
        raise BadInput(f"{path} is a folder: name a file, such as {path / 'run.yaml'}")
    text = starter(str(path), model, data)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BadInput(f"{path} is there already, and stays as it is: name another file") from None
    except FileNotFoundError:
        raise BadInput(f"{path.parent} does not exist: make the folder first") from None
    except OSError as error:
        path.unlink(missing_ok=True)
        kind = NoSpace if error.errno in (28, 122) else BadInput
        raise kind(f"{path} cannot be written: {error.strerror}") from None


def _scalar(value: object) -> str:
    """Return a value as YAML on one line; a text that YAML would read otherwise is quoted."""
    if not isinstance(value, str):
        return str(value)
    try:
        plain = yaml.load(f"[{value}]", Loader=Loader) == [value]
    except (yaml.YAMLError, RecursionError):
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)
