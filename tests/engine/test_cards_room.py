"""Memory that runs out on one of several cards: that card's part is given up first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.core.wrap.engine import Engine
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import DeviceFailed
from fluxtrain.events import events as ev
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.plan.facts import RowFacts
from fluxtrain.train.live.apply_placement import apply_placement
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.out_of_memory import FallbackStep, fallback_steps, gpu_of
from tests.engine.runs import MakeConfig, losses, run
from tests.engine.test_train_cards import SIZES
from tests.on_cards import assert_same, batch, llama, wrapped

ON_ONE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.00 GiB"
ROW = RowFacts(
    hidden=32, vocabulary=96, sequence_length=10, dtype_bytes=2, activation_bytes=1 << 16
)


def test_the_card_is_read_from_the_error() -> None:
    assert gpu_of(torch.OutOfMemoryError(ON_ONE)) == 1
    assert gpu_of(torch.OutOfMemoryError(ON_ONE.replace("GPU 1", "GPU 12"))) == 12
    assert gpu_of(MemoryError("no room")) is None


def steps_on(run: LiveRun, index: int | None, **how: bool) -> list[FallbackStep]:
    """What one card can give up, without the chunk that all compute with."""
    found = fallback_steps(run, run.planned, index, **how)
    return [step for step in found if step.name != "chunk_rows"]


def down(run: LiveRun, index: int) -> list[tuple[str, int, int]]:
    """Give up all that a card has alone; return what each step changed."""
    told: list[tuple[str, int, int]] = []
    while steps := steps_on(run, index):
        step = steps[0]
        after_it = run.left_with(step.settings)
        for before, after in zip(run.placement.groups, after_it.placement.groups, strict=True):
            assert before.card == index or before == after, "only this card's rows change"
        assert step.card == index
        told.append((step.name, step.before, step.after))
        run = after_it
        assert len(told) < 50
    return told


def with_rows(engine: Engine, model: torch.nn.Module) -> LiveRun:
    """The engine's run, with batches of 4 rows of known sizes."""
    facts = replace(facts_of(model, "fp32", "plain"), row=ROW)
    layout = replace(engine.plan.layout, batch_rows=4)
    return LiveRun(facts, replace(engine.plan, layout=layout), has_gpu=True)


@pytest.mark.parametrize("index", [0, 1])
def test_a_card_gives_up_activations_then_blocks_then_groups(index: int) -> None:
    model = llama(12)
    engine = wrapped(model, 2, device_groups=2, resident_blocks=3, blocks_without_recompute=2)
    run = LiveRun(facts_of(model, "fp32", "plain"), engine.plan, has_gpu=True)
    told = down(run, index)
    names = [name for name, _, _ in told]
    order = ["blocks_without_recompute", "resident_blocks", "device_groups"]
    assert names == sorted(names, key=order.index) and set(names) == set(order)
    assert all(after < before for _, before, after in told)
    assert steps_on(run, 7) == [] == steps_on(run, None)
    last = list(fallback_steps(run, run.planned, index))[-1]
    assert (last.name, last.card) == ("chunk_rows", None), "it changes bits, on every card"
    fluxtrain.unwrap(model)


def test_a_gpus_block_inputs_go_to_the_host_first() -> None:
    model = llama(12)
    engine = wrapped(model, 2, resident_blocks=3)
    run = with_rows(engine, model)
    step = steps_on(run, 1)[0]
    assert (step.name, step.before, step.after) == ("activations_on_device", 6, 0)
    left = run.left_with(step.settings)
    moved = left.placement.need.host_bytes - run.placement.need.host_bytes
    assert moved >= 6 * 4 * ROW.block_input_bytes
    for before, after in zip(engine.plan.groups, left.placement.groups, strict=True):
        there = "inputs_on_host" if before.card == 1 else "inputs_on_device"
        assert after.activations == there
    assert steps_on(left, 1)[0].name == "resident_blocks"
    assert steps_on(replace(run, has_gpu=False), 1)[0].name == "resident_blocks"
    assert steps_on(run, 1, backward=False)[0].name == "resident_blocks"
    fluxtrain.unwrap(model)


def trained(giving_up: bool) -> dict[str, torch.Tensor]:
    """Train on two cards; card 1 gives something up after each step."""
    torch.manual_seed(0)
    model = llama(12)
    how: dict[str, Any] = {"device_groups": 3, "resident_blocks": 4, "blocks_without_recompute": 3}
    engine = wrapped(model, 2, **how)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    run = with_rows(engine, model)
    given_up = 0
    for step in range(6):
        model(**batch(step)).loss.backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps = steps_on(run, 1)
        if giving_up and steps:
            run = run.left_with(steps[0].settings)
            apply_placement(engine, run.placement)
            given_up += 1
    assert not giving_up or given_up >= 4
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
