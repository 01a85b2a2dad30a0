"""Device memory that runs out for real: torch may take less in the middle of a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from tests.on_cards import ROWS, batch, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MIB = 1 << 20


@contextmanager
def held_to(more_bytes: int) -> Iterator[None]:
    """Let this process take so much more of the GPU than what is allocated now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_allocated() + more_bytes
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def long_batch(length: int = 2048) -> dict[str, Any]:
    ids = batch()["input_ids"].repeat(1, length // batch()["input_ids"].shape[1])
    return {"input_ids": ids, "labels": ids}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model(**long_batch()).loss.backward()
    engine_of(model).flush()
    return {name: p.grad.float().cpu() for name, p in model.named_parameters()}


def loss(model: Any) -> float:
    with torch.no_grad():
        return float(model(**long_batch()).loss)


def first_peak_bytes(model: Any, rows: int, run: Callable[[Any], Any]) -> tuple[Any, int]:
    """What the model gives with `rows` computed at once, and what its first run takes."""
    fluxtrain.wrap(model, device="cuda", cards=1, chunk_rows=rows, offload="weights")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = run(model)
    peak = torch.cuda.max_memory_allocated() - before
    fluxtrain.unwrap(model)
    torch.cuda.empty_cache()
    return found, peak


def with_little_memory(model: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What a model gives, and what another one like it gives that is wrapped for all rows at once
    and has the memory for two. What stands behind the blocks is computed whole, also where torch
    keeps memory in pieces: its largest tensor must have room beside them."""
    other = copy.deepcopy(model)
    wanted, whole_bytes = first_peak_bytes(copy.deepcopy(model), ROWS, run)
    _, two_bytes = first_peak_bytes(model, 2, run)
    room_bytes = int(1.1 * two_bytes) + 192 * MIB
    assert room_bytes < whole_bytes
    fluxtrain.wrap(other, device="cuda", cards=1, chunk_rows=ROWS, offload="weights")
    with held_to(room_bytes):
        return wanted, run(other)


def test_a_step_with_little_memory_has_the_gradients_of_one_with_enough(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted, found = with_little_memory(wide(4), gradients)
    assert "device memory ran out" in caplog.text
    for name, gradient in wanted.items():
        scale = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 2e-2 * scale, name


def test_evaluation_with_little_memory_has_the_loss_of_one_with_enough(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted, found = with_little_memory(wide(4).eval(), loss)
    assert "device memory ran out" in caplog.text
    assert found == pytest.approx(wanted, rel=2e-3)
