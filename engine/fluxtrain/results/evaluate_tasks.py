"""Evaluates a streamed model on tasks of lm-eval, offline."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import TaskResult, TasksAnswer
from fluxtrain.results.model_request import ModelRequest
from fluxtrain.results.opened import OpenedModel, open_model
from fluxtrain.results.scores import Scores
from fluxtrain.results.task_files import read_tasks

ALL_AT_ONCE = 1 << 30  # requests that lm-eval hands over: `Scores` chooses the rows of a pass
SETTINGS = (  # of the environment, which these packages read when they are imported
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_EVALUATE_OFFLINE",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
    "TQDM_DISABLE",
)


def evaluate_tasks(
    request: ModelRequest, folder: Path, rows: int | None, tell: Callable[[str], None]
) -> TasksAnswer:
    """Evaluate a model on all tasks of a folder.

    Args:
        request: the model.
        folder: has lm-eval's task files and their data.
        rows: of a pass; None: as many as `fluxtrain evaluate` takes of their length.
        tell: is called with the progress.

    Raises BadInput for tasks that need the hub or code, DoesNotFit, or as `open_model`.
    """
    tasks = read_tasks(folder)
    os.environ.update(dict.fromkeys(SETTINGS, "1"))
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise BadInput(
            f"tasks need {error.name}: install it with `pip install 'fluxtrain[eval]'`"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    opened = open_model(request, tell)
    try:
        model: Any = HFLM(
            pretrained=opened.model,
            tokenizer=opened.tokenizer,
            batch_size=ALL_AT_ONCE,
            max_length=_context(opened),
        )
        model._device = opened.device  # of a streamed model the weights' own is no guide
        scores = Scores(opened, rows, tell)
        model._loglikelihood_tokens = lambda requests, **_: scores.of(requests, model.max_length)
        began_s = perf_counter()
        # what `datasets` makes of the rows
        with tempfile.TemporaryDirectory(prefix="fluxtrain-tasks-") as cache:
            for task in tasks:
                task["dataset_kwargs"]["cache_dir"] = cache
            found = simple_evaluate(
                model=model,
                tasks=list(tasks),
                task_manager=TaskManager(include_defaults=False),
                log_samples=False,
                bootstrap_iters=1000,
            )
        seconds = perf_counter() - began_s
    except BadInput:
        raise
    except (ValueError, LookupError, ArithmeticError, TypeError, StopIteration, OSError) as error:
        why = f"{type(error).__name__} {error}".strip()  # of a row that is not as the task says
        raise BadInput(f"lm-eval cannot use the tasks of {folder}: {why}") from error
    finally:
        opened.close()
    assert found is not None, "this is the only process"
    return TasksAnswer(
        model=opened.name,
        base=opened.base,
        tasks=str(folder),
        results=tuple(_results(found)),
        batch_rows=scores.most_rows,
        dtype=opened.loaded.precision.dtype,
        device=opened.device.type,
        placed=opened.placed,
        seconds=seconds,
    )


def _context(opened: OpenedModel) -> int | None:
    """Return the positions that the model has, if it says so."""
    found = getattr(opened.model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def _results(found: dict[str, Any]) -> Iterator[TaskResult]:
    """Yield lm-eval's results: keys are `METRIC,FILTER` and `METRIC_stderr,FILTER`."""
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            finite = isinstance(error, float) and math.isfinite(error)
            yield TaskResult(
                task=task,
                metric=metric if kind == "none" else f"{metric},{kind}",
                value=float(value),
                error=error if finite else None,
                higher_is_better=bool(
                    found.get("higher_is_better", {}).get(task, {}).get(metric, True)
                ),
                rows=int(found["n-samples"][task]["effective"]),
            )
