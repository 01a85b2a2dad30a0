"""The writer: what goes into a checkpoint comes back, and only into the run that made it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.config.cadence import Cadence
from fluxtrain.core.device.recorder import HostClock, Recorder
from fluxtrain.errors import BadInput, NoSpace
from fluxtrain.events import events as ev
from fluxtrain.events.emitter import Announcer
from fluxtrain.methods.optimizer import EngineAdamW
from fluxtrain.train.checkpoint import writer as checkpoint_writer
from fluxtrain.train.checkpoint.checkpoint import (
    list_checkpoints,
    read_checkpoint,
)
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.checkpoint.writer import TRAINER_BYTES, CheckpointWriter


class FakeEngine:
    """Two shards and a chunk size, as an engine has them."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shards = {n: {"w": torch.randn(5, generator=generator)} for n in ("a", "b.0")}
        self.chunk_rows, self.compression = 4, ""
        self.loss_scale = None
        self.device = SimpleNamespace(recorder=Recorder(HostClock()))

    def state_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        yield from self.shards.items()

    def shard_bytes(self) -> int:
        return 40

    def load_state_shard(self, name: str, tensors: dict[str, Tensor]) -> None:
        self.shards[name] = {key: value.clone() for key, value in tensors.items()}


class FakeData:
    """A cursor."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Kept:
    """An emitter that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)


FINGERPRINT = {
    "model": "Tiny", "train.eps": 1e-8, "train.betas": [0.9, 0.999], "train.states": "fp32",
    "learning rate": 1e-3, "train.warmup_steps": 10,
}  # fmt: skip


def writer(
    root: Path, fingerprint: dict[str, Any] | None = None, *, needs_best: bool = False
) -> tuple[Any, Kept]:
    kept: Any = Kept()
    made = CheckpointWriter(
        root,
        Cadence(every=5, total_steps=20, share=0.05),
        2,
        Announcer(kept, lambda _: None),
        FINGERPRINT if fingerprint is None else fingerprint,
        EngineAdamW(kept, [torch.nn.Parameter(torch.zeros(1))]),
        needs_best=needs_best,
    )
    return made, kept


def state_at(step: int) -> RunState:
    state = RunState()
    for number in range(step):
        state.step_done(1.0 / (number + 1), tokens=3, seconds=0.1)
    return state


def test_everything_of_a_run_comes_back(tmp_path: Path) -> None:
    written, told = writer(tmp_path)
    engine, data = FakeEngine(1), FakeData()
    engine.chunk_rows, data.position = 2, 17
    random.seed(3)
    torch.manual_seed(3)
    checkpoint = written.write(state_at(5), engine, data)
    expected = (random.random(), float(torch.rand(())))
    event = told.events[-1]
    assert isinstance(event, ev.CheckpointWritten)
    assert (event.step, event.bytes, event.path) == (5, checkpoint.bytes, str(checkpoint.path))
    assert written.written_bytes == checkpoint.bytes

    restored, _ = writer(tmp_path)
    other, cursor = FakeEngine(2), FakeData()
    state = restored.restore(read_checkpoint(checkpoint.path), other, cursor)
    assert state == state_at(5)
    assert (other.chunk_rows, cursor.position) == (2, 17)
    assert (random.random(), float(torch.rand(()))) == expected
    for name, tensors in engine.shards.items():
        assert torch.equal(other.shards[name]["w"], tensors["w"])
    assert restored.read_bytes == checkpoint.bytes
    assert "step 5" in restored.last_text()


def test_a_run_that_goes_on_with_other_threads_hears_that_its_bits_will_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = writer(tmp_path)[0].write(state_at(5), FakeEngine(1), FakeData())
    restored, told = writer(tmp_path)
    restored.restore(checkpoint, FakeEngine(2), FakeData())
    assert told.events == []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    restored.restore(checkpoint, FakeEngine(2), FakeData())
    (warning,) = told.events
    assert "1 threads before and has 7 now" in warning.text and "OMP_NUM_THREADS=1" in warning.text


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({"learning rate": 2e-5}, True),
        ({"learning rate": 2e-3}, False),
        ({"train.warmup_steps": 20}, True),
        ({"train.warmup_steps": 5}, False),
        ({"learning rate": 2e-5, "train.eps": 1e-6}, False),
    ],
)
def test_a_resume_may_lower_the_rate_and_lengthen_the_warm_up_alone(
    tmp_path: Path, change: dict[str, Any], is_taken: bool
) -> None:
    checkpoint = writer(tmp_path)[0].write(state_at(5), FakeEngine(1), FakeData())
    other, told = writer(tmp_path, {**FINGERPRINT, **change})
    if is_taken:
        state = other.restore(checkpoint, FakeEngine(2), FakeData())
        assert len(state.changed) == 1 and state.changed[0] in told.events[0].text
        return
    with pytest.raises(BadInput, match=f"and is {list(change.values())[-1]}"):
        other.restore(checkpoint, FakeEngine(2), FakeData())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "Other", "model was 'Tiny' and is 'Other'"),
        ("train.eps", 1e-6, "train.eps was 1e-08 and is 1e-06"),
        ("train.new", 1, "train.new was None and is 1"),
        ("train.states", "8bit", "train.states was 'fp32' and is '8bit'"),
    ],
)
def test_another_run_is_refused_before_anything_changes(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    made, _ = writer(tmp_path)
    checkpoint = made.write(state_at(5), FakeEngine(1), FakeData())
    other, _ = writer(tmp_path, {**FINGERPRINT, key: value})
    engine, data = FakeEngine(2), FakeData()
    before = {name: tensors["w"].clone() for name, tensors in engine.shards.items()}
    with pytest.raises(BadInput) as caught:
        other.restore(checkpoint, engine, data)
    assert words in str(caught.value)
    assert data.position == 0
    assert all(torch.equal(engine.shards[name]["w"], w) for name, w in before.items())


# --- room on the disk -----------------------------------------------------------------------------

NEED = 40 + TRAINER_BYTES


def free(monkeypatch: pytest.MonkeyPatch, root: Path, room_for: int) -> None:
    """A disk with room for so many checkpoints."""

    def bytes_left(_: Path) -> int:
        return (room_for - len(list_checkpoints(root))) * NEED

    monkeypatch.setattr(checkpoint_writer, "free_bytes", bytes_left)


def test_an_older_checkpoint_makes_room_for_the_next_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kept = writer(tmp_path)
    free(monkeypatch, tmp_path, 2)
    for step in (5, 10, 15):
        made.write(state_at(step), FakeEngine(step), FakeData())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000015", "step-00000010"]
    said = [event.text for event in kept.events if isinstance(event, ev.LogWritten)]
    assert len(said) == 1 and "step-00000005 was removed" in said[0]


@pytest.mark.parametrize("needs_best", [False, True])
def test_the_best_checkpoint_gives_way_last_and_never_where_it_is_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_best: bool
) -> None:
    made, _ = writer(tmp_path, needs_best=needs_best)
    for step in (5, 10):
        made.write(state_of_best(step, 5), FakeEngine(step), FakeData())
    free(monkeypatch, tmp_path, 2)  # nothing is left, and the best is the older one
    if needs_best:
        with pytest.raises(NoSpace):
            made.write(state_of_best(15, 5), FakeEngine(15), FakeData())
        assert made.best(state_of_best(10, 5)).step == 5
    else:
        made.write(state_of_best(15, 5), FakeEngine(15), FakeData())
        assert made.best(state_of_best(15, 5)) is None
        assert made.best(state_of_best(15, 15)).step == 15


def test_the_best_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    made, _ = writer(tmp_path)
    for step in (5, 10, 15, 20):
        made.write(state_of_best(step, min(step, 10)), FakeEngine(step), FakeData())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000010"]
    engine: Any = FakeEngine(99)
    made.load_weights(made.best(state_of_best(20, 10)), engine)
    assert torch.equal(engine.shards["a"]["w"], FakeEngine(10).shards["a"]["w"])


def state_of_best(step: int, best_step: int) -> RunState:
    state = state_at(step)
    state.best_step, state.best_loss = best_step, 1.0
    return state


def test_a_checkpoint_that_cannot_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = writer(tmp_path)
    free(monkeypatch, tmp_path, 1)
    first = made.write(state_at(5), FakeEngine(1), FakeData())
    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", None)  # would raise another error
    with pytest.raises(NoSpace, match=r"needs 1.00 MiB and 0 B is free.*step-00000005") as raised:
        made.write(state_at(10), FakeEngine(1), FakeData())
    assert raised.value.exit_code == 5
    assert read_checkpoint(first.path).step == 5, "the newest one stays in any case"
