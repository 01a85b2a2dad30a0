"""The weights first, the moments later: the same bits, and nobody comes between the two."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.errors import Diverged
from fluxtrain.memory.group import Group
from fluxtrain.stream import updates
from fluxtrain.stream.engine import Engine, engine_of
from fluxtrain.stream.loss_scale import LossScale
from fluxtrain.stream.resettle import resettle
from fluxtrain.stream.shards import state_shards

MAX_NORM = 0.5
HOLD_S = 0.25  # far longer than a step of these models
GIVEN_UP_S = 30.0


def build(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


class Training:
    """A small model that streams, its optimizer, and the losses so far."""

    def __init__(self, model: nn.Module, *, deferred: bool, **how: Any) -> None:
        options = {"offload": "weights", "overlap": True, "chunk_rows": 2, **how}
        self.model = fluxtrain.wrap(model, device="cpu", deferred_moments=deferred, **options)
        self.engine = engine_of(self.model)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1, "lr": 2e-3},
                {"params": vectors, "weight_decay": 0.0, "lr": 5e-3},
            ]
        )
        self.losses: list[float] = []

    def forward(self) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.losses))
        ids = torch.randint(0, 128, (4, 12), generator=generator)
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(float(loss.detach()))
        return loss

    def backward(self) -> None:
        self.forward().backward()

    def step(self) -> None:
        self.engine.clip_grad_norm(MAX_NORM)
        self.optimizer.step()

    def steps(self, count: int, passes: int = 1) -> None:
        for _ in range(count):
            for _ in range(passes):
                self.backward()
            self.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Weights, what completes their masters, moments and step counts, all copied."""
        return {
            f"{shard} {name}": tensor.clone()
            for shard, tensors in state_shards(self.engine)
            for name, tensor in tensors.items()
        }


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


class Hold:
    """Stands between the weights and the moments of every update."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.passed: list[torch.dtype] = []  # of the moments that were written
        self.fails: Exception | None = None

    def __call__(self, *arguments: Any, **options: Any) -> None:
        assert self.free.wait(GIVEN_UP_S), "nobody let the moments go"
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails
        step_moments(*arguments, **options)
        self.passed.append(arguments[0].m.dtype)

    def hold(self) -> None:
        self.free.clear()

    def assert_waits(self, action: Callable[[], object], hold_s: float = HOLD_S) -> None:
        """`action` does not end before the moments are let go."""
        timer = threading.Timer(hold_s, self.free.set)
        timer.start()
        try:
            action()
            assert self.free.is_set(), "it came between the weights and their moments"
        finally:
            timer.join()


step_moments = updates.step_moments_on_host_


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    hold = Hold()
    monkeypatch.setattr(updates, "step_moments_on_host_", hold)
    yield hold
    hold.free.set()


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
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
        {"offload": "optimizer"},
        {"offload": "max"},
        {"offload": "none"},
        {"states": "8bit"},
        {"states": "bf16"},
    ],
    ids=str,
)
def test_wherever_and_however_states_are_kept_the_bits_are_the_same(how: dict[str, Any]) -> None:
    both = [Training(build(), deferred=deferred, **how) for deferred in (False, True)]
    for training in both:
        training.steps(4)
    assert both[0].losses == both[1].losses
    assert_same_bits(both[1].state(), both[0].state())


def test_of_a_group_with_narrow_states_only_the_fp32_ones_come_later(held: Hold) -> None:
    training = Training(build(), deferred=True, states="8bit")
    formats = [{s.format for s in group.trained} for group in training.engine.groups]
    assert {"8bit"} in formats and {"8bit", "fp32"} in formats
    training.steps(1)
    training.engine.flush()
    assert set(held.passed) == {torch.float32}


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
    training.engine.device.recorder.begin_step(1)
    training.steps(1)
    training.engine.flush()
    notes = [n for n in training.engine.device.recorder.notes if getattr(n, "lane", "") == "cpu"]
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
    assert not held.free.is_set() and training.engine.groups[-1].under_way
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
    stalls = [n for n in training.engine.device.recorder.notes if getattr(n, "lane", "") == "stall"]
    assert "moments" in {note.kind for note in stalls}


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
    name, tensors = next(iter(training.saved))  # type: ignore[attr-defined]
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


def an_eager_backward(training: Training) -> object:
    training.optimizer.zero_grad()
    training.engine.begin_eager_step(training.optimizer)
    return training.backward()


def another_optimizer_of_ours(training: Training) -> object:
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    return training.optimizer.step()


def a_foreign_optimizer(training: Training) -> object:
    return torch.optim.SGD(training.model.parameters(), lr=0.1).step()


def a_loaded_model(training: Training) -> object:
    return training.model.load_state_dict(training.weights)  # type: ignore[attr-defined]


def another_placement(training: Training) -> object:
    plan = training.engine.plan
    return resettle(
        training.engine, device_groups=2, resident_blocks=1, kept_blocks=0, slots=2,
        chunk_rows=2, need=plan.need,
    )  # fmt: skip


def an_unwrapped_model(training: Training) -> object:
    return fluxtrain.unwrap(training.model)


@pytest.mark.parametrize(
    "action",
    [
        a_checkpoint, the_optimizers_state, a_flush, a_sync, an_evaluation, a_restored_shard,
        gradients_of_zero, a_gradient_that_is_set, a_gradient_that_is_written, a_second_backward,
        an_eager_backward, another_optimizer_of_ours, a_foreign_optimizer,
        another_placement, an_unwrapped_model,
    ],
)  # fmt: skip
def test_whoever_touches_a_group_at_home_waits_for_its_moments(
    action: Callable[[Training], object], held: Hold
) -> None:
    training = Training(build(), deferred=True)
    training.steps(1)
    state = training.engine.state_shards()
    training.saved = [(n, {k: t.clone() for k, t in ts.items()}) for n, ts in state]  # type: ignore[attr-defined]
    weights = training.model.state_dict()
    training.weights = {n: w.detach().clone() for n, w in weights.items()}  # type: ignore[attr-defined]
    training.backward()
    held.hold()
    training.step()
    assert any(group.under_way for group in training.engine.groups)
    held.assert_waits(lambda: action(training))


@pytest.mark.parametrize(
    "action",
    [
        gradients_of_zero, a_second_backward, an_eager_backward, an_evaluation, another_placement,
        the_optimizers_state, a_loaded_model,
    ],
)  # fmt: skip
@pytest.mark.parametrize("passes", [1, 2])
def test_what_comes_between_two_steps_leaves_the_bits_of_the_update_in_one(
    action: Callable[[Training], object], passes: int, held: Hold
) -> None:
    both = [Training(build(tied=True), deferred=deferred) for deferred in (False, True)]
    for training in both:
        training.steps(2, passes)
        training.weights = {n: w + 0.25 for n, w in training.model.state_dict().items()}  # type: ignore[attr-defined]
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
    assert all(group.under_way for group in training.engine.groups)


def test_two_optimizers_over_one_block_step_one_after_the_other(held: Hold) -> None:
    found = []
    for deferred in (False, True):
        training = Training(build(), deferred=deferred)
        parameters = list(training.model.parameters())
        halves = [torch.optim.AdamW(parameters[at::2], lr=3e-3) for at in (0, 1)]
        for _ in range(4):
            training.backward()
            training.engine.clip_grad_norm(MAX_NORM)
            for half in halves:
                half.step()
            for half in halves:
                half.zero_grad()
        found.append((training.losses, training.state()))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])


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


def test_moments_that_fail_are_told_of_though_the_next_step_was_queued(held: Hold) -> None:
    training = Training(build(), deferred=True)
    parameters = [p for n, p in training.model.named_parameters() if ".layers." in n]
    halves = [torch.optim.AdamW(parameters[at::2]) for at in (0, 1)]
    training.backward()
    held.hold()
    held.fails = RuntimeError("no memory bus")
    halves[0].step()
    halves[1].step()  # the same groups, whose first moments are still to come
    held.free.set()
    with pytest.raises(RuntimeError, match="no memory bus"):
        training.engine.flush()


def test_groups_that_were_queued_before_one_could_not_be_get_their_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = Training(build(), deferred=False)
    expected.steps(1)
    training = Training(build(), deferred=True)
    training.backward()
    ensure_state = Group.ensure_state

    def fails(self: Group) -> None:
        if self is training.engine.groups[2]:
            raise MemoryError("states find no room")
        ensure_state(self)

    monkeypatch.setattr(Group, "ensure_state", fails)
    with pytest.raises(MemoryError):
        training.step()
    training.engine.flush()
    for got, wanted in zip(training.engine.groups[:2], expected.engine.groups[:2], strict=True):
        wanted.wait()
        for mine, theirs in zip(got.trained, wanted.trained, strict=True):
            for name, flat in mine.states().items():
                assert torch.equal(flat, theirs.states()[name]), name


def test_a_model_is_not_deferred_unless_it_is_asked_for(held: Hold) -> None:
    model = fluxtrain.wrap(build(), device="cpu", offload="weights", overlap=True)
    engine: Engine = engine_of(model)
    assert not engine.plan.deferred_moments


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
    setattr(group, which, InterruptedOnce(getattr(group, which)))
    with pytest.raises(KeyboardInterrupt):
        training.engine.flush()
    saved: list[dict[str, Tensor]] = []
    held.assert_waits(lambda: saved.append(training.state()))
    training.engine.flush()
    assert_same_bits(saved[0], training.state())


def test_a_copy_of_the_optimizer_has_the_moments_of_its_step(held: Hold) -> None:
    training = Training(build(), deferred=True)
    training.steps(1)
    training.engine.flush()
    held.hold()
    training.backward()
    training.step()
    copies: list[torch.optim.Optimizer] = []
    held.assert_waits(lambda: copies.append(copy.deepcopy(training.optimizer)))
    of_step = training.optimizer.state_dict()["state"]["fluxtrain"]
    copied: Any = copies[0].state["fluxtrain"]  # type: ignore[index]
    assert type(copied) is dict
    assert copied.keys() == of_step.keys()
    for index, entry in copied.items():
        assert entry["step"] == of_step[index]["step"] == 2
        assert torch.equal(entry["exp_avg"], of_step[index]["exp_avg"])
        assert torch.equal(entry["exp_avg_sq"], of_step[index]["exp_avg_sq"])


def test_a_saved_state_is_read_back_as_plain_values(held: Hold) -> None:
    training = Training(build(), deferred=True)
    training.steps(2)
    written = io.BytesIO()
    torch.save(training.optimizer.state_dict(), written)
    written.seek(0)
    read = torch.load(written, weights_only=True)
    assert type(read["state"]["fluxtrain"]).__module__ == "collections"
    assert {entry["step"] for entry in read["state"]["fluxtrain"].values()} == {2}
