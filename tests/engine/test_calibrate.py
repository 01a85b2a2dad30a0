"""Timing a block before a training leaves the model as it was; the result is kept and used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.data.batches import Batch
from fluxtrain.errors import DoesNotFit
from fluxtrain.events.answers.machine import Machine
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure import measured_constants as constants_module
from fluxtrain.measure.block_timing import COPIES
from fluxtrain.measure.calibrate import Patience, calibrate
from fluxtrain.measure.measured_constants import known_constants, measure_constants
from fluxtrain.measure.peaks import (
    host_peak_bytes,
    measure_host_peak_anew,
    recent_host_peak_bytes,
)
from fluxtrain.measure.small_model import NotCalibrated
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.train.placing.placing import model_facts
from tests.engine.calibration_rows import LENGTH, batch_of, plain_batch

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This one, with nothing measured on it before, and nobody else on it."""
    monkeypatch.setattr("fluxtrain.measure.calibrate.others_share", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return read_machine()


def facts_of(model: Any) -> ModelFacts:
    return model_facts(model, model.config, LENGTH)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_the_model_and_the_random_state_are_as_before(tiny: Tiny, family: str) -> None:
    model = tiny(family, torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(parameter) for parameter in model.parameters()]
    state = torch.get_rng_state()
    timed = calibrate(model, batch_of, torch.device("cpu"), (1, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(parameter) for parameter in model.parameters()] == classes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert timed.rows == (1, 4)
    for line in (timed.forward, timed.backward, timed.outside_forward):
        assert line.at(4) > 0
    assert timed.backward.at(4) < timed.measuring_s
    assert timed.device_update_s > 0


def test_what_a_chunk_costs_beside_its_rows_is_found(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the blocks' forward passes move."""
    model = tiny("llama", torch.float32)
    layer = type(model.model.layers[0])
    forward, pause_s, row_s, now_s = layer.forward, 0.01, 0.002, [0.0]

    def slow_to_start(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        now_s[0] += pause_s + row_s * hidden.shape[0]
        return forward(self, hidden, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", slow_to_start)
    monkeypatch.setattr("fluxtrain.measure.block_timing.time.perf_counter", lambda: now_s[0])
    timed = calibrate(model, batch_of, torch.device("cpu"), (1, 4))
    for line in (timed.forward, timed.backward):  # which runs it once more
        assert line.base == pytest.approx(pause_s, rel=1e-3)
        assert line.slope == pytest.approx(row_s, rel=1e-3)


def test_without_a_gpu_the_small_model_streams_too_and_moves_what_a_step_moves(
    tiny: Tiny,
) -> None:
    model = tiny("llama", torch.float32)
    streamed = calibrate(model, batch_of, torch.device("cpu"), (1, 4)).streamed
    assert streamed is not None
    blocks = [group for group in facts_of(model).groups if group.kind == "block"]
    edges = [group for group in facts_of(model).groups if group.kind == "edge"]
    groups = [*edges, *(COPIES * blocks[:1])]
    assert streamed.groups == len(groups)
    assert streamed.updated_bytes == sum(group.update_bytes for group in groups)
    # each weight goes up at least once a step and each gradient comes home
    least = sum(group.weight_bytes + group.rounded_bytes for group in groups)
    assert 0.9 * least < streamed.copied_bytes < 1.6 * least


def test_a_small_model_beyond_the_device_is_timed_with_its_edges_on_the_host(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", torch.float32)
    tries: list[tuple[str, int]] = []

    def of_a_small_card(small: nn.Module, **wishes: Any) -> nn.Module:
        tries.append((wishes["offload"], wishes["chunk_rows"]))
        if tries[-1] in (("none", 8), ("weights", 8)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        wrapped = wrap(small, **wishes)
        if "placement" in wishes:
            homes = {group.kind: group.placement.weights for group in engine_of(small).groups}
            assert homes == {"edge": "host", "block": "device"}
        return wrapped

    wrap = fluxtrain.wrap
    monkeypatch.setattr(fluxtrain, "wrap", of_a_small_card)
    timed = calibrate(model, batch_of, torch.device("cpu"), (2, 8), (1, 4))
    assert tries[:3] == [("none", 8), ("weights", 8), ("weights", 4)]
    assert timed.rows == (1, 4)
    for line in (timed.forward, timed.backward, timed.outside_forward):
        assert line.at(4) > 0
    assert timed.device_update_s > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DoesNotFit])
def test_a_block_that_the_device_cannot_hold_is_told(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def too_large(*_: Any, **__: Any) -> nn.Module:
        raise error("a device slot of 2.00 GiB does not fit")

    monkeypatch.setattr(fluxtrain, "wrap", too_large)
    with pytest.raises(NotCalibrated, match="do not fit on the device"):
        calibrate(tiny("llama", torch.float32), batch_of, torch.device("cpu"), (1, 4))


def test_a_loss_that_is_not_finite_is_told_and_no_training_ends_for_it(tiny: Tiny) -> None:
    model = tiny("llama", torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    with pytest.raises(NotCalibrated, match="gradient norm is nan"):
        calibrate(model, batch_of, torch.device("cpu"), (1, 4))


def test_a_block_whose_kernels_are_tuned_for_long_is_not_timed_to_the_end(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first size takes 30 seconds: more than the limit, and than a tenth of a short run."""
    model, sizes = tiny("llama", torch.float32), list[int]()
    now_s = [0.0]
    monkeypatch.setattr(Patience.__init__, "__defaults__", (None, lambda: now_s[0]))

    def rows_of(rows: int) -> BoundBatch[Batch]:
        sizes.append(rows)
        now_s[0] += 30.0 if len(sizes) == 1 else 0.0
        return batch_of(rows)

    with pytest.raises(NotCalibrated, match=r"stopped after 30\.0 s, because kernels were"):
        calibrate(model, rows_of, torch.device("cpu"), (1, 4), steps=10)
    assert sizes == [1]
    sizes.clear()
    assert calibrate(model, rows_of, torch.device("cpu"), (1, 4), steps=10_000_000).rows == (1, 4)


class Slow(nn.Module):
    """A block whose forward pass takes these seconds, by a clock that only blocks move."""

    def __init__(self, seconds: float, now_s: list[float]) -> None:
        super().__init__()
        self.linear, self.seconds, self.now_s = nn.Linear(8, 8), seconds, now_s

    def __deepcopy__(self, memo: dict[int, Any]) -> Slow:
        return Slow(self.seconds, self.now_s)

    def forward(self, hidden: Tensor) -> Tensor:
        self.now_s[0] += self.seconds
        return torch.as_tensor(self.linear(hidden))


class TwoLists(nn.Module):
    """Two lists of blocks, of which a batch passes the first or both."""

    def __init__(self, now_s: list[float], passed: int) -> None:
        super().__init__()
        self.a = nn.ModuleList(Slow(0.01, now_s) for _ in range(3))
        self.b = nn.ModuleList(Slow(0.03, now_s) for _ in range(4))
        self.passed = passed

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        for block in chain(*(self.a, self.b)[: self.passed]):
            hidden = block(hidden)
        return hidden.square().mean()


class Squares:
    """The objective of `TwoLists`, whose batches are tensors."""

    def count(self, batch: Tensor) -> int:
        return len(batch)

    rows = count

    def to(self, batch: Tensor, _: torch.device) -> Tensor:
        return batch

    def loss(self, model: nn.Module, batch: Tensor, _: int) -> Tensor:
        return torch.as_tensor(model(batch))


def test_blocks_in_two_lists_count_as_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("fluxtrain.measure.block_timing.time.perf_counter", lambda: now_s[0])
    objective: Any = Squares()

    def rows_of(rows: int) -> BoundBatch[Tensor]:
        return BoundBatch(objective, torch.ones(rows, 8))

    timed = calibrate(TwoLists(now_s, 2), rows_of, torch.device("cpu"), (1, 2))
    assert timed.forward.at(2) == pytest.approx(0.02, rel=1e-3)
    with pytest.raises(NotCalibrated, match="passes 2 of 4 blocks"):
        calibrate(TwoLists(now_s, 1), rows_of, torch.device("cpu"), (1, 2))


def test_what_was_timed_is_kept_and_used_by_plan_and_train(tiny: Tiny, machine: Machine) -> None:
    model = tiny("llama", torch.float32)
    facts = facts_of(model)
    unknown = known_constants(facts, machine, "cpu", 4)
    assert unknown.calibration is None
    assert "typical times of such machines" in unknown.source
    timed = measure_constants(facts, machine, "cpu", 4, model, batch_of)
    assert timed.is_new
    assert timed.calibration is not None
    assert timed.calibration.adamw_per_s
    again = known_constants(facts, machine, "cpu", 4)
    assert again.calibration == timed.calibration
    assert again.still_to_come_bytes == timed.calibration.runtime_bytes
    assert "timed on this machine by an earlier run with 1 and 4 rows" in again.source
    assert measure_constants(facts, machine, "cpu", 4, model, _never).calibration is not None
    assert known_constants(facts_of(tiny("qwen2", torch.float32)), machine, "cpu", 4) == unknown
    assert known_constants(facts, machine, "cpu", 2).calibration is None  # other rows, not timed


def test_a_block_timed_beside_other_programs_is_timed_again_when_those_are_gone(
    tiny: Tiny, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", torch.float32)
    facts = facts_of(model)
    monkeypatch.setattr("fluxtrain.measure.calibrate.others_share", lambda _: 0.5)
    timed = measure_constants(facts, machine, "cpu", 4, model, batch_of)
    assert "other programs used 50% of the processors" in timed.source
    monkeypatch.setattr(constants_module, "is_calm_after", lambda share: False)
    again = measure_constants(facts, machine, "cpu", 4, model, _never)
    assert again.calibration == timed.calibration
    monkeypatch.setattr(constants_module, "is_calm_after", lambda share: share == 0.5)
    monkeypatch.setattr("fluxtrain.measure.calibrate.others_share", lambda _: 0.0)
    again = measure_constants(facts, machine, "cpu", 4, model, batch_of)
    assert again.is_new
    assert "other programs" not in again.source


def _never(_: int) -> BoundBatch[Batch]:
    raise AssertionError("a block was timed a second time")


def test_a_block_that_cannot_be_timed_leaves_the_class_constants(
    tiny: Tiny, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotCalibrated("one block beside the head does not fit on the device")

    monkeypatch.setattr(constants_module, "calibrate", refuse)
    model = tiny("llama", torch.float32)
    found = measure_constants(facts_of(model), machine, "cpu", 4, model, batch_of)
    assert found.calibration is None
    assert "does not fit on the device" in found.source


def test_the_peak_of_the_process_is_the_kernels(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\n")
    assert recent_host_peak_bytes(tmp_path) == 2 << 20
    own = host_peak_bytes()
    held = torch.zeros(own // 4 + (64 << 20), dtype=torch.uint8)
    held.fill_(1)
    assert host_peak_bytes() >= own
    assert host_peak_bytes(tmp_path / "nothing") > 0  # from the resource usage instead


def test_what_a_block_holds_is_weighed_without_a_gpu(tiny: Tiny) -> None:
    if measure_host_peak_anew() is None:
        pytest.skip("the kernel does not let a process begin another peak")
    model = tiny("llama", torch.float32)
    length = 128

    def long_rows(count: int) -> BoundBatch[Batch]:
        ids = torch.zeros(count, length, dtype=torch.int64)
        return BoundBatch(CausalLM(), replace(
            plain_batch(count), input_ids=ids, labels=ids, tokens=ids.numel(),
            position_ids=torch.arange(length).expand(count, length),
        ))  # fmt: skip

    timed = calibrate(model, long_rows, torch.device("cpu"), (8, 128))
    row = model_facts(model, model.config, length).row
    assert row is not None
    assert 0.3 < timed.activation_bytes / row.activation_bytes < 3


def test_measured_activations_replace_the_estimate(tiny: Tiny, machine: Machine) -> None:
    model = tiny("llama", torch.float32)
    facts = facts_of(model)
    timed = measure_constants(facts, machine, "cpu", 4, model, batch_of)
    assert timed.calibration is not None
    unknown = replace(timed, calibration=replace(timed.calibration, activation_bytes=0))
    assert unknown.applied(facts) == facts
    known = replace(timed, calibration=replace(timed.calibration, activation_bytes=777))
    row = known.applied(facts).row
    assert row is not None
    assert row.activation_bytes == 777
