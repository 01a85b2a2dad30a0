"""Optimizer states on disk on a GPU: the bits of a training that has them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.core.device import disk, spill
from fluxtrain.plan import states as state_formats
from fluxtrain.plan.group_placement import Kind
from fluxtrain.plan.states import StateFormat
from tests.engine.test_states_on_disk import (
    ALSO,
    LEAST,
    RECORD_BYTES,
    adamw,
    assert_same,
    on_disk,
    shards,
    train,
    wrapped,
)
from tests.gpu.exactly import exactly

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_and_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(spill, "RECORD_BYTES", RECORD_BYTES)
    for module in (spill, disk):
        monkeypatch.setattr(module, "BLOCK_BYTES", 8 << 10)
    monkeypatch.setattr(state_formats, "LEAST_LOW_BIT", LEAST)
    with exactly():
        yield


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("also", ALSO, ids=len)
def test_every_format_has_the_bits_of_memory(
    tmp_path: Path, states: StateFormat, dtype: torch.dtype, also: Sequence[Kind]
) -> None:
    models = [wrapped(tmp_path, states, at, dtype, device="cuda", also=also) for at in (0, -1)]
    losses = [train(model, adamw(model), range(6)) for model in models]
    assert losses[0] == losses[1]
    assert_same(*map(shards, models))
    assert on_disk(models[1]).spill.written_bytes > 0


@pytest.mark.parametrize(
    "how",
    [
        {"passes": 3},
        {"norm": None},
        {"norm": None, "also": ("weights",)},
        {"device_groups": 2},
        {"device_groups": 2, "also": ("gradients", "weights")},
        {"deferred_moments": True},
        {"resident_blocks": 1, "also": ("gradients", "weights")},
    ],
    ids=str,
)
def test_every_way_to_step_has_the_bits_of_memory(tmp_path: Path, how: dict[str, Any]) -> None:
    stepping = {key: how.pop(key) for key in ("passes", "norm") if key in how}
    models = [wrapped(tmp_path, "fp32", n, device="cuda", **how) for n in (0, -1)]
    losses = [train(model, adamw(model), range(6), **stepping) for model in models]
    assert losses[0] == losses[1]
    assert_same(*map(shards, models))
