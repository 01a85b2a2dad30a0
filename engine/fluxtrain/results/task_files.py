"""Task files of lm-eval in a folder, read so that neither the hub nor code of theirs is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fluxtrain.errors import BadInput

LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow")
# Computed by lm-eval itself; others are scripts that it would download.
METRICS = (
    "acc", "acc_norm", "acc_bytes", "exact_match", "perplexity", "word_perplexity",
    "byte_perplexity", "bits_per_byte", "brier_score", "f1", "mcc", "likelihood", "bypass",
)  # fmt: skip
OUTPUT_TYPES = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")


class _Loader(yaml.SafeLoader):
    """Reads plain YAML; what lm-eval would run is refused with its line."""


def _refuse_function(_: yaml.SafeLoader, __: str, node: yaml.Node) -> None:
    raise yaml.constructor.ConstructorError(
        None, None, f"it names code ({node.tag} {getattr(node, 'value', '')})", node.start_mark
    )


_Loader.add_multi_constructor("!", _refuse_function)


def read_tasks(folder: Path) -> list[dict[str, Any]]:
    """Return the tasks of a folder as lm-eval takes them, their data files with whole paths.

    Raises BadInput, with the cure, for a task that asks for the hub or for code, lies outside of
    the folder or is none.
    """
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if not files:
        raise BadInput(f"{folder} has no task (*.yaml): name the folder of lm-eval's task files")
    tasks = [_task(file) for file in files]
    names = [task["task"] for task in tasks]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise BadInput(f"{folder} has two tasks {double!r}: give one of them another name")
    return tasks


def _task(file: Path) -> dict[str, Any]:
    try:
        task = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise BadInput(
            f"{file} line {line}: {error.problem}, and task files are read without running any: "
            "write the text as a template, or make the rows so that none is needed"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
    if not isinstance(task, dict) or not isinstance(task.get("task"), str):
        raise BadInput(f"{file} names no task: it needs `task: NAME`, one a file")
    _refuse_foreign(file, task)
    return {**task, "dataset_kwargs": _local_data(file, task)}


def _refuse_foreign(file: Path, task: dict[str, Any]) -> None:
    for key in ("include", "group", "custom_dataset", "unsafe_code", "process_docs"):
        if task.get(key):
            raise BadInput(f"{file}: `{key}` is not used here: write its settings into the file")
    kind = task.get("output_type", "multiple_choice")
    if kind not in OUTPUT_TYPES:
        raise BadInput(f"{file}: output_type is {kind!r}: use one of {', '.join(OUTPUT_TYPES)}")
    for metric in task.get("metric_list") or []:
        name = metric.get("metric") if isinstance(metric, dict) else metric
        if name not in METRICS or metric.get("hf_evaluate"):
            raise BadInput(
                f"{file}: the metric {name!r} would be downloaded: use one of {', '.join(METRICS)}"
            )
    if any("__" in text for text in _texts(task)):
        raise BadInput(f"{file}: a template uses names with `__`, which reach code: leave them out")


def _local_data(file: Path, task: dict[str, Any]) -> dict[str, Any]:
    path, given = task.get("dataset_path"), task.get("dataset_kwargs") or {}
    named = given.get("data_files") if isinstance(given, dict) else None
    if path not in LOCAL_FORMATS or not named:
        raise BadInput(
            f"{file}: its data is {path!r} of the hub, and tasks are evaluated offline: save the "
            "rows beside it, and write `dataset_path: json` and `dataset_kwargs: {data_files: "
            "{test: rows.jsonl}}`"
        )
    splits = named if isinstance(named, dict) else {"train": named}
    found = {split: _beside(file, one) for split, one in splits.items()}
    return {"data_files": found}


def _beside(file: Path, names: Any) -> list[str]:
    """Return the whole paths of data files in the folder of a task."""
    paths = []
    for name in names if isinstance(names, list) else [names]:
        path = (file.parent / str(name)).resolve()
        if not path.is_relative_to(file.parent.resolve()) or not path.is_file():
            raise BadInput(f"{file}: its data {name!r} is no file of {file.parent}: put it there")
        paths.append(str(path))
    return paths


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a task."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
