"""Measures a pass over the model before anybody waits for one, and how many prompts it may take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from fluxtrain.machine.gpu import Gpus
from fluxtrain.machine.machine import read_machine
from fluxtrain.plan.facts import activation_estimate
from fluxtrain.results.opened import OpenedModel

MOST_ROWS = 64  # beyond them a pass is bound by computing, also on a GPU that streams
FIRST_TOKENS = 8
LOGITS_COPIES = 3  # in fp32: as they come, and for what chooses a token
SHARE = 0.5  # of the memory that is left, for prompts


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one token of an answer takes."""

    pass_s: float
    # keys and values of one row, by device: a block's are where it computes
    cache_bytes_per_token: Mapping[torch.device, int]


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
        held: Counter[torch.device] = Counter()
        for tensor in _tensors(cache):
            held[tensor.device] += tensor.nbytes
        further = {} if cache is None else {"past_key_values": cache}
        _wait(opened)
        started_s = time.perf_counter()
        model(input_ids=ids[:, :1], use_cache=True, **last, **further)
        _wait(opened)
    passed_s = time.perf_counter() - started_s
    each = {device: size // (rows * FIRST_TOKENS) for device, size in held.items()}
    return Measured(pass_s=passed_s, cache_bytes_per_token=each)


def rows_that_fit(
    opened: OpenedModel, measured: Measured, prompt_tokens: int, new_tokens: int
) -> int:
    """Return how many prompts a batch may take, by the memory that is free now."""
    config: Any = opened.loaded.config.get_text_config()
    hidden = int(config.hidden_size)
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    size = opened.loaded.model.dtype.itemsize
    tokens = prompt_tokens + new_tokens
    activations_bytes = activation_estimate(hidden, wide, prompt_tokens, size)
    logits_bytes = LOGITS_COPIES * 4 * opened.loaded.embedding_rows  # on the first card
    most = MOST_ROWS
    cards = {card.torch_device: card.number for card in reversed(opened.engine.cards)}
    for device, number in cards.items():
        cache_bytes = measured.cache_bytes_per_token.get(device, 0) * tokens
        row_bytes = cache_bytes + activations_bytes + (0 if number else logits_bytes)
        free = _free_bytes(device, opened.engine.plan.budget_of(number))
        if free is not None:
            most = min(most, int(free * SHARE) // row_bytes)
    return max(1, most)


def _free_bytes(device: torch.device, budget_bytes: int | None) -> int | None:
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
        left = free if budget_bytes is None else budget_bytes - held
        return max(0, min(free, left))
    return read_machine(gpus=Gpus(gpus=(), driver=None, reason="not asked")).memory_available_bytes


def _tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache, whatever its class."""
    for layer in getattr(cache, "layers", ()):
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor))


def _wait(opened: OpenedModel) -> None:
    if opened.device.type == "cuda":
        torch.cuda.synchronize(opened.device)
