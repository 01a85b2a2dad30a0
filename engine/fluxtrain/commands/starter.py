"""A starter file: the ten settings that matter, each with a comment; the others have defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from fluxtrain.commands.paths import addresses, is_address, refuse_missing_paths
from fluxtrain.config.loader import Loader
from fluxtrain.config.schema import RunConfig, settings, validate
from fluxtrain.config.text import apply_overrides, parse_yaml
from fluxtrain.errors import BadInput, NoSpace
from fluxtrain.models.model_files import is_local

COMMENTS = {
    "model.path": "a folder in Hugging Face format, or a hub id such as Qwen/Qwen2.5-0.5B",
    "data.path": "a .jsonl, .csv, .parquet or .txt file, a folder, hf://datasets/owner/name",
    "data.sequence_length": "sequence length in tokens; auto: from the lengths of your data",
    "data.held_out": "the share of the data that is evaluated on, and never trained on",
    "method.name": "full: every weight; lora: small adapters; qlora: adapters on packed weights",
    "train.epochs": "passes over the data; or `steps: 1000` in place of it",
    "train.learning_rate": "the peak; auto: 2e-5 for full, 2e-4 for adapters",
    "train.batch_rows": "rows of a step; auto: by free memory and the data",
    "train.evaluate_every": "steps between evaluations; auto: ten in the run",
    "train.final_model": "which weights are saved at the end: last, or best by evaluation",
}
_OTHERS = {
    "data.columns": "by their names; ours: the file's",
    "data.chat_template": "the model has none: the first whose turns its tokenizer can end",
}
_HEAD = """\
# A run of FluxTrain. What is not here has its default: `fluxtrain schema` lists every setting.
#
#   fluxtrain inspect {path}   shows the data as the model will see it
#   fluxtrain plan {path}      says what the run needs, and how long it takes
#   fluxtrain train {path}     trains; `--run-dir PATH` says where its files go
"""
_COLUMN = 32  # where comments begin, unless a value is longer


def starter(path: str, model: str | None, data: str | None, overrides: Sequence[str] = ()) -> str:
    """Return the text of a starter file that is named `path`, for a model and data that were read.

    `overrides` are settings as `--set` takes them, written into the file. Raises BadInput for a
    model or data that is not there, or that a run could not use as the file says.
    """
    defaults = {setting.key: setting.value for setting in settings(RunConfig())}
    values = {key: defaults[key] for key in COMMENTS}
    values |= {key: value for key, value in (("model.path", model), ("data.path", data)) if value}
    values |= _flat(apply_overrides({}, list(overrides)))
    config = validate(parse_yaml(_text(path, values), path), path)
    refuse_missing_paths(config)
    if model or data:
        values |= {key: value for key, value in _read(config).items() if key not in values}
    return _text(path, values)


def _read(config: RunConfig) -> dict[str, object]:
    """Read the first rows of the data with the model's tokenizer; return settings that they need:
    the columns that names told, a template for conversations. What lies on the hub is not fetched.

    Raises BadInput as the run would for what was read.
    """
    from fluxtrain.data.prepare import corpora
    from fluxtrain.data.reading.request import DEMO, read_request
    from fluxtrain.data.reading.sampling import first_rows
    from fluxtrain.data.rendering.named import templates_for, use_template
    from fluxtrain.train.placing.row_length import samples_of, tokenizer_of, with_row_length

    model = config.model.path
    is_fetched = not (model == DEMO or is_local(model) or Path(model).is_dir())
    loaded = None if is_fetched else tokenizer_of(config)
    if config.data.path == DEMO or any(map(is_address, addresses(config.data.path))):
        return {}
    corpus, _ = corpora(read_request(config.data.model_dump()))
    found: dict[str, object] = {}
    rows, _ = first_rows(corpus)
    if loaded is not None:
        tokenizer, _ = loaded
        talks = any(row.messages and not row.plain for row in rows)
        if talks and not tokenizer.chat_template and (names := templates_for(tokenizer)):
            found["data.chat_template"] = names[0]
            use_template(tokenizer, names[0])
        with_row_length(config, samples_of(config, *loaded))
    columns, *others = (dict(part.rules.columns) for part in corpus.parts)
    if columns and all(other == columns for other in others):
        found["data.columns"] = columns
    return found


def _text(path: str, values: Mapping[str, object]) -> str:
    """Return the file with a line a setting, those of a section together."""
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        owner, _, name = key.partition(".")
        comment = COMMENTS.get(key, _OTHERS.get(key, ""))
        line = f"  {name}: {_scalar(value)}"
        lines = sections.setdefault(owner, [f"{owner}:"])
        lines.append(line.ljust(_COLUMN) + f"  # {comment}" if comment else line)
    return (
        "\n".join([_HEAD.format(path=path), "\n\n".join(map("\n".join, sections.values()))]) + "\n"
    )


def _flat(raw: Mapping[str, object]) -> dict[str, object]:
    """Return settings by their whole keys. Raises BadInput for one without a section."""
    flat: dict[str, object] = {}
    for section, named in raw.items():
        if not isinstance(named, dict):
            raise BadInput(f"--set {section}: write section.key=value, as in train.steps=100")
        flat |= {f"{section}.{name}": value for name, value in named.items()}
    return flat


def write_starter(
    path: Path, model: str | None, data: str | None, overrides: Sequence[str] = ()
) -> None:
    """Write a starter file; an existing file stays as it is.

    Raises BadInput where it exists, cannot be written, or would not run, and NoSpace on a full
    disk.
    """
    if path.is_dir():
        raise BadInput(f"{path} is a folder: name a file, such as {path / 'run.yaml'}")
    if path.exists():
        raise _is_there(path)
    text = starter(str(path), model, data, overrides)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _is_there(path) from None
    except FileNotFoundError:
        raise BadInput(f"{path.parent} does not exist: make the folder first") from None
    except OSError as error:
        path.unlink(missing_ok=True)
        kind = NoSpace if error.errno in (28, 122) else BadInput
        raise kind(f"{path} cannot be written: {error.strerror}") from None


def _is_there(path: Path) -> BadInput:
    return BadInput(f"{path} exists already and is not overwritten: name another file")


def _scalar(value: object) -> str:
    """Return a value as YAML on one line; a text that YAML would read otherwise is quoted."""
    if isinstance(value, dict | list):
        return yaml.safe_dump(
            value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=1 << 20
        ).strip()
    if not isinstance(value, str):
        return str(value)
    try:
        plain = yaml.load(f"[{value}]", Loader=Loader) == [value]
    except (yaml.YAMLError, RecursionError):
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)
