"""Measures a pass over the model before anybody waits for one, and how many prompts it may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from fluxtrain.hardware.gpu import Gpus
from fluxtrain.hardware.machine import read_machine
from fluxtrain.inference.opening.opened import OpenedModel
from fluxtrain.plan.facts import activation_estimate

MOST_ROWS = 64  # beyond them a pass is bound by computing, also on a GPU that streams
FIRST_TOKENS = 8
LOGITS_COPIES = 3  # in fp32: as they come, and for what chooses a token
SHARE = 0.5  # of the memory that is left, for prompts


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one token of an answer takes."""

    pass_s: float
    cache_bytes_per_token: int  # keys and values of one row


def measure(opened: OpenedModel, rows: int = 1) -> Measured:
    """Run the model on a few tokens, then on one more for each of `rows` rows, as answers do."""
    model: Any = opened.model
    ids = torch.zeros((rows, FIRST_TOKENS), dtype=torch.long, device=opened.device)
    last: dict[str, Any] = {}
    if "logits_to_keep" in signature(model.forward).parameters:
        last["logits_to_keep"] = 1
    with torch.no_grad():
        told = model(input_ids=ids, use_cache=True, **last)
        cache = told.get("past_key_values")
        held = sum(tensor.nbytes for tensor in _tensors(cache)) // (rows * FIRST_TOKENS)
        further = {} if cache is None else {"past_key_values": cache}
        _wait(opened)
        started_s = time.perf_counter()
        model(input_ids=ids[:, :1], use_cache=True, **last, **further)
        _wait(opened)
    return Measured(pass_s=time.perf_counter() - started_s, cache_bytes_per_token=held)


def rows_that_fit(
    opened: OpenedModel, measured: Measured, prompt_tokens: int, new_tokens: int
) -> int:
    """Return how many prompts a batch may take, by the memory that is free now."""
    config: Any = opened.loaded.config.get_text_config()
    hidden = int(config.hidden_size)
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    size = opened.loaded.model.dtype.itemsize
    row_bytes = (
        measured.cache_bytes_per_token * (prompt_tokens + new_tokens)
        + activation_estimate(hidden, wide, prompt_tokens, size)
        + LOGITS_COPIES * 4 * opened.loaded.embedding_rows
    )
    free = _free_bytes(opened)
    if free is None:
        return MOST_ROWS
    return max(1, min(MOST_ROWS, int(free * SHARE) // row_bytes))


def _free_bytes(opened: OpenedModel) -> int | None:
    if opened.device.type == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0] + cached
        budget = opened.engine.plan.budget_bytes
        left = free if budget is None else budget - torch.cuda.memory_allocated()
        return max(0, min(free, left))
    return read_machine(gpus=Gpus(gpus=(), driver=None, reason="not asked")).memory_available_bytes


def _tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache, whatever its class."""
    for layer in getattr(cache, "layers", ()):
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor))


def _wait(opened: OpenedModel) -> None:
    if opened.device.type == "cuda":
        torch.cuda.synchronize()
