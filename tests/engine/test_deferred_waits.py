"""Nobody comes between the weights and their moments, and nobody waits for them who need not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fluxtrain
from fluxtrain.errors import Diverged
from tests.engine.deferred_models import HOLD_S, MAX_NORM, Hold, Training, assert_same_bits, build
from tests.engine.placing_anew import turn_to


def a_checkpoint(training: Training) -> object:
    return training.state()


def the_optimizers_state(training: Training) -> object:
    return training.optimizer.state_dict()


def a_flush(training: Training) -> object:
    return training.engine.flush()


def a_sync(training: Training) -> object:
    return fluxtrain.sync(training.model)


def an_evaluation(training: Training) -> object:
    with training.engine.evaluating(), torch.no_grad():
        return training.forward()


def a_restored_shard(training: Training) -> object:
    name, tensors = next(iter(training.saved))
    return training.engine.load_state_shard(name, tensors)


def gradients_of_zero(training: Training) -> object:
    return training.optimizer.zero_grad(set_to_none=False)


def a_gradient_that_is_set(training: Training) -> object:
    weight = next(training.model.parameters())
    weight.grad = torch.zeros_like(weight)
    return weight


def a_gradient_that_is_written(training: Training) -> object:
    gradient = next(training.model.parameters()).grad
    assert gradient is not None
    return gradient.add_(1.0)


def a_second_backward(training: Training) -> object:
    return training.backward()


def a_step_in_backward(training: Training) -> object:
    training.optimizer.zero_grad()
    training.engine.begin_step_in_backward(training.optimizer)
    training.backward()
    training.optimizer.step()
    return training.optimizer.zero_grad()


def another_optimizer_of_ours(training: Training) -> object:
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    return training.optimizer.step()


def a_foreign_optimizer(training: Training) -> object:
    return torch.optim.SGD(training.model.parameters(), lr=0.1).step()


def a_loaded_model(training: Training) -> object:
    return training.model.load_state_dict(training.weights)


def another_placement(training: Training) -> object:
    return turn_to(
        training.engine, device_groups=2, resident_blocks=1, blocks_without_recompute=0, slots=2
    )


def an_unwrapped_model(training: Training) -> object:
    return fluxtrain.unwrap(training.model)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    "action",
    [
        a_checkpoint, the_optimizers_state, a_flush, a_sync, an_evaluation, a_restored_shard,
        gradients_of_zero, a_gradient_that_is_set, a_gradient_that_is_written, a_second_backward,
        a_step_in_backward, another_optimizer_of_ours, a_foreign_optimizer,
        another_placement, an_unwrapped_model,
    ],
)  # fmt: skip
def test_whoever_touches_a_group_at_home_waits_for_its_moments(
    action: Callable[[Training], object], held: Hold
) -> None:
    training = Training(build(), deferred=True)
    training.steps(1)
    state = training.engine.state_shards()
    training.saved = [(n, {k: t.clone() for k, t in ts.items()}) for n, ts in state]
    weights = training.model.state_dict()
    training.weights = {n: w.detach().clone() for n, w in weights.items()}
    training.backward()
    held.hold()
    training.step()
    assert any(group.jobs.under_way for group in training.engine.groups)
    held.assert_waits(lambda: action(training))


@pytest.mark.parametrize(
    "action",
    [
        gradients_of_zero, a_second_backward, a_step_in_backward, an_evaluation, another_placement,
        the_optimizers_state, a_loaded_model,
    ],
)  # fmt: skip
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.thinned(3)
def test_what_comes_between_two_steps_leaves_the_bits_of_the_update_in_one(
    action: Callable[[Training], object], passes: int, held: Hold
) -> None:
    both = [Training(build(tied=True), deferred=deferred) for deferred in (False, True)]
    for training in both:
        training.steps(2, passes)
        training.weights = {n: w + 0.25 for n, w in training.model.state_dict().items()}
        for _ in range(passes):
            training.backward()
        training.engine.flush()
        held.hold()
        training.step()
        timer = threading.Timer(HOLD_S, held.free.set)
        timer.start()
        action(training)
        timer.join()
        training.backward()
        training.step()
        training.optimizer.zero_grad()
        training.steps(2, passes)
    assert both[0].losses == both[1].losses
    assert_same_bits(both[1].state(), both[0].state())


def test_stepping_and_forgetting_gradients_waits_for_nothing(held: Hold) -> None:
    training = Training(build(), deferred=True)
    training.steps(1)
    training.engine.flush()
    training.backward()
    held.hold()
    training.step()
    gradient = next(training.model.parameters()).grad
    assert gradient is not None
    gradient.mul_(0.5)  # recorded
    training.optimizer.zero_grad()
    assert not held.free.is_set()
    assert all(group.jobs.under_way for group in training.engine.groups)


def test_a_step_that_diverges_leaves_weights_and_moments_out(held: Hold) -> None:
    training = Training(build(), deferred=True)
    training.steps(2)
    before, passed = training.state(), list(held.passed)
    loss = training.forward()
    loss.backward()
    training.engine.clip_grad_norm(MAX_NORM, [loss.detach() * float("nan")])
    training.optimizer.step()
    training.optimizer.zero_grad()
    with pytest.raises(Diverged):
        training.engine.flush()
    assert held.passed == passed
    assert_same_bits(training.state(), before)
    training.steps(1)
    assert all(m.step == 3 for g in training.engine.groups for m in g.members)


@pytest.mark.parametrize(
    "surfaces", [a_flush, a_second_backward, a_checkpoint, the_optimizers_state]
)
def test_moments_that_fail_say_so_once_as_weights_do(
    surfaces: Callable[[Training], object], held: Hold
) -> None:
    training = Training(build(), deferred=True)
    training.steps(1)
    training.engine.flush()
    training.backward()
    held.hold()
    training.step()
    held.fails = RuntimeError("no memory bus")
    held.free.set()
    with pytest.raises(RuntimeError, match="no memory bus"):
        surfaces(training)
    training.engine.flush()  # told once


class InterruptedOnce:
    """A job whose first wait ends as one does that ctrl-c comes into."""

    def __init__(self, job: Any) -> None:
        self._job, self._first = job, True

    def result(self) -> Any:
        if self._first:
            self._first = False
            raise KeyboardInterrupt
        return self._job.result()

    def done(self) -> bool:
        return bool(self._job.done())


@pytest.mark.parametrize("which", ["pending", "moments"])
def test_an_interrupted_wait_is_gone_on_with_by_the_next_one(held: Hold, which: str) -> None:
    training = Training(build(), deferred=True)
    training.steps(1)
    training.engine.flush()
    held.hold()
    training.backward()
    training.step()
    group = training.engine.groups[0]  # whose moments come last
    setattr(group.jobs, which, InterruptedOnce(getattr(group.jobs, which)))
    with pytest.raises(KeyboardInterrupt):
        training.engine.flush()
    saved: list[dict[str, Tensor]] = []
    held.assert_waits(lambda: saved.append(training.state()))
    training.engine.flush()
    assert_same_bits(saved[0], training.state())
