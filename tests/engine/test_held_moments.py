"""Among several cards AdamW's moments begin when the next forward pass is queued, or given up."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.core.updates import updates
from tests.engine.deferred_models import GIVEN_UP_S, Hold, Training, assert_same_bits, build

SEEN_S = 0.25  # in which what may begin has begun


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Hold:
    hold = Hold()
    monkeypatch.setattr(updates, "step_", hold)
    monkeypatch.setattr(updates, "LONGEST_GATE_S", GIVEN_UP_S)
    return hold


def after_a_step(**how: Any) -> Training:
    training = Training(build(), deferred=True, **how)
    training.backward()
    training.step()
    training.optimizer.zero_grad()
    for group in training.engine.groups:
        group.jobs.wait_for_weights()
    return training


def begins(written: Hold, within_s: float = SEEN_S) -> bool:
    until_s = time.monotonic() + within_s
    while not written.passed and time.monotonic() < until_s:
        time.sleep(0.005)
    return bool(written.passed)


def a_forward_and_backward(training: Training) -> object:
    return training.backward()


def a_forward_alone(training: Training) -> object:
    with torch.no_grad():
        return training.forward()


def a_flush(training: Training) -> object:
    return fluxtrain.sync(training.model)


def a_state(training: Training) -> object:
    return training.optimizer.state_dict()


def the_next_step(training: Training) -> object:
    return training.optimizer.step()


@pytest.mark.parametrize(
    "action", [a_forward_and_backward, a_forward_alone, a_flush, a_state, the_next_step]
)
def test_moments_begin_with_what_needs_them(
    written: Hold, action: Callable[[Training], object]
) -> None:
    training = after_a_step(cards=2)
    assert not begins(written)
    action(training)
    assert begins(written, GIVEN_UP_S)


def test_moments_wait_until_the_last_block_is_queued(written: Hold) -> None:
    training = after_a_step(cards=2)
    groups, blocks = training.engine.groups, []
    own = {s.m.untyped_storage().data_ptr() for g in groups for s in g.trained if s.m is not None}
    assert own
    seen: list[bool] = []

    def look(*_: object) -> None:
        begins(written)
        seen.append(not own.isdisjoint(written.places))

    for unit in training.engine.units:
        if unit.group.kind == "block":
            blocks.append(unit)
            unit.module.register_forward_hook(look)
    training.forward()
    assert not any(seen[:-1]) and seen[-1]


def test_a_step_in_backward_lets_the_moments_of_another_optimizer_go(written: Hold) -> None:
    training = Training(build(tied=True), deferred=True, cards=2)
    rows, *others = training.model.parameters()
    in_backward, later = torch.optim.AdamW([rows]), torch.optim.AdamW(others)
    for _ in range(3):
        started_s = time.monotonic()
        loss = training.forward()
        training.engine.begin_step_in_backward(in_backward, loss)
        loss.backward()
        later.step()
        in_backward.step()
        later.zero_grad()
        in_backward.zero_grad()
        assert time.monotonic() - started_s < GIVEN_UP_S / 2


def test_moments_that_nobody_asks_for_begin_in_the_end(
    written: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "LONGEST_GATE_S", SEEN_S)
    after_a_step(cards=2)
    assert begins(written, GIVEN_UP_S)


def test_held_moments_have_the_bits_of_one_pass(written: Hold) -> None:
    model = build()
    plain = Training(copy.deepcopy(model), deferred=False)
    held = Training(model, deferred=True, cards=2)
    for training in (plain, held):
        training.steps(4, passes=2)
    assert_same_bits(held.state(), plain.state())
    assert held.losses == plain.losses
    assert written.passed
