"""Device memory that runs out for real: torch may take less in the middle of a loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.wrapping.engine import engine_of
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


@pytest.mark.parametrize("room_mib", [700, 500, 350])
def test_a_step_with_little_memory_has_the_gradients_of_one_with_enough(
    room_mib: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = wide(4)
    other = copy.deepcopy(model)
    for one in (model, other):
        fluxtrain.wrap(one, device="cuda", chunk_rows=ROWS, offload="weights")
    wanted = gradients(model)
    assert engine_of(model).chunk_rows == ROWS
    with held_to(room_mib * MIB):
        found = gradients(other)
    assert "device memory ran out" in caplog.text
    for name, gradient in wanted.items():
        scale = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 2e-2 * scale, name


def test_evaluation_with_little_memory_has_the_loss_of_one_with_enough() -> None:
    model = wide(4).eval()
    fluxtrain.wrap(model, device="cuda", chunk_rows=ROWS, offload="weights")
    with torch.no_grad():
        wanted = model(**long_batch()).loss
        with held_to(400 * MIB):
            found = model(**long_batch()).loss
    assert found.item() == pytest.approx(wanted.item(), rel=2e-3)
