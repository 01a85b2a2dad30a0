"""Whole steps of blocks on the host are timed before a training, each kind by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import fluxtrain
from fluxtrain.core.memory.activation_offload import ActivationOffload
from fluxtrain.core.memory.window import Window
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.errors import DoesNotFit
from fluxtrain.measure import calibrate as calibrate_module
from fluxtrain.measure import timed_steps as steps_module
from fluxtrain.measure.block_timing import BlockTimes
from fluxtrain.measure.timed_steps import Kind, StepTimes, time_steps
from fluxtrain.plan.calibration import StepsNotTimed
from fluxtrain.plan.facts import GroupFacts
from fluxtrain.plan.request import PlacementRequest
from fluxtrain.plan.states import StateFormat, StorageFormat
from tests.engine.calibration_rows import batch_of

Tiny = Callable[..., PreTrainedModel]
CPU = torch.device("cpu")


def timed(
    model: PreTrainedModel, states: StateFormat = "fp32", *, in_backward: bool = False
) -> tuple[dict[Kind, StepTimes], GroupFacts]:
    found = time_steps(model, batch_of(2), CPU, (states, "plain"), None, in_backward=in_backward)
    assert not isinstance(found, StepsNotTimed)
    return found


@pytest.mark.thinned(1)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_every_kind_of_steps_is_made_and_the_model_is_as_before(tiny: Tiny, family: str) -> None:
    model = tiny(family, torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds, block = timed(model)
    assert set(kinds) == {"alone", "offloaded", "whole", "passes"}
    in_backward, _ = timed(model, in_backward=True)
    assert set(in_backward) == {"alone", "offloaded", "in_backward"}
    kinds |= {"in_backward": in_backward["in_backward"]}
    for kind, told in kinds.items():
        assert told.forward.at(1) > 0
        assert told.backward.at(1) > told.forward.at(1) / 2  # which it computes again
        assert (told.update_s is None) == (kind in ("alone", "offloaded"))
        assert (told.moments_s is None) == (kind != "passes")
    assert block.kind == "block" and block.trained
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_block_is_on_the_host_also_where_the_device_has_room_for_all(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap, asked = fluxtrain.wrap, list[PlacementRequest]()

    def watched(small: torch.nn.Module, **arguments: Any) -> torch.nn.Module:
        asked.append(arguments["placement"])
        return wrap(small, **arguments)

    monkeypatch.setattr(fluxtrain, "wrap", watched)
    timed(tiny("llama", torch.bfloat16))
    (request,) = asked
    assert (request.device_groups, request.resident_blocks) == (0, 0)


def test_activations_are_offloaded_in_the_steps_that_time_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded: list[bool] = []
    offload = ActivationOffload.offload
    step = steps_module._StepTimer._step

    def watched(self: ActivationOffload, *args: object) -> object:
        offloaded[-1] = True
        return offload(self, *args)  # type: ignore[arg-type]

    def counted(self: steps_module._StepTimer, kind: Kind) -> None:
        kinds.append(kind)
        offloaded.append(False)
        step(self, kind)

    kinds: list[Kind] = []
    monkeypatch.setattr(ActivationOffload, "offload", watched)
    monkeypatch.setattr(steps_module._StepTimer, "_step", counted)
    timed(tiny("llama", torch.bfloat16))
    assert offloaded == [kind == "offloaded" for kind in kinds]
    assert any(offloaded)


def test_a_slow_update_is_told_and_a_wait_for_it_is_not_the_hosts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from fluxtrain.core.updates import updates

    pause_s = 0.05
    step: Callable[..., None] = updates.step_

    def slow(*args: object, **kwargs: object) -> None:
        time.sleep(pause_s)
        step(*args, **kwargs)

    monkeypatch.setattr(updates, "step_", slow)
    kinds = timed(tiny("llama", torch.bfloat16))[0]
    kinds |= timed(tiny("llama", torch.bfloat16), in_backward=True)[0]
    for kind in ("whole", "passes", "in_backward"):
        told = kinds[kind]
        assert told.update_s is not None
        assert pause_s <= told.update_s < 3 * pause_s
        assert told.forward.at(1) < pause_s
    moments_s = kinds["passes"].moments_s
    assert moments_s is not None and moments_s >= pause_s


FORMATS: tuple[StateFormat, StorageFormat] = "fp32", "plain"


@pytest.mark.thinned(1)
@pytest.mark.parametrize("once", ["a chunk", "a block"])
def test_what_each_chunk_takes_and_what_a_block_takes_once_are_told_apart(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, once: str
) -> None:
    import time

    pause_s = 0.04
    owner, name = (LlamaMLP, "forward") if once == "a chunk" else (Window, "take")
    original = getattr(owner, name)

    def slow(*args: Any) -> Any:
        time.sleep(pause_s)
        return original(*args)

    monkeypatch.setattr(owner, name, slow)
    kinds = timed(tiny("llama", torch.bfloat16))[0]
    for kind in ("alone", "passes"):  # two rows are one chunk, and two
        base, slope = kinds[kind].forward.base, kinds[kind].forward.slope
        dear, cheap = (slope, base) if once == "a chunk" else (base, slope)
        assert 0.7 * pause_s <= dear < 2 * pause_s  # both are differences of what was timed
        assert cheap < pause_s / 2
    assert kinds["whole"].forward.base == 0  # nothing is planned with it


def missed(model: PreTrainedModel, available_bytes: int | None = None) -> StepsNotTimed:
    found = time_steps(model, batch_of(2), CPU, FORMATS, available_bytes, in_backward=False)
    assert isinstance(found, StepsNotTimed)
    assert found.why in found.text
    assert "may be predicted 25 to 40 % too short" in found.text
    return found


def test_too_little_host_memory_is_said_with_what_it_takes(tiny: Tiny) -> None:
    model = tiny("llama", torch.bfloat16)
    found = missed(model, 1000)
    assert "of the 1000 B of host memory that is free" in found.why


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DoesNotFit])
def test_too_little_device_memory_is_said(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error("a device slot does not fit")

    monkeypatch.setattr(Window, "add_slot", refused)
    found = missed(tiny("llama"))
    assert found.why == "12 copies of a block failed: a device slot does not fit"
    assert not found.lasts  # other programs may be gone


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_loss_that_is_not_finite_ends_the_steps_and_the_threads(
    tiny: Tiny, *, in_backward: bool
) -> None:
    model = tiny("llama", torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    threads = set(threading.enumerate())
    found = time_steps(model, batch_of(2), CPU, FORMATS, None, in_backward=in_backward)
    assert isinstance(found, StepsNotTimed) and "nan" in found.why
    assert set(threading.enumerate()) == threads


def test_blocks_that_are_not_trained_take_no_steps_and_never_will(tiny: Tiny) -> None:
    model = tiny("llama")
    for _, block in take_apart(model).blocks:
        block.requires_grad_(False)
    found = missed(model)
    assert found.why == "no parameter of its blocks is trained"
    assert found.lasts


def test_why_no_steps_were_timed_is_among_the_constants_with_the_blocks_times(
    tiny: Tiny,
) -> None:
    alone = BlockTimes(rows=4)
    alone.seconds |= {"host": [0.2, 0.1], "host_forward": [0.05]}
    timed: Any = SimpleNamespace(few=alone, many=alone)
    why = StepsNotTimed(why="no room")
    found = calibrate_module._of_host(timed, why)
    assert found == {"host_block_s": 0.1, "host_forward_s": 0.05, "steps_not_timed": why}
    assert calibrate_module._of_host(timed, None)["steps_not_timed"] is None
