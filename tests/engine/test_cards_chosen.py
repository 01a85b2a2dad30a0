"""Which cards `wrap` computes on, and which of what is asked is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.core.wrap import target
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.facts import Capacity
from fluxtrain.plan.request import PlacementRequest, RunRequest
from fluxtrain.units import GIB
from tests.on_cards import llama, wrapped


@pytest.mark.parametrize("cards", [0, -1, [], [0, 0], [-1], "2", 2.0, True, ["0"]])
def test_cards_that_cannot_be_are_refused(cards: Any) -> None:
    with pytest.raises(BadInput, match="cards is"):
        fluxtrain.wrap(llama(2), device="cpu", cards=cards)


def test_a_made_placement_for_other_cards_is_refused() -> None:
    model = llama(4)
    made = wrapped(model, 3).plan
    fluxtrain.unwrap(model)
    for cards in (2, 4):
        with pytest.raises(BadInput, match=f"cards is {cards}.*made for 3 cards"):
            fluxtrain.wrap(llama(4), device="cpu", cards=cards, placement=made)
    assert len(engine_of(fluxtrain.wrap(model, device="cpu", placement=made)).plan.cards) == 3
    fluxtrain.unwrap(model)


def test_of_all_gpus_those_are_taken_that_the_model_fits_on_and_others_do_not_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pretended GPUs with so many GiB free; by default and as asked."""
    model, devices = llama(6), [torch.device("cuda", at) for at in range(3)]
    facts = facts_of(model, "fp32", "plain")

    def taken(*free_gib: float, full: int | None = None, current: int = 0, **how: Any) -> list[int]:
        def free(_: Any, device: torch.device) -> Capacity:
            free_bytes = int(free_gib[device.index] * GIB)
            return Capacity(device_free_bytes=free_bytes, host_available_bytes=None)

        monkeypatch.setattr(target, "free_capacity", free)
        monkeypatch.setattr(target, "is_full", lambda free, total: total == full)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, device.index))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        request = RunRequest.of(PlacementRequest())
        _, used = target.placed(facts, model, devices, request, **how)
        return [device.index for device in used]

    nothing = 1e-6
    assert taken(8, 8, 8, all_of_them=False) == [0, 1, 2]
    assert taken(8, nothing, 8, all_of_them=False) == [0, 2]
    # what the model returns is where the code around it computes, whatever is free elsewhere
    assert taken(8, 10, 9, all_of_them=False) == [0, 1, 2]
    assert taken(8, 10, 9, current=2, all_of_them=False) == [2, 1, 0]
    assert taken(nothing, 9, 10, all_of_them=False) == [2, 1]
    assert taken(nothing, nothing, 8, all_of_them=False) == [2]
    assert taken(8, 8, 8, full=1, all_of_them=False) == [0, 2]
    with pytest.raises(DoesNotFit, match="card 1"):
        taken(8, nothing, 8)
