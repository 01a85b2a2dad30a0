"""Write the checkpoints of a run when they are due, and restore the run from one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from fluxtrain.checkpoint.checkpoint import (
    TRAINER,
    Checkpoint,
    Damaged,
    check_content,
    list_checkpoints,
    load_shard_tensors,
    prune,
    read_checkpoint,
    remove,
    write_checkpoint,
)
from fluxtrain.checkpoint.randomness import random_state, restore_random_state
from fluxtrain.checkpoint.run_state import RunState
from fluxtrain.config.cadence import Cadence
from fluxtrain.errors import BadInput, NoSpace
from fluxtrain.reporting.announce import Announcer
from fluxtrain.telemetry.events import CheckpointWritten
from fluxtrain.telemetry.storage import free_bytes
from fluxtrain.units import bytes_text

if TYPE_CHECKING:
    from torch import Tensor

    from fluxtrain.methods.objective import Cursor
    from fluxtrain.methods.optimizer import Optimizer
    from fluxtrain.wrapping.engine import Engine

PERIOD_S = 600.0
_BEFORE = {
    "train.states": "fp32",
    "train.optimizer": "adamw",
}  # values in checkpoints that are older than the setting
TRAINER_BYTES = 1 << 20  # of a checkpoint beside weights and states, at most
SHARE = 0.05  # of the time, at most, goes into checkpoints that nobody asked for


class _Content(msgspec.Struct):
    """The content of trainer.json, by kind."""

    run: dict[str, Any]
    random: dict[str, Any]
    data: dict[str, Any]
    chunk_rows: Annotated[int, msgspec.Meta(ge=1)]
    fingerprint: dict[str, Any]
    threads: Annotated[int, msgspec.Meta(ge=1)]  # that share a computation


class CheckpointWriter:
    """Writes, prunes and restores the checkpoints of one run."""

    def __init__(
        self,
        root: Path,
        cadence: Cadence,
        keep: int,
        announcer: Announcer,
        fingerprint: dict[str, Any],
        optimizer: Optimizer,
    ) -> None:
        self._root = root
        self._cadence = cadence
        self._keep = keep
        self._announcer = announcer
        self._fingerprint = fingerprint
        self._optimizer = optimizer
        self.last: Checkpoint | None = None
        self.read_bytes = 0
        self.written_bytes = 0

    def is_due(self, step: int) -> bool:
        """Return whether the cadence asks for a checkpoint now."""
        return self._cadence.is_due(step)

    def write(self, state: RunState, engine: Engine, data: Cursor) -> Checkpoint:
        """Save the run between two steps; do nothing if the step is saved already.

        Raises NoSpace; the previous checkpoint stays the last one.
        """
        if self.last is not None and self.last.step == state.step:
            return self.last
        started_s = time.monotonic()
        self._make_room(engine.shard_bytes() + TRAINER_BYTES)
        content = {
            "run": state.to_json(),
            "random": random_state(),
            "data": data.state_dict(),
            "chunk_rows": engine.chunk_rows,
            "fingerprint": self._fingerprint,
            "threads": torch.get_num_threads(),
        }
        if engine.loss_scale is not None:
            content["loss_scale"] = engine.loss_scale.state_dict()
        with engine.device.recorder.working("disk", "checkpoint", f"step {state.step}"):
            self.last = write_checkpoint(self._root, state.step, self._shards(engine), content)
        seconds = time.monotonic() - started_s
        self._cadence.done(state.step, seconds)
        self.written_bytes += self.last.bytes
        prune(self._root, self._keep, state.step)
        self._announcer.emit(
            CheckpointWritten(
                step=state.step,
                path=str(self.last.path),
                bytes=self.last.bytes,
                seconds=seconds,
            )
        )
        return self.last

    def restore(self, checkpoint: Checkpoint, engine: Engine, data: Cursor) -> RunState:
        """Restore engine, data and random generators from `checkpoint`.

        Raises:
            BadInput: it belongs to another model, data or configuration; says what differs.
        """
        content = trainer_content(checkpoint)
        _refuse_other_run(checkpoint.path, content["fingerprint"], self._fingerprint)
        data.load_state_dict(content["data"])
        for name, tensors in load_shard_tensors(checkpoint):
            if not self._optimizer.load_state_shard(name, tensors):
                engine.load_state_shard(name, tensors)
        engine.chunk_rows = content["chunk_rows"]
        if engine.loss_scale is not None:
            engine.loss_scale.load_state_dict(content.get("loss_scale", {}))
        restore_random_state(content["random"])
        self._tell_of_threads(content["threads"])
        self.last = checkpoint
        self.read_bytes += checkpoint.bytes
        self._cadence.done(checkpoint.step, 0.0)
        return RunState.from_json(content["run"])

    def _tell_of_threads(self, before: int) -> None:
        """Warn where a sum is shared by another number of threads than before, and so rounded
        otherwise."""
        now = torch.get_num_threads()
        if before != now:
            self._announcer.warn(
                f"the run computed with {before} threads before and has {now} now: its losses will "
                f"differ in their last digits from those of a run that never stopped; set "
                f"OMP_NUM_THREADS={before} for the same bits"
            )

    def _shards(self, engine: Engine) -> Iterator[tuple[str, dict[str, Tensor]]]:
        yield from engine.state_shards()
        yield from self._optimizer.state_shards()

    def _make_room(self, needed_bytes: int) -> None:
        """Remove older checkpoints if a new one does not fit beside them; nothing is written yet.

        The newest one always stays. Raises NoSpace if the new one still does not fit.
        """
        free = free_bytes(self._root)
        if free is None or free >= needed_bytes:
            return
        older = list_checkpoints(self._root)[1:]
        for path in reversed(older):
            remove(path)
            free = free_bytes(self._root)
            self._announcer.warn(
                f"{path.name} was removed to make room for the next checkpoint "
                f"({bytes_text(needed_bytes)} needed, {bytes_text(free)} free now): lower "
                "train.keep_checkpoints or free some space to keep more"
            )
            if free is None or free >= needed_bytes:
                return
        raise NoSpace(
            f"the next checkpoint needs {bytes_text(needed_bytes)} and {bytes_text(free)} is free "
            f"under {self._root}: free some space, then go on with --resume; nothing was written, "
            f"{self.last_text()}"
        )

    def last_text(self) -> str:
        """Name the last good checkpoint, for messages."""
        if self.last is None:
            return "no checkpoint was written yet"
        return f"the last good checkpoint is {self.last.path} (step {self.last.step})"


def newest_valid(root: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Find the newest checkpoint without damage; name and skip damaged ones.

    None if there are no checkpoints. Raises BadInput if all are damaged.
    """
    found = list_checkpoints(root)
    for path in found:
        try:
            return read_checkpoint(path)
        except Damaged as damage:
            warn(f"skipped a damaged checkpoint: {damage}")
    if found:
        raise BadInput(
            f"all {len(found)} checkpoints under {root} are damaged: start again in another "
            "--run-dir"
        )
    return None


def trainer_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read what `CheckpointWriter.write` wrote. Raises Damaged for anything else."""
    content = checkpoint.trainer_state()
    check_content(content, _Content, f"{checkpoint.path.name}: {TRAINER}")
    return content


def _refuse_other_run(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    old, new = {**_BEFORE, **old}, {**_BEFORE, **new}
    different = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    if not different:
        return
    listed = "; ".join(
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in sorted(different)
    )
    raise BadInput(
        f"{path.name} belongs to another run ({listed}): resume with the settings it was made "
        "with, or start a new run in another --run-dir"
    )
