"""AdamW's rates for the planner: those of whole steps, else rated as such steps would have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fluxtrain.events.answers.machine import Machine, Rate
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure import measured_constants as constants_module
from fluxtrain.measure.calibrate import calibrate
from fluxtrain.measure.measured_constants import known_constants, measure_constants
from fluxtrain.measure.probe.rate import TOO_LITTLE
from fluxtrain.measure.small_model import NotCalibrated
from fluxtrain.plan.calibration import StepsNotTimed
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.train.placing.placing import model_facts
from tests.engine.calibration_rows import LENGTH, batch_of

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This one, with nothing measured on it before, and nobody else on it."""
    monkeypatch.setattr("fluxtrain.measure.calibrate.others_share", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return read_machine()


def facts_of(model: Any) -> ModelFacts:
    return model_facts(model, model.config, LENGTH)


def test_a_run_with_8_bit_states_is_timed_with_its_own_kernel(tiny: Tiny, machine: Machine) -> None:
    model = tiny("llama", torch.bfloat16)
    wide = facts_of(model)
    coded = wide.with_states("8bit")
    first = measure_constants(wide, machine, "cpu", 4, model, batch_of)
    second = measure_constants(coded, machine, "cpu", 4, model, batch_of)
    assert second.is_new  # what was kept for the other states does not serve
    assert first.calibration is not None
    assert first.calibration.adamw_8bit_per_s is None
    rates = second.rates(has_gpu=False)
    assert not isinstance(rates, str)
    assert second.calibration is not None
    assert rates.adamw_8bit_per_s == second.calibration.adamw_8bit_per_s
    assert rates.adamw_8bit_per_s


def test_steps_in_backward_have_constants_of_their_own_beside_a_gpu(
    tiny: Tiny, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", torch.bfloat16)
    facts, timed = facts_of(model), calibrate(model, batch_of, torch.device("cpu"), (1, 4))
    monkeypatch.setattr(constants_module, "calibrate", lambda *_, **__: timed)
    monkeypatch.setattr(constants_module, "_missing_rates", lambda *_: {})
    monkeypatch.setattr(constants_module, "_adamw_rates", lambda *_, **__: {})
    assert measure_constants(facts, machine, "cuda", 4, model, batch_of).is_new
    assert known_constants(facts, machine, "cuda", 4, in_backward=True).calibration is None
    assert measure_constants(facts, machine, "cuda", 4, model, batch_of, in_backward=True).is_new
    assert known_constants(facts, machine, "cuda", 4, in_backward=True).calibration is not None


def test_what_whole_steps_told_is_not_rated_again(
    tiny: Tiny, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", torch.bfloat16)
    timed = calibrate(model, batch_of, torch.device("cpu"), (1, 4))
    fields = ("adamw_per_s", "adamw_beside_per_s", "adamw_weights_per_s", "adamw_moments_per_s")
    rates: dict[str, Any] = dict.fromkeys(fields, 123.0)
    told = replace(timed, **rates)
    monkeypatch.setattr(constants_module, "calibrate", lambda *_, **__: told)
    monkeypatch.setattr(constants_module, "_missing_rates", lambda *_: {})
    monkeypatch.setattr(constants_module, "adamw_rate", lambda *_, **__: pytest.fail("rated"))
    found = measure_constants(facts_of(model), machine, "cuda", 4, model, batch_of)
    assert found.calibration == told


def test_rates_that_could_not_be_measured_beside_a_block_are_measured_in_the_next_training(
    tiny: Tiny, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", torch.bfloat16)
    facts, timed = facts_of(model), calibrate(model, batch_of, torch.device("cpu"), (1, 4))
    timed = replace(timed, adamw_per_s=None)
    probed = dict.fromkeys(("h2d_pinned", "d2h_pinned", "adamw"))  # on a card that was full
    bus: dict[str, Rate] = dict.fromkeys(("h2d_pinned", "d2h_pinned"), TOO_LITTLE)
    adamw = [TOO_LITTLE]
    answers: list[Any] = [timed]
    monkeypatch.setattr(constants_module, "_probed", lambda: probed)
    monkeypatch.setattr(constants_module, "calibrate", lambda *_, **__: answers.pop())
    monkeypatch.setattr(constants_module, "bus_rates", lambda **_: bus)
    monkeypatch.setattr(constants_module, "adamw_rate", lambda *_, **__: adamw[0])
    first = measure_constants(facts, machine, "cuda", 4, model, batch_of)
    assert isinstance(first.rates(has_gpu=True), str)
    bus |= {"h2d_pinned": Rate(2e10, "64 MiB"), "d2h_pinned": Rate(3e10, "64 MiB")}
    adamw[0] = Rate(4e9, "4 threads")
    second = measure_constants(facts, machine, "cuda", 4, model, batch_of)
    rates = second.rates(has_gpu=True)
    assert not isinstance(rates, str)
    assert (rates.h2d_bytes_per_s, rates.d2h_bytes_per_s, rates.adamw_per_s) == (2e10, 3e10, 4e9)
    assert known_constants(facts, machine, "cuda", 4) == second
    monkeypatch.setattr(constants_module, "adamw_rate", lambda *_, **__: pytest.fail("rated"))
    assert measure_constants(facts, machine, "cuda", 4, model, batch_of) == second


@pytest.mark.parametrize("refused", [False, True])
def test_processes_that_update_in_one_memory_measure_that_at_the_same_time(
    tiny: Tiny, machine: Machine, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    model, told = tiny("llama", torch.bfloat16), []
    timed = replace(calibrate(model, batch_of, torch.device("cpu"), (1, 4)), adamw_per_s=None)

    def timing(*_: object, **__: object) -> object:
        told.append("block")
        if refused:
            raise NotCalibrated("no memory")
        return timed

    def rating(*_: object, **__: object) -> Rate:
        told.append("adamw")
        return Rate(4e9, "4 threads")

    monkeypatch.setattr(constants_module, "calibrate", timing)
    monkeypatch.setattr(constants_module, "adamw_rate", rating)
    for _ in range(2):
        measure_constants(
            facts_of(model), machine, "cpu", 4, model, batch_of, meet=lambda: told.append("meet")
        )
    assert told == (["block", "meet"] * 2 if refused else ["block", "meet", "adamw", "meet"])


@pytest.mark.parametrize("name", ["bus_rates", "host_copy_rate"])
def test_a_training_starts_where_copies_still_have_no_memory_to_be_measured_in(
    tiny: Tiny, machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")

    model, device = tiny("llama", torch.bfloat16), "cuda" if name == "bus_rates" else "cpu"
    facts, timed = facts_of(model), calibrate(model, batch_of, torch.device("cpu"), (1, 4))
    monkeypatch.setattr(constants_module, "_probed", dict)
    monkeypatch.setattr(constants_module, "calibrate", lambda *_, **__: timed)
    monkeypatch.setattr(constants_module, "_adamw_rates", lambda *_, **__: {})
    monkeypatch.setattr(constants_module, name, refused)
    for is_new in (True, False):
        found = measure_constants(facts, machine, device, 4, model, batch_of)
        assert found.is_new is is_new and found.calibration == timed
        assert isinstance(found.rates(has_gpu=device == "cuda"), str)


@pytest.mark.parametrize("lasts", [False, True])
def test_why_steps_could_not_be_timed_is_told_and_they_are_timed_again_where_that_may_succeed(
    tiny: Tiny, machine: Machine, monkeypatch: pytest.MonkeyPatch, *, lasts: bool
) -> None:
    model = tiny("llama", torch.bfloat16)
    facts, timed = facts_of(model), calibrate(model, batch_of, torch.device("cpu"), (1, 4))
    missed = StepsNotTimed(why="3 blocks take 9 GiB", lasts=lasts)
    answers = [replace(timed, steps_not_timed=missed), timed]
    monkeypatch.setattr(constants_module, "calibrate", lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(constants_module, "_missing_rates", lambda *_: {})
    monkeypatch.setattr(constants_module, "_adamw_rates", lambda *_, **__: {})
    assert missed.text in measure_constants(facts, machine, "cuda", 4, model, batch_of).source
    assert missed.text in known_constants(facts, machine, "cuda", 4).source
    again = measure_constants(facts, machine, "cuda", 4, model, batch_of)
    assert (missed.text in again.source) is lasts
    assert again.is_new is not lasts
