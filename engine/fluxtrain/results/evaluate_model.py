"""Evaluates a model on data: the mean loss over its tokens, and the perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from fluxtrain.config.schema import RunConfig, validate
from fluxtrain.config.text import apply_overrides
from fluxtrain.data.reading.request import DEMO, read_request
from fluxtrain.data.rendering.named import use_template
from fluxtrain.errors import BadInput, Diverged
from fluxtrain.events.answers.answers import EvaluationAnswer
from fluxtrain.methods.method import method_of
from fluxtrain.methods.objective import Part, Task
from fluxtrain.results.model_request import FoundModel, ModelRequest, find_model
from fluxtrain.results.opened import OpenedModel, open_model
from fluxtrain.train.checkpoint.recovery import may_keep_tokens
from fluxtrain.train.evaluate import Evaluation, evaluate
from fluxtrain.train.placing.row_length import samples_of, with_row_length
from fluxtrain.units import duration_text

Tell = Callable[[str], None]

BATCH_TOKENS = 16_384  # a batch of so many keeps a GPU busy while a block is copied
MOST_ROWS = 64
# In fp32. So many are computed whole, and the loss by the model's own function: the same bits as
# without FluxTrain. More are fused with the loss, a chunk at a time.
WHOLE_LOGITS_BYTES = 256 << 20
_LARGEST_EXPONENT = 709.0  # of a float


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The options of the command line."""

    model: ModelRequest
    data: str | None = None  # None: what the run held out
    rows: int | None = None  # of a batch
    sequence_length: int | None = None
    overrides: tuple[str, ...] = ()  # KEY=VALUE of the section `data`

    def check_values(self) -> None:
        """Raise BadInput for a value that is out of its bounds."""
        if self.rows is not None and self.rows < 1:
            raise BadInput(f"--rows is {self.rows}: use at least 1, or leave it out")
        for override in self.overrides:
            if not override.startswith("data."):
                raise BadInput(f"--set {override}: only settings of the data, as data.format=plain")


def evaluate_model(request: EvaluationRequest, tell: Tell) -> EvaluationAnswer:
    """Compute the loss; `tell` is called with the progress.

    Raises BadInput, DoesNotFit, or Diverged where the loss is not finite.
    """
    request.check_values()
    request.model.check_values()
    found = find_model(request.model.named, request.model.step)
    config = _config(request, found)
    _refuse_missing_data(config)
    opened = open_model(request.model, tell)
    try:
        return _evaluated(request, config, opened, tell)
    finally:
        opened.close()


def _config(request: EvaluationRequest, found: FoundModel) -> RunConfig:
    """Return the settings of the data: the run's own, changed by the options."""
    if request.data is None and found.run is None:
        raise BadInput(
            f"{request.model.named} is no run, which knows what it held out: name the data as well"
        )
    content: dict[str, Any] = {} if found.run is None else found.run.model_dump(mode="json")
    data: dict[str, Any] = dict(content.get("data", {}))
    if request.data is not None:
        data |= {"path": request.data, "held_out": 0.0, "held_out_path": None}
        if found.run is None:
            data |= {"token_cache": "off"}
    if not may_keep_tokens(data.get("token_cache", "auto")):
        data |= {"token_cache": "off"}  # only the run's folder asks for it
    if request.sequence_length is not None:
        data["sequence_length"] = request.sequence_length
    content["data"] = data
    train = content.get("train", {})  # what needs evaluations while it trains needs none now
    content["train"] = {**train, "early_stopping_patience": None, "final_model": "last"}
    return validate(apply_overrides(content, list(request.overrides)), "the command line")


def _refuse_missing_data(config: RunConfig) -> None:
    """Raise BadInput for missing data, before the model is read."""
    if config.data.path != DEMO:
        read_request(config.data.model_dump()).corpus()


def _evaluated(
    request: EvaluationRequest, config: RunConfig, opened: OpenedModel, tell: Tell
) -> EvaluationAnswer:
    use_template(opened.tokenizer, config.data.chat_template)
    row_tokens = _row_tokens(config, opened)
    data = config.data.model_copy(update={"sequence_length": row_tokens})
    config = config.model_copy(update={"data": data})
    task = method_of(config).task(config, opened.loaded, tell)
    part: Part = "trained" if request.data is not None else "held_out"
    if not (rows := task.rows(part)):
        raise BadInput(
            f"{opened.name} held nothing of {task.source} out: name the data to evaluate on"
        )
    started_s = perf_counter()
    batch_rows = request.rows or max(1, min(MOST_ROWS, BATCH_TOKENS // row_tokens, rows))
    result, count = _mean(opened, task, part, batch_rows, row_tokens, tell)
    if not math.isfinite(result.loss):
        dtype = opened.loaded.precision.dtype
        wider = "" if dtype == "float32" else "use --dtype fp32, and if that says the same, "
        raise Diverged(
            f"the loss of {opened.name} on {task.source} is {result.loss}, computed in {dtype}: "
            f"{wider}use an earlier checkpoint, or download the model again: its training diverged "
            "or its files were changed"
        )
    return EvaluationAnswer(
        model=opened.name,
        base=opened.base,
        data=task.source if part == "trained" else f"held out of {task.source}",
        loss=result.loss,
        perplexity=math.exp(result.loss) if result.loss < _LARGEST_EXPONENT else None,
        tokens=result.count,
        rows=rows,
        sequence_length=row_tokens,
        batch_rows=count,
        dtype=opened.loaded.precision.dtype,
        device=opened.device.type,
        placed=opened.placed,
        seconds=perf_counter() - started_s,
        notes=tuple(task.notes(part)),
    )


def _mean(
    opened: OpenedModel, task: Task[Any], part: Part, count: int, row_tokens: int, tell: Tell
) -> tuple[Evaluation, int]:
    """Evaluate in batches of `count` rows, half as many each time device memory runs out; return
    how many they were as well."""
    while True:
        logits_bytes = 4 * count * row_tokens * opened.loaded.embedding_rows
        fused = logits_bytes > WHOLE_LOGITS_BYTES
        try:
            with opened.engine.evaluating() if fused else nullcontext():
                batches = _telling(task, part, count, row_tokens, tell)
                result = evaluate(task.objective, opened.model, batches)
            assert result is not None, "there are rows"
            return result, count
        except torch.OutOfMemoryError:
            if count == 1:
                raise
        tell(f"device memory ran out with {count} rows a batch: again with {-(-count // 2)}")
        count = -(-count // 2)


def _row_tokens(config: RunConfig, opened: OpenedModel) -> int:
    """Choose the length of rows as training does; less where there is less data than a row."""
    if config.data.sequence_length != "auto":
        return config.data.sequence_length
    if config.data.path == DEMO:
        return with_row_length(config)[0].data.row_tokens
    first = samples_of(config, opened.tokenizer, opened.loaded.config)
    chosen = with_row_length(config, first)[0].data.row_tokens
    count = int(first.tokens.starts[-1])
    return max(2, min(chosen, count)) if first.share >= 1 else chosen


def _telling(task: Task[Any], part: Part, count: int, row_tokens: int, tell: Tell) -> Iterator[Any]:
    """Yield the batches; say how long all take when the first one is done, and the progress."""
    batches = -(-task.rows(part) // count)
    began_s = told_s = perf_counter()
    for done, batch in enumerate(task.in_order(part, count)):
        now_s = perf_counter()
        if done == 1 or (done > 1 and now_s - told_s >= 3.0):
            each_s = (now_s - began_s) / done
            tell(
                f"{done} of {batches} batches of {count} x {row_tokens} tokens, "
                f"{duration_text(each_s)} each: about {duration_text(each_s * (batches - done))} "
                "to go"
            )
            told_s = now_s
        yield batch
