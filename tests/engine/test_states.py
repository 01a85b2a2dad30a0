"""Optimizer states of 8 bits and of bf16: whole steps, placements, checkpoints, state_dict."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.adamw import reference
from fluxtrain.core.adamw.hyper import Hyper, coefficients
from fluxtrain.core.adamw.reference import States8, rounding
from fluxtrain.core.memory.group import Group
from fluxtrain.core.updates.norm import clip_scale
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import BadInput
from fluxtrain.plan import states as state_formats
from fluxtrain.plan.states import StateFormat
from tests.wrap_with import wrap_with

FORMATS = pytest.mark.parametrize("states", ["bf16", "8bit"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
MAX_NORM = 0.3  # no power of two: then order and number of roundings show
LEAST = 100  # matrices of the tiny models are narrow, their norms are not


@pytest.fixture(autouse=True)
def small_parameters_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_formats, "LEAST_LOW_BIT", LEAST)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "lr": 2e-3},
        {"params": vectors, "weight_decay": 0.0, "lr": 5e-3},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    steps: range,
    *,
    passes: int = 1,
) -> list[Tensor]:
    losses = []
    for step in steps:
        for part in range(passes):
            loss = model(**batch("llama", seed=10 * step + part)).loss / passes
            loss.backward()
            losses.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model: nn.Module) -> list[Tensor]:
    engine_of(model).flush()
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Oracle:
    """AdamW by `core/adamw/reference.py` on each group's segments as a whole."""

    def __init__(self, groups: list[Group]) -> None:
        self.segments = [s for g in groups for s in g.trained]
        self.master = [s.weights.float().clone() for s in self.segments]
        self.states: list[Any] = []
        for segment in self.segments:
            n = segment.elements
            if segment.format == "8bit":
                code, scale = torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // 256))
                self.states.append(States8(code, code.clone(), scale, scale.clone()))
            else:
                dtype = torch.bfloat16 if segment.format == "bf16" else torch.float32
                self.states.append((torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)))

    def step(self, hyper: Hyper, step: int, scale: float) -> None:
        c = coefficients(hyper, step, scale)
        for i, segment in enumerate(self.segments):
            w, states, grad = self.master[i], self.states[i], segment.gradient
            if segment.format == "8bit":
                self.master[i], self.states[i] = reference.adamw8(w, states, grad, c)
            elif segment.format == "bf16":
                key = rounding(segment.seed, step, 0)
                self.master[i], *self.states[i] = reference.adamw16(
                    w, states[0], states[1], grad, c, key
                )
            else:
                self.master[i], *self.states[i] = reference.adamw(w, states[0], states[1], grad, c)
            if segment.split:
                self.master[i] = reference.decode(*reference.encode(self.master[i]))

    def agrees(self) -> bool:
        masters = [
            s.weights if s.lo is None else reference.decode(s.weights, s.lo) for s in self.segments
        ]
        states = [
            torch.equal(a, getattr(s, name))
            for s, held in zip(self.segments, self.states, strict=True)
            for name, a in zip(("m", "v", "m_scale", "v_scale"), held, strict=False)
        ]
        return same(masters, self.master) and all(states)


@pytest.mark.thinned(4)
@FORMATS
@DTYPES
@pytest.mark.parametrize("offload", ["weights", "none"])
def test_clipped_steps_equal_the_oracle(
    states: StateFormat, dtype: torch.dtype, offload: str, tiny: Any, batch: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama", dtype), offload=offload, chunk_rows=2, states=states)
    engine = engine_of(model)
    formats = {s.format for g in engine.groups for s in g.trained}
    assert formats == {states, "fp32"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    oracle = Oracle(engine.groups)
    hyper = Hyper(2e-3, (0.9, 0.999), 1e-8, 0.1)
    for step in range(1, 9):
        model(**batch("llama", seed=step)).loss.backward()
        norm = engine.clip_grad_norm(MAX_NORM).value()
        for group in engine.groups:
            engine.cards[0].gradients.host.wait(group)
        oracle.step(hyper, step, clip_scale(norm, MAX_NORM))
        optimizer.step()
        assert oracle.agrees()
        optimizer.zero_grad()


@pytest.mark.thinned(2)
@FORMATS
@DTYPES
def test_every_placement_trains_to_the_same_bits(
    states: StateFormat, dtype: torch.dtype, tiny: Any, batch: Any
) -> None:
    results = []
    for options in (
        {"offload": "weights"},
        {"offload": "weights", "device_groups": 2, "overlap": True},
        {"offload": "none"},
        {"offload": "max", "overlap": True},
    ):
        model = wrap_with(tiny("llama", dtype), chunk_rows=2, states=states, **options)
        losses = train(model, adamw(model), batch, range(5))
        results.append((losses, weights_of(model)))
    for losses, weights in results[1:]:
        assert same(losses, results[0][0])
        assert same(weights, results[0][1])


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("device_groups", [0, 2])
@pytest.mark.thinned(3)
def test_steps_in_backward_equal_exact_ones_without_clipping(
    device_groups: int, states: str, tiny: Any, batch: Any
) -> None:
    results = []
    for in_backward in (False, True):
        how: dict[str, Any] = {"offload": "weights", "device_groups": device_groups}
        model = wrap_with(tiny("llama", torch.bfloat16), chunk_rows=2, states=states, **how)
        optimizer = adamw(model)
        for step in range(4):
            loss = model(**batch("llama", seed=step)).loss
            if in_backward:
                engine_of(model).begin_step_in_backward(optimizer)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine_of(model).flush()
        shards = [tensors for _, tensors in engine_of(model).state_shards()]
        results.append([tensor.clone() for tensors in shards for tensor in tensors.values()])
    assert same(*results)


@pytest.mark.thinned(3)
@FORMATS
@DTYPES
def test_a_training_saved_and_loaded_goes_on_with_the_same_bits(
    states: StateFormat, dtype: torch.dtype, tiny: Any, batch: Any
) -> None:
    """By the engine's shards, and by state_dict() of model and optimizer."""
    model = fluxtrain.wrap(tiny("llama", dtype), chunk_rows=2, states=states)
    optimizer = adamw(model)
    train(model, optimizer, batch, range(3))
    shards = [
        (name, {key: tensor.clone() for key, tensor in tensors.items()})
        for name, tensors in engine_of(model).state_shards()
    ]
    plain = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, batch, range(3, 6))

    by_shards = fluxtrain.wrap(tiny("llama", dtype), chunk_rows=2, states=states)
    for name, tensors in shards:
        engine_of(by_shards).load_state_shard(name, tensors)
    assert same(train(by_shards, adamw(by_shards), batch, range(3, 6)), expected)
    assert same(weights_of(by_shards), weights_of(model))

    by_dict = fluxtrain.wrap(tiny("llama", dtype), chunk_rows=2, states=states)
    other = adamw(by_dict)
    by_dict.load_state_dict(plain[0])
    other.load_state_dict(plain[1])
    assert same(train(by_dict, other, batch, range(3, 6)), expected)


@pytest.mark.parametrize("source", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("target", ["fp32", "bf16", "8bit"])
@pytest.mark.thinned(2)
def test_an_optimizers_state_is_taken_over_into_another_format(
    source: StateFormat, target: StateFormat, tiny: Any, batch: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama"), chunk_rows=2, states=source)
    optimizer = adamw(model)
    train(model, optimizer, batch, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, batch, range(3, 8))
    into = fluxtrain.wrap(tiny("llama"), chunk_rows=2, states=target)
    other = adamw(into)
    into.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    losses = train(into, other, batch, range(3, 8))
    for got, wanted in zip(losses, expected, strict=True):
        assert float(got) == pytest.approx(float(wanted), rel=0.02)
    assert same(losses[:1], expected[:1])


def test_a_shard_with_other_states_is_refused_with_both_names(tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"), chunk_rows=2, states="8bit")
    train(model, adamw(model), batch, range(1))
    shards = list(engine_of(model).state_shards())
    other = fluxtrain.wrap(tiny("llama"), chunk_rows=2)
    with pytest.raises(BadInput, match="holds 8bit optimizer states, .* wrapped for fp32"):
        for name, tensors in shards:
            engine_of(other).load_state_shard(name, tensors)


@FORMATS
def test_the_predicted_bytes_are_those_that_training_holds(
    states: Any, tiny: Any, batch: Any
) -> None:
    facts = facts_of(tiny("llama", torch.bfloat16), states)
    assert facts == facts_of(tiny("llama", torch.bfloat16)).with_states(states) or states == "8bit"
    model = fluxtrain.wrap(tiny("llama", torch.bfloat16), chunk_rows=2, states=states)
    train(model, adamw(model), batch, range(1))
    assert engine_of(model).memory().host_arena_bytes == facts.host_bytes
