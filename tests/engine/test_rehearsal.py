"""Blocks at home take whole steps before a training, and what they took is told apart."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import fluxtrain
from fluxtrain.errors import DoesNotFit
from fluxtrain.memory.boundary import BoundaryPark
from fluxtrain.memory.window import Window
from fluxtrain.plan.facts import GroupFacts
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.states import StateFormat
from fluxtrain.plan.updates import host_update, rate_of_update
from fluxtrain.stream.blocks import take_apart
from fluxtrain.train import rehearsal as rehearsal_module
from fluxtrain.train.rehearsal import Kind, Rehearsed, _between, _one_to_next, rehearse
from tests.engine.trial_rows import batch_of

Tiny = Callable[..., PreTrainedModel]
CPU = torch.device("cpu")


def played(
    model: PreTrainedModel, states: StateFormat = "fp32", *, eager: bool = False
) -> tuple[dict[Kind, Rehearsed], GroupFacts]:
    found = rehearse(model, batch_of(2), CPU, states, None, eager=eager)
    assert found is not None
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_every_kind_of_steps_is_made_and_the_model_is_as_before(tiny: Tiny, family: str) -> None:
    model = tiny(family, torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds, block = played(model)
    assert set(kinds) == {"alone", "parked", "whole", "passes"}
    eager, _ = played(model, eager=True)
    assert set(eager) == {"alone", "parked", "eager"}
    kinds |= {"eager": eager["eager"]}
    for kind, told in kinds.items():
        assert told.forward_s > 0
        assert told.backward_s > told.forward_s / 2  # which it computes again
        assert (told.update_s is None) == (kind in ("alone", "parked"))
        assert (told.moments_s is None) == (kind != "passes")
    assert block.kind == "block" and block.trained
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_block_is_at_home_also_where_the_device_has_room_for_all(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap, asked = fluxtrain.wrap, []

    def watched(mini: torch.nn.Module, **wishes: object) -> torch.nn.Module:
        asked.append(wishes)
        return wrap(mini, **wishes)  # type: ignore[arg-type]

    monkeypatch.setattr(fluxtrain, "wrap", watched)
    played(tiny("llama", torch.bfloat16))
    (wishes,) = asked
    assert (wishes["device_groups"], wishes["resident_blocks"]) == (0, 0)


def test_boundaries_go_home_in_the_steps_that_try_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked: list[bool] = []
    park = BoundaryPark.park
    step = rehearsal_module._Stage._step

    def watched(self: BoundaryPark, *args: object) -> object:
        parked[-1] = True
        return park(self, *args)  # type: ignore[arg-type]

    def counted(self: rehearsal_module._Stage, kind: Kind) -> None:
        kinds.append(kind)
        parked.append(False)
        step(self, kind)

    kinds: list[Kind] = []
    monkeypatch.setattr(BoundaryPark, "park", watched)
    monkeypatch.setattr(rehearsal_module._Stage, "_step", counted)
    played(tiny("llama", torch.bfloat16))
    assert parked == [kind == "parked" for kind in kinds]
    assert any(parked)


def test_states_of_8_bits_have_one_pass(tiny: Tiny) -> None:
    kinds, block = played(tiny("llama", torch.bfloat16), "8bit")
    assert set(kinds) == {"alone", "parked", "whole"}
    assert block.states == "8bit"


def test_a_slow_update_is_told_and_a_wait_for_it_is_not_the_hosts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from fluxtrain.stream import updates

    pause_s = 0.02
    for name in ("step_on_host_", "step_weights_on_host_", "step_moments_on_host_"):
        step = getattr(updates, name)

        def slow(*args: object, _step: Callable[..., None] = step, **kwargs: object) -> None:
            time.sleep(pause_s)
            _step(*args, **kwargs)

        monkeypatch.setattr(updates, name, slow)
    kinds = played(tiny("llama", torch.bfloat16))[0]
    kinds |= played(tiny("llama", torch.bfloat16), eager=True)[0]
    for kind in ("whole", "passes", "eager"):
        told = kinds[kind]
        assert told.update_s is not None
        assert pause_s <= told.update_s < 3 * pause_s
        assert told.forward_s < pause_s
    moments_s = kinds["passes"].moments_s
    assert moments_s is not None and moments_s >= pause_s


def test_too_little_host_memory_is_said(tiny: Tiny) -> None:
    model = tiny("llama", torch.bfloat16)
    assert rehearse(model, batch_of(1), CPU, "fp32", 1000, eager=False) is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DoesNotFit])
def test_too_little_device_memory_is_said(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error("a device slot does not fit")

    monkeypatch.setattr(Window, "add_slot", refused)
    assert rehearse(tiny("llama"), batch_of(1), CPU, "fp32", None, eager=False) is None


@pytest.mark.parametrize("eager", [False, True])
def test_a_loss_that_is_not_finite_ends_the_steps_and_the_threads(
    tiny: Tiny, *, eager: bool
) -> None:
    model = tiny("llama", torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    threads = set(threading.enumerate())
    assert rehearse(model, batch_of(2), CPU, "fp32", None, eager=eager) is None
    assert set(threading.enumerate()) == threads


def test_blocks_that_are_not_trained_take_no_steps(tiny: Tiny) -> None:
    model = tiny("llama")
    for _, block in take_apart(model).blocks:
        block.requires_grad_(False)
    assert rehearse(model, batch_of(1), CPU, "fp32", None, eager=False) is None


def test_no_more_memory_is_taken_than_a_part_of_what_is_available() -> None:
    blocks_for, most = rehearsal_module._blocks_for, rehearsal_module.MOST_BLOCKS
    assert blocks_for(233_000_000, None) == 3
    assert blocks_for(47_000_000, None) == 11
    assert blocks_for(1000, None) == most
    assert blocks_for(47_000_000, 16 * 47_000_000 * 4 * 4) == 4
    assert blocks_for(47_000_000, 16 * 47_000_000 * 4 * 3 - 1) is None


def test_waiting_between_two_marks_is_taken_off() -> None:
    waits = [(0.5, 1.5), (2.25, 2.5)]
    assert _between([[0.0, 1.0, 2.0, 3.0]], waits) == pytest.approx(0.5)
    assert _between([[0.0, 1.0], [5.0, 8.0], [8.0, 10.0]], waits) == pytest.approx(2.0)
    assert _between([[1.0]], waits) == 0.0


def test_pauses_within_a_step_count_and_those_between_steps_do_not() -> None:
    steps = [(0.0, 2.0), (3.0, 5.0), (100.0, 102.0), (103.0, 105.0)]
    assert _one_to_next(steps, 2, waits=False) == pytest.approx(3.0)
    eager = [(0.0, 2.0), (2.5, 4.5), (90.0, 92.0), (92.5, 94.5)]  # it waited for one gradient
    assert _one_to_next(eager, 4, waits=True) == pytest.approx(2.5)
    assert _one_to_next([], 2, waits=False) is None


@pytest.mark.parametrize(
    ("states", "one_pass"), [("fp32", False), ("fp32", True), ("bf16", False), ("8bit", False)]
)
def test_a_rate_of_what_was_seen_gives_it_again(states: StateFormat, *, one_pass: bool) -> None:
    count = 1_000_000
    group = GroupFacts(
        name="0", kind="block", weight_bytes=2 * count, trained_bf16=count, states=states,
        narrow=0 if states == "fp32" else count,
    )  # fmt: skip
    rate = rate_of_update(group, 0.01, one_pass=one_pass)
    fast = 1e15
    rates = Rates(
        has_gpu=True,
        matmul_per_s=1e14,
        adamw_per_s=fast if states == "8bit" else rate,
        adamw_8bit_per_s=rate,
        adamw_weights_per_s=rate,
        adamw_moments_per_s=rate,
    )
    layout = Layout(offload="weights", batch_rows=1, deferred_moments=one_pass)
    weights_s, moments_s = host_update(group, layout, rates)
    assert weights_s == pytest.approx(0.01)
    assert moments_s == pytest.approx(0.01 if one_pass else 0.0)
