"""Blocks dealt to two GPUs compute what one GPU computes, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fluxtrain.device.among import streams
from tests.on_cards import assert_same, batch, llama, trained, wrapped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
PLACES: list[dict[str, Any]] = [
    {},
    {"resident_blocks": 3},
    {"device_groups": 4},
    {"activations": "host"},
    {"offload": "none"},
    {"blocks_without_recompute": 2, "resident_blocks": 3},
    {"embedding": "rows", "head": "chunks"},
]


@pytest.mark.parametrize("peer", [True, False], ids=["directly", "through the host"])
@pytest.mark.parametrize("how", PLACES, ids=str)
def test_weights_and_states_are_those_of_one_gpu(
    how: dict[str, Any], peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_peers", {} if peer else {(0, 1): False, (1, 0): False})
    model = llama(6)
    other = copy.deepcopy(model)
    one = trained(model, None, device="cuda", **how)
    two = trained(other, 2, device="cuda", **how)
    assert_same(one, two)
    assert streams._peers[0, 1] is peer


def test_both_gpus_compute_blocks_and_evaluation_agrees() -> None:
    model = llama(6)
    other = copy.deepcopy(model)
    wrapped(model, None, device="cuda")
    engine = wrapped(other, 2, device="cuda")
    assert [unit.card for unit in engine.units if unit.group.kind == "block"] == [0, 1] * 3
    with torch.no_grad():
        left, right = (one(**batch()).logits for one in (model, other))
    assert torch.equal(left, right)
    assert all(torch.cuda.memory_allocated(card) for card in (0, 1))
