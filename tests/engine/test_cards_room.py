"""Memory that runs out on one of several cards: that card's part is given up first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.errors import DeviceFailed
from fluxtrain.live.cards.rungs import card_rungs
from fluxtrain.live.out_of_memory import gpu_of
from fluxtrain.live.resettle import resettle
from fluxtrain.methods.causal_lm import CausalLM
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.facts import RowFacts
from fluxtrain.telemetry import events as ev
from fluxtrain.wrapping.grouping import facts_of
from tests.engine.test_train_cards import SIZES, MakeConfig, losses, run
from tests.on_cards import assert_same, batch, llama, wrapped

ON_ONE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.00 GiB"
ROW = RowFacts(
    hidden=32, vocabulary=96, sequence_length=10, dtype_bytes=2, activation_bytes=1 << 16
)


def test_the_card_is_read_from_the_error() -> None:
    assert gpu_of(torch.OutOfMemoryError(ON_ONE)) == 1
    assert gpu_of(torch.OutOfMemoryError(ON_ONE.replace("GPU 1", "GPU 12"))) == 12
    assert gpu_of(MemoryError("no room")) is None


def down(placement: Placement, facts: Any, index: int) -> list[tuple[str, int, int]]:
    """Give up all that a card has alone; return what each rung changed."""
    told: list[tuple[str, int, int]] = []
    while True:
        rung = next(card_rungs(facts, placement, index), None)
        if rung is None:
            return told
        others = [
            (before, after)
            for before, after in zip(placement.groups, rung.placement.groups, strict=True)
            if before.card != index
        ]
        assert all(before == after for before, after in others), "only this card's rows change"
        more_bytes = rung.placement.need.host_bytes - placement.need.host_bytes
        assert more_bytes == rung.to_host_bytes, "what moves to the host is told there"
        told.append((rung.name, rung.before, rung.after))
        placement = rung.placement
        assert len(told) < 50


@pytest.mark.parametrize("index", [0, 1])
def test_a_card_gives_up_activations_then_blocks_then_parts(index: int) -> None:
    model = llama(12)
    engine = wrapped(model, 2, device_groups=2, resident_blocks=3, blocks_without_recompute=2)
    facts = facts_of(model, "fp32", "plain")
    told = down(engine.plan, facts, index)
    names = [name for name, _, _ in told]
    assert names == sorted(names, key=["blocks_without_recompute", "resident_blocks",
                                       "device_groups"].index)  # fmt: skip
    assert set(names) == {"blocks_without_recompute", "resident_blocks", "device_groups"}
    assert all(after < before for _, before, after in told)
    assert all(told[-1][2] == 0 for _ in told)
    assert (
        list(card_rungs(facts, engine.plan, 7)) == [] == list(card_rungs(facts, engine.plan, None))
    )
    fluxtrain.unwrap(model)


def test_a_gpus_block_inputs_go_to_the_host_first() -> None:
    model = llama(12)
    engine = wrapped(model, 2, resident_blocks=3)
    facts, plan = replace(facts_of(model, "fp32", "plain"), row=ROW), engine.plan
    rung = next(card_rungs(facts, plan, 1))
    assert (rung.name, rung.before, rung.after) == ("activations_on_device", 6, 0)
    assert rung.to_host_bytes == 6 * plan.layout.batch_rows * ROW.block_input_bytes
    assert rung.placement.need.host_bytes == plan.need.host_bytes + rung.to_host_bytes
    for before, after in zip(plan.groups, rung.placement.groups, strict=True):
        moved = before.card == 1 and before.kind == "block"
        assert after.activations == ("inputs_on_host" if moved else "inputs_on_device")
    assert next(card_rungs(facts, rung.placement, 1)).name == "resident_blocks"
    for how in ({"has_gpu": False}, {"backward": False}):
        assert next(card_rungs(facts, plan, 1, **how)).name == "resident_blocks"
    fluxtrain.unwrap(model)


def test_blocks_that_all_stay_get_slots_when_some_of_them_stream() -> None:
    model = llama(12)
    engine = wrapped(model, 2, resident_blocks=12)
    plan = engine.plan
    cards = tuple(replace(card, slots=0) for card in plan.cards)
    rung = next(card_rungs(facts_of(model, "fp32", "plain"), replace(plan, cards=cards), 1))
    assert (rung.name, rung.before, rung.after) == ("resident_blocks", 6, 3)
    assert [card.slots for card in rung.placement.cards] == [0, 2]
    few = replace(
        plan,
        cards=cards,
        groups=tuple(
            replace(row, resident=row.resident and (row.card == 0 or at < 4))
            for at, row in enumerate(plan.groups)
        ),
    )
    assert list(card_rungs(facts_of(model, "fp32", "plain"), few, 1)) == [], (
        "two slots would take what two blocks free"
    )
    fluxtrain.unwrap(model)


def trained(giving_up: bool) -> dict[str, torch.Tensor]:
    """Train on two cards; card 1 gives up a rung after each step."""
    torch.manual_seed(0)
    model = llama(16)
    how: dict[str, Any] = {"device_groups": 3, "resident_blocks": 4, "blocks_without_recompute": 3}
    engine = wrapped(model, 2, **how)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    facts, rungs = replace(facts_of(model, "fp32", "plain"), row=ROW), 0
    for step in range(8):
        model(**batch(step)).loss.backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        rung = next(card_rungs(facts, engine.plan, 1), None)
        assert rung is None or step or rung.name == "activations_on_device"
        if giving_up and rung is not None:
            resettle(engine, rung.placement)
            rungs += 1
    assert not giving_up or rungs >= 4
    fluxtrain.sync(model)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    fluxtrain.unwrap(model)
    return found


def test_what_a_card_gives_up_keeps_every_bit() -> None:
    assert_same(trained(False), trained(True))


def test_a_step_that_ran_out_on_one_card_is_done_again_with_less_there(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ("parallel.cards=2", "placement.chunk_rows=2", "placement.device_groups=5",
           "placement.offload=weights")  # fmt: skip
    whole = run(run_config(**SIZES), tmp_path / "whole", *how)
    loss = CausalLM.loss
    failed: list[int] = []

    def ran_out(self: CausalLM, *given: Any) -> Any:
        found = loss(self, *given)
        if len(failed) < 1:
            failed.append(1)
            raise torch.OutOfMemoryError(ON_ONE)
        return found

    monkeypatch.setattr(CausalLM, "loss", ran_out)
    short = run(run_config(**SIZES), tmp_path / "short", *how)
    changes = [event for event in short if isinstance(event, ev.ChangeApplied)]
    assert [(c.name, c.card, c.why, c.same_bits) for c in changes] == [
        ("device_groups", 1, "memory", True)
    ]
    assert changes[0].step_s is None, "no figure of a machine with one card"
    losses = [[e.loss for e in events if isinstance(e, ev.StepFinished)] for events in
              (whole, short)]  # fmt: skip
    assert losses[0] == losses[1] and losses[0]


def test_a_card_that_fails_ends_the_run_with_its_words_and_the_checkpoint(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ("parallel.cards=2", "train.checkpoint_every=2")
    whole = run(run_config(**SIZES), tmp_path / "whole", *how)
    loss = CausalLM.loss
    made: list[int] = []

    def fails(self: CausalLM, *given: Any) -> Any:
        made.append(1)
        if len(made) == 5:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return loss(self, *given)

    monkeypatch.setattr(CausalLM, "loss", fails)
    with pytest.raises(DeviceFailed, match="uncorrectable ECC") as caught:
        run(run_config(**SIZES), tmp_path / "run", *how)
    assert "checkpoint step-00000004 stands" in str(caught.value)
    assert f"fluxtrain train --resume {tmp_path / 'run'}" in str(caught.value)
    told = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (told["exit_code"], told["kind"]) == (7, "DeviceFailed")
    monkeypatch.setattr(CausalLM, "loss", loss)
    again = run(run_config(**SIZES), tmp_path / "run", resume=str(tmp_path / "run"))
    assert losses(again)[-1] == losses(whole)[-1]
