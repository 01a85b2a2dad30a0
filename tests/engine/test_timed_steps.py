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
from fluxtrain.measure.timed_steps import Kind, StepTimes, _between, _one_to_next, time_steps
from fluxtrain.plan.calibration import Line, StepsNotTimed
from fluxtrain.plan.facts import GroupFacts
from fluxtrain.plan.rates import Rates, host_update, rate_of_update
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


@pytest.mark.thinned(2)
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


def test_states_of_8_bits_have_one_pass(tiny: Tiny) -> None:
    kinds, block = timed(tiny("llama", torch.bfloat16), "8bit")
    assert set(kinds) == {"alone", "offloaded", "whole"}
    assert block.states == "8bit"


def test_a_slow_update_is_told_and_a_wait_for_it_is_not_the_hosts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from fluxtrain.core.updates import updates

    pause_s = 0.02
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

    pause_s = 0.02
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


def test_blocks_that_host_memory_refuses_are_said(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(steps_module, "make_small_model", refused)
    assert missed(tiny("llama")).why == "12 copies of a block failed: MemoryError"


@pytest.mark.parametrize(
    ("rest", "room"),
    [
        (
            "GPU 0 has a total capacity of 23.65 GiB of which 9.00 MiB is free.",
            "; 9.00 MiB is free",
        ),
        (
            "GPU 0 has a total capacity of 139.80 GiB of which 99.00 GiB is free. 23.00 GiB "
            "allowed; Of the allocated memory 22.50 GiB is allocated by PyTorch",
            " of the 23.00 GiB allowed",
        ),
        ("", ""),
    ],
)
def test_the_numbers_of_torchs_long_message_are_kept(rest: str, room: str) -> None:
    error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 1.50 GiB. {rest}")
    assert steps_module._why(error) == f"the GPU had no 1.50 GiB left{room}"


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


def test_no_more_memory_is_taken_than_a_part_of_what_is_available() -> None:
    most = steps_module.MOST_BLOCKS

    def blocks_for(parameters: int, available_bytes: int | None) -> int | StepsNotTimed:
        return steps_module._blocks_for(parameters, 16 * parameters, available_bytes)

    assert blocks_for(233_000_000, None) == 3
    assert blocks_for(47_000_000, None) == 11
    assert blocks_for(1000, None) == most
    assert blocks_for(47_000_000, 16 * 47_000_000 * 4 * 4) == 4
    least_bytes = 16 * 47_000_000 * 4 * 3
    refused = blocks_for(47_000_000, least_bytes - 1)
    assert isinstance(refused, StepsNotTimed)


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


def test_a_chunk_beside_an_update_takes_no_less_than_alone() -> None:
    alone = Line(base=0.0006, slope=0.0016)
    steeper = Line(base=0.0, slope=0.002)
    assert calibrate_module._beside(steeper, alone) == steeper
    found = calibrate_module._beside(Line(base=0.0105, slope=0.0004), alone)
    assert found.slope == alone.slope
    assert found.at(2) < 0.0105 + 2 * 0.0004 + 0.001 and found.at(8) > 0.0105 + 8 * 0.0004
    assert calibrate_module._beside(Line(base=0.0, slope=0.0001), alone) == alone


def test_waiting_between_two_marks_is_taken_off() -> None:
    waits = [(0.5, 1.5), (2.25, 2.5)]
    assert _between([[0.0, 1.0, 2.0, 3.0]], waits) == pytest.approx(0.5)
    assert _between([[0.0, 1.0], [5.0, 8.0], [8.0, 10.0]], waits) == pytest.approx(2.0)
    assert _between([[1.0]], waits) == 0.0


def test_pauses_within_a_step_count_and_those_between_steps_do_not() -> None:
    steps = [(0.0, 2.0), (3.0, 5.0), (100.0, 102.0), (103.0, 105.0)]
    assert _one_to_next(steps, 2, waits=False) == pytest.approx(3.0)
    in_backward = [(0.0, 2.0), (2.5, 4.5), (90.0, 92.0), (92.5, 94.5)]  # it waited for one gradient
    assert _one_to_next(in_backward, 4, waits=True) == pytest.approx(2.5)
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
    weights_s, moments_s = host_update(group, rates, deferred=one_pass)
    assert weights_s == pytest.approx(0.01)
    assert moments_s == pytest.approx(0.01 if one_pass else 0.0)
