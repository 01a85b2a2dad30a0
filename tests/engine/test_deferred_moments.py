"""The weights first, the moments later: the same bits, in the right order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fluxtrain.core.updates.loss_scale import LossScale
from tests.engine.deferred_models import HOLD_S, Hold, Training, assert_same_bits, build


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.thinned(3)
def test_a_training_with_deferred_moments_has_the_bits_of_one_without(
    dtype: torch.dtype, tied: bool, passes: int, held: Hold
) -> None:
    both = [Training(build(dtype, tied=tied), deferred=deferred) for deferred in (False, True)]
    for training in both:
        training.steps(5, passes)
        training.engine.flush()
        assert bool(held.passed) == (training is both[1])
    assert both[0].losses == both[1].losses
    assert_same_bits(both[1].state(), both[0].state())


@pytest.mark.parametrize(
    "how",
    [
        {"overlap": False},
        {"embedding": "rows"},
        {"device_groups": 2},
        pytest.param({"offload": "optimizer"}, marks=pytest.mark.slow),
        {"offload": "max"},
        pytest.param({"offload": "none"}, marks=pytest.mark.slow),
        {"states": "8bit"},
        pytest.param({"states": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_wherever_and_however_states_are_kept_the_bits_are_the_same(how: dict[str, Any]) -> None:
    both = [Training(build(), deferred=deferred, **how) for deferred in (False, True)]
    for training in both:
        training.steps(4)
    assert both[0].losses == both[1].losses
    assert_same_bits(both[1].state(), both[0].state())


def test_fp16_masters_are_updated_at_once_and_a_step_that_overflows_is_left_out(
    held: Hold,
) -> None:
    both = [Training(build(torch.float16), deferred=deferred) for deferred in (False, True)]
    for training in both:
        engine = training.engine
        scale = engine.loss_scale = LossScale(engine.device.torch_device, first=2.0**38)
        for _ in range(30):
            scale.of(training.forward()).backward()
            training.step()
            training.optimizer.zero_grad()
        engine.flush()
        assert 0 < max(m.step for g in engine.groups for m in g.members) < 30, "some overflowed"
    assert_same_bits(both[1].state(), both[0].state())
    assert not held.passed


@pytest.mark.parametrize("goes_on_deferred", [False, True])
def test_a_checkpoint_in_the_middle_resumes_with_the_same_bits(goes_on_deferred: bool) -> None:
    whole = Training(build(tied=True), deferred=False)
    whole.steps(6)
    first = Training(build(tied=True), deferred=True)
    first.steps(3)
    saved = {
        name: {key: tensor.clone() for key, tensor in tensors.items()}
        for name, tensors in first.engine.state_shards()
    }
    second = Training(build(tied=True), deferred=goes_on_deferred)
    for name, tensors in saved.items():
        second.engine.load_state_shard(name, tensors)
    second.losses = list(first.losses)
    second.steps(3)
    assert second.losses == whole.losses
    assert_same_bits(second.state(), whole.state())


def test_the_moments_come_last_group_first_after_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(build(), deferred=True)
    recorder: Any = training.engine.device.recorder
    recorder.begin_step(1)
    training.steps(1)
    training.engine.flush()
    notes = [n for n in recorder.notes if getattr(n, "lane", "") == "cpu"]
    done = [(note.kind, note.name) for note in sorted(notes, key=lambda note: note.start)]
    names = [group.name for group in training.engine.groups]
    assert done == [("update", n) for n in names] + [("moments", n) for n in reversed(names)]


@pytest.mark.parametrize("embedding", ["whole", "rows"])
def test_the_next_forward_waits_for_the_weights_alone_and_its_backward_for_the_moments(
    embedding: str, held: Hold
) -> None:
    both = [Training(build(), deferred=later, embedding=embedding) for later in (False, True)]
    both[0].steps(3)
    training = both[1]
    training.steps(1)
    training.engine.flush()
    training.backward()
    held.hold()
    training.step()
    training.optimizer.zero_grad()
    loss = training.forward()
    assert not held.free.is_set() and training.engine.groups[-1].jobs.under_way
    held.assert_waits(loss.backward)
    training.step()
    assert both[0].losses == training.losses
    assert_same_bits(training.state(), both[0].state())


def test_a_wait_for_moments_is_booked_and_shown_as_one(held: Hold) -> None:
    training = Training(build(), deferred=True)
    training.steps(1)
    training.engine.flush()
    training.backward()
    training.engine.device.recorder.begin_step(2)
    held.hold()
    training.step()
    training.optimizer.zero_grad()
    loss = training.forward()
    training.engine.take_stalls()
    held.assert_waits(loss.backward, hold_s=4 * HOLD_S)
    assert training.engine.take_stalls()["moments"] > 0
    notes: Any = training.engine.device.recorder.notes
    stalls = [n for n in notes if getattr(n, "lane", "") == "stall"]
    assert "moments" in {note.kind for note in stalls}
