"""`wrap` takes a made placement as it is: nothing is planned again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.core.wrap import target
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import BadInput
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.group_placement import GroupPlacement
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import PlacementRequest
from tests.placements import placement_of


def placed(model: nn.Module, **counts: Any) -> Placement:
    facts = facts_of(model)
    layout = Layout(**{"offload": "weights", "chunk_rows": 2, **counts})
    return placement_of(facts, layout, footprint(facts, layout, has_gpu=False))


def test_the_engine_follows_every_row_and_nothing_is_planned(
    tiny: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "place", None)
    model = tiny("llama", torch.bfloat16, num_hidden_layers=6)
    counts = {"device_groups": 2, "resident_blocks": 2, "blocks_without_recompute": 2}
    plan = placed(model, **counts, activations="host", activations_on_device=1)
    engine = engine_of(fluxtrain.wrap(model, device="cpu", placement=plan))
    assert engine.plan is plan
    assert [group.placement for group in engine.groups] == list(plan.groups)
    owned = {slot.owner.name for slot in engine.cards[0].window.slots if slot.owner is not None}
    assert owned == {row.name for row in plan.groups if row.resident}
    kept = [unit.name for unit in engine.units if not unit.recomputes]
    assert kept == [row.name for row in plan.groups if row.activations == "kept"]
    waits = [unit.name for unit in engine.units if unit.offloads_inputs]
    assert waits == [row.name for row in plan.groups if row.activations == "inputs_on_host"]
    model(**batch()).loss.backward()


def test_what_a_made_placement_has_already_cannot_be_asked_beside_it(tiny: Any) -> None:
    model = tiny("llama")
    for beside in ({"offload": "max"}, {"budget_gib": 2.0}, {"optimizer_in_backward": True}):
        with pytest.raises(BadInput, match=f"{next(iter(beside))} is part of the placement"):
            fluxtrain.wrap(model, device="cpu", placement=placed(model), **beside)


@pytest.mark.parametrize("wrong", ["weights", {"offload": "weights"}, 3, PlacementRequest], ids=str)
def test_a_placement_of_another_type_is_refused_with_what_to_give(tiny: Any, wrong: Any) -> None:
    with pytest.raises(BadInput, match=r"placement is .*: give a fluxtrain\.PlacementRequest"):
        fluxtrain.wrap(tiny("llama"), device="cpu", placement=wrong)


def test_a_placement_of_another_model_or_for_what_is_not_there_yet_is_refused(tiny: Any) -> None:
    model = tiny("llama", num_hidden_layers=4)
    other = placed(tiny("llama", num_hidden_layers=3))
    with pytest.raises(BadInput, match="has 6 groups and the model has 7"):
        fluxtrain.wrap(model, device="cpu", placement=other)
    plan = placed(model)
    on_disk = replace(plan.groups[1], weights="disk")
    assert isinstance(on_disk, GroupPlacement)
    with pytest.raises(BadInput, match="cannot live on disk here"):
        rows = (plan.groups[0], on_disk, *plan.groups[2:])
        fluxtrain.wrap(model, device="cpu", placement=replace(plan, groups=rows))
    fluxtrain.wrap(model, device="cpu", placement=plan)  # nothing is left behind
