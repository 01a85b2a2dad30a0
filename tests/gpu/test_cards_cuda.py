"""Blocks dealt to two GPUs, and to four, compute what one GPU computes, bit for bit."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.core.device import multi_gpu_streams
from fluxtrain.events.trace.attribution import attribute
from fluxtrain.train.observe.timeline import StepCutter
from tests.between_blocks import BETWEEN, Model, assert_close, drawn, gradients
from tests.on_cards import assert_same, batch, llama, trained, wide, wrapped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
NEEDS_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four NVIDIA GPUs")
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
    monkeypatch.setattr(multi_gpu_streams, "_peers", {} if peer else {(0, 1): False, (1, 0): False})
    monkeypatch.setattr(multi_gpu_streams, "_PART_BYTES", 512)  # through the host in parts
    model = llama(6)
    other = copy.deepcopy(model)
    one = trained(model, None, device="cuda", steps=20, **how)
    two = trained(other, 2, device="cuda", steps=20, **how)
    assert_same(one, two)
    assert multi_gpu_streams._peers[0, 1] is peer


@pytest.mark.parametrize("dealing", [(0, 0, 1, 0, 0, 1), (1, 1, 1, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("how", PLACES[:6], ids=str)
def test_neighbours_on_one_gpu_compute_beside_each_other(
    how: dict[str, Any], dealing: tuple[int, ...]
) -> None:
    """Wide enough that kernels of both lanes are under way at once."""
    model = wide(6)
    other = copy.deepcopy(model)
    given = {"device": "cuda", "steps": 6, "chunk_rows": 1, **how}
    assert_same(trained(model, None, **given), trained(other, dealing, **given))


@NEEDS_FOUR
@pytest.mark.parametrize("how", PLACES, ids=str)
def test_four_gpus_have_one_gpus_bits(how: dict[str, Any]) -> None:
    model = llama(10)
    other = copy.deepcopy(model)
    given = {"device": "cuda", "steps": 10, "chunk_rows": 1, **how}
    assert_same(trained(model, None, **given), trained(other, 4, **given))


@pytest.mark.parametrize("cards", [2, pytest.param(4, marks=NEEDS_FOUR)])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("peer", [True, False], ids=["directly", "through the host"])
def test_a_head_in_order_on_all_gpus_has_the_bits_of_one(
    cards: int, frozen: bool, peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide enough that slopes are under way while others are computed, in more chunks of tokens
    than there are buffers."""
    pairs = itertools.permutations(range(cards), 2)
    monkeypatch.setattr(multi_gpu_streams, "_peers", {} if peer else dict.fromkeys(pairs, False))
    model = wide(4, vocabulary=24_000)
    model.lm_head.weight.requires_grad_(not frozen)
    other = copy.deepcopy(model)
    given: dict[str, Any] = {"device": "cuda", "steps": 6, "head_tokens": 11, "head": "whole"}
    one = trained(model, None, **given)
    assert_same(one, trained(other, cards, head_dealing="in_order", **given))


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_computes_between_blocks_gets_its_gradients(
    between: Callable[[Tensor], Tensor],
) -> None:
    one, two = (gradients(Model(between), cards, "cuda") for cards in (1, 2))
    assert len(one) == 10
    assert_close(two, one)


@pytest.mark.parametrize("gradients", [True, False])
def test_two_gpus_drop_out_what_one_would(gradients: bool) -> None:
    one, two = (drawn(cards, "cuda", gradients=gradients) for cards in (1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one[0], one[1])


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


def test_lanes_of_two_gpus_are_by_their_own_clocks_and_add_up_to_the_step() -> None:
    model = llama(6)
    engine = wrapped(model, 2, device="cuda")
    recorder = engine.device.recorder
    cutter, steps = StepCutter(recorder), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number in range(1, 7):
        recorder.begin_step(number)
        model(**batch(number)).loss.backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += cutter.ready()
    engine.flush()
    recorder.end_step()
    until_s = time.monotonic() + 30
    while recorder.notes and time.monotonic() < until_s:
        steps += cutter.ready()
        time.sleep(0.001)
    engine.close()
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        for kind in ("forward", "backward"):
            found = [one for one in step.intervals if (one.lane, one.kind) == ("gpu", kind)]
            where = {one.name: one.card for one in found if "layers" in one.name}
            assert where == {f"model.layers.{at}": at % 2 for at in range(6)}, kind
        for card in attribute(step).cards:
            assert card.busy_s["gpu"] + sum(card.waits_s.values()) == pytest.approx(step.length_s)
    for step in steps[2:]:  # a block's backward ends after that of the next block
        stops = {
            one.name: one.stop_s for one in step.intervals
            if (one.lane, one.kind) == ("gpu", "backward")
        }  # fmt: skip
        ends = [stops[f"model.layers.{at}"] for at in range(6)]
        assert all(later >= earlier - 1e-4 for earlier, later in zip(ends[1:], ends, strict=False))
