"""How many slots the blocks stream through changes when copies begin, and no bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.core.memory.group import Group
from fluxtrain.core.wrap.engine import Engine, engine_of
from tests.wrap_with import wrap_with

LAYERS = 8


def wrapped(tiny: Any, slots: int | None, **placed: Any) -> tuple[nn.Module, Engine]:
    model = wrap_with(
        tiny("llama", torch.bfloat16, num_hidden_layers=LAYERS),
        device="cpu", offload="weights", chunk_rows=2, overlap=True,
        prefetch=slots - 1 if isinstance(slots, int) else slots, **placed,
    )  # fmt: skip
    return model, engine_of(model)


def trained(
    model: nn.Module, engine: Engine, batch: Any, *, in_backward: bool
) -> tuple[list[float], list[torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        loss = model(**batch(seed=step)).loss
        if in_backward:
            engine.begin_step_in_backward(optimizer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    fluxtrain.sync(model)
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    "placed",
    [{}, {"device_groups": 4, "resident_blocks": 2}, {"activations": "host", "resident_blocks": 3}],
    ids=["all stream", "some on the device, some resident", "some resident, boundaries away"],
)
@pytest.mark.thinned(1)
def test_any_number_of_slots_gives_the_same_bits(
    tiny: Any, batch: Any, placed: dict[str, Any], in_backward: bool
) -> None:
    found = []
    for slots in (None, 2, LAYERS):
        model, engine = wrapped(tiny, slots, optimizer_in_backward=in_backward, **placed)
        streamed = LAYERS - sum(
            g.placement.weights == "device" for g in engine.groups if g.kind == "block"
        )
        streamed -= engine.plan.totals.resident_blocks
        expected = min(slots or 3, streamed)
        assert len([s for s in engine.cards[0].window.slots if s.owner is None]) == expected
        found.append(trained(model, engine, batch, in_backward=in_backward))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(weights, found[0][1], strict=True))


def test_with_two_slots_the_next_streamed_block_is_asked_for_past_a_resident_one(
    tiny: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block with a slot of its own takes none from the others, and its turn none from theirs."""
    model, engine = wrapped(tiny, 2, resident_blocks=4)
    trained(model, engine, batch, in_backward=False)
    own = {slot.owner for slot in engine.cards[0].window.slots}
    blocks = [unit for unit in engine.units if unit.group.kind == "block"]
    shared = [unit for unit in blocks if unit.group not in own]
    pairs = [
        (unit, later) for unit, later in pairwise(shared)
        if blocks.index(later) - blocks.index(unit) > 1
    ]  # fmt: skip
    assert pairs, "a resident block stands between two streamed ones"
    asked: list[Group] = []
    whole = engine.cards[0].window.prefetch

    def noted(group: Group, keep: Any = ()) -> bool:
        asked.append(group)
        return whole(group, keep)

    monkeypatch.setattr(engine.cards[0].window, "prefetch", noted)
    for unit, later in pairs:
        asked.clear()
        engine.cards[0].ahead._copy("forward", unit, engine.plan.slots)
        assert later.group in asked
        assert [group for group in asked if group not in own] == [later.group]
    fluxtrain.sync(model)


def uploaded_bytes(model: nn.Module, engine: Engine, batch: Any) -> int:
    """Bytes that the second of two steps uploads."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(2):
        before = engine.traffic().h2d_bytes
        model(**batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.traffic().h2d_bytes - before


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("grad", [False, True], ids=["evaluation", "forwards without a backward"])
@pytest.mark.thinned(2)
def test_forwards_without_a_backward_cost_later_steps_no_upload(
    tiny: Any, batch: Any, slots: int, grad: bool
) -> None:
    """The order of a step is another than that of an evaluation, which goes back to the first
    block after the last one."""
    model, engine = wrapped(tiny, slots)
    calm_bytes = uploaded_bytes(model, engine, batch)
    with torch.set_grad_enabled(grad):
        for seed in range(3):
            model(**batch(seed=seed))
    assert uploaded_bytes(model, engine, batch) == calm_bytes
