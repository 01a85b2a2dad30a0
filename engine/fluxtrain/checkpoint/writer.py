"""Write the checkpoints of a run when they are due, and restore the run from one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fluxtrain.checkpoint.background import BackgroundWrite
from fluxtrain.checkpoint.checkpoint import (
    TRAINER,
    Checkpoint,
    Damaged,
    list_checkpoints,
    load_shard_tensors,
    prune,
    read_checkpoint,
    remove,
    step_folder,
    write_checkpoint,
)
from fluxtrain.checkpoint.newest import (
    damage_in_words_of,
    damage_of,
    older_resumable,
    refuse_beyond_end,
    refuse_later_steps,
    refuse_other_run,
    trainer_content,
    with_cure,
)
from fluxtrain.checkpoint.randomness import random_state, restore_random_state
from fluxtrain.checkpoint.run_state import RunState
from fluxtrain.config.cadence import Cadence
from fluxtrain.errors import DoesNotFit, FluxTrainError, NoSpace
from fluxtrain.optimizer.plausible import Impossible
from fluxtrain.reporting.announce import Announcer
from fluxtrain.reporting.disk_wait import DiskWait
from fluxtrain.reporting.failures import as_told, first_line
from fluxtrain.telemetry.events import CheckpointWritten
from fluxtrain.telemetry.storage import free_bytes
from fluxtrain.units import bytes_text

if TYPE_CHECKING:
    from torch import Tensor

    from fluxtrain.methods.objective import Cursor
    from fluxtrain.methods.optimizer import Optimizer
    from fluxtrain.wrapping.engine import Engine

PERIOD_S = 600.0
TRAINER_BYTES = 1 << 20  # of a checkpoint beside weights and states, at most
SHARE = 0.05  # of the time, at most, goes into checkpoints that nobody asked for


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
        *,
        needs_best: bool = False,
        disk: DiskWait | None = None,
        budget_bytes: int = 0,
        chunk_rows: int | None = None,
    ) -> None:
        """`budget_bytes` of host memory may hold copies of what is written in the background; 0:
        training always waits. `chunk_rows` is as the user set it; None: by the plan."""
        self._root = root
        self._cadence = cadence
        self._keep, self._needs_best = keep, needs_best
        self._announcer = announcer
        self._fingerprint = fingerprint
        self._optimizer = optimizer
        self._disk = disk
        self.budget_bytes = budget_bytes
        self._chunk_rows_set = chunk_rows
        self._under_way: BackgroundWrite | None = None
        self._started_s, self._held_s = 0.0, 0.0
        self._failed = False  # the last one in the background: the disk was full
        self.last: Checkpoint | None = None
        self.read_bytes = 0
        self.written_bytes = 0

    def is_due(self, step: int) -> bool:
        """Return whether the cadence asks for a checkpoint now; an automatic one does not while
        another is under way."""
        if self._under_way is not None and self._cadence.every == "auto":
            return step >= self._cadence.total_steps
        return self._failed or self._cadence.is_due(step)

    def write(self, state: RunState, engine: Engine, data: Cursor) -> Checkpoint:
        """Save the run between two steps; do nothing if the step is saved already.

        Raises NoSpace after the wait for a full disk; the previous checkpoint stays the last one.
        """
        self.finish()
        if self.last is not None and self.last.step == state.step:
            return self.last
        write = partial(self._write, state, engine, data)
        return write() if self._disk is None else self._disk.until_written(write)

    def begin(self, state: RunState, engine: Engine, data: Cursor) -> None:
        """Save the run between two steps, in the background if the plan has memory for it.

        `poll` and `finish` tell of its end. Raises NoSpace as `write`.
        """
        self.finish()
        if not self.budget_bytes or self._failed:
            self.write(state, engine, data)
            return
        if self.last is not None and self.last.step == state.step:
            return
        self._started_s = time.monotonic()
        try:
            self._make_room(engine.shard_bytes() + TRAINER_BYTES, state.best_step)
        except NoSpace:
            self.write(state, engine, data)  # which waits for room
            return
        content, step, best = self._content(state, engine, data), state.step, state.best_step

        def write(shards: Iterator[tuple[str, dict[str, Tensor]]]) -> Checkpoint:
            with engine.device.recorder.working("disk", "checkpoint", f"step {step}"):
                written = write_checkpoint(self._root, step, shards, content)
            prune(self._root, self._keep, step, best)
            return written

        self._under_way = BackgroundWrite(engine, step, write, self.budget_bytes)
        self._held_s = time.monotonic() - self._started_s

    def poll(self) -> None:
        """Tell of the checkpoint in the background, if it is whole since the last call.

        Raises what made it fail; a full disk is waited for by the next `begin`, at once.
        """
        if self._under_way is not None and self._under_way.done:
            self.finish()

    def wait_copied(self) -> None:
        """Wait until nothing of the background reads the engine's memory."""
        if self._under_way is not None:
            self._under_way.wait_copied()

    def finish(self) -> None:
        """Wait for the checkpoint in the background. Raises as `poll`."""
        under_way = self._under_way
        if under_way is None:
            return
        under_way.wait()
        self._under_way = None
        if under_way.checkpoint is None:
            self._given_up(under_way.error or AssertionError("it is done"))
            return
        seconds = time.monotonic() - self._started_s
        self._note(under_way.checkpoint, seconds, self._held_s)

    def close(self) -> None:
        """Wait for the checkpoint in the background where the run ends, whose own error counts."""
        with suppress(Exception):
            self.finish()

    def _given_up(self, error: BaseException) -> None:
        """Go on without the checkpoint in the background, where the next one may succeed: the disk
        was full, or memory for its copies ran out. Raises any other error."""
        why = as_told(error)
        if not isinstance(why, NoSpace | DoesNotFit):
            raise error
        self._failed = True
        if isinstance(why, NoSpace):
            self._announcer.warn(f"{why}; the next checkpoint follows at once")
            return
        self.budget_bytes = 0
        self._announcer.warn(
            f"a checkpoint beside the training was given up ({first_line(error)}): the next one "
            "follows at once, and training waits for it and for those after it"
        )

    def write_last(self, state: RunState, engine: Engine, data: Cursor) -> None:
        """Save the steps of a run that is about to end for want of memory; where that fails too,
        say so: the checkpoint before stays the last one."""
        try:
            engine.flush()
            if state.step > 0:
                self.write(state, engine, data)
        except (FluxTrainError, RuntimeError, MemoryError) as error:
            self._announcer.warn(f"no checkpoint of step {state.step}: {first_line(error)}")

    def _write(self, state: RunState, engine: Engine, data: Cursor) -> Checkpoint:
        started_s = time.monotonic()
        self._make_room(engine.shard_bytes() + TRAINER_BYTES, state.best_step)
        content = self._content(state, engine, data)
        with engine.device.recorder.working("disk", "checkpoint", f"step {state.step}"):
            written = write_checkpoint(self._root, state.step, self._shards(engine), content)
        prune(self._root, self._keep, state.step, state.best_step)
        self._note(written, time.monotonic() - started_s, None)
        return written

    def _note(self, written: Checkpoint, seconds: float, held_s: float | None) -> None:
        """Tell of a checkpoint that is whole, and count what it cost."""
        self.last, self._failed = written, False
        self._cadence.done(written.step, seconds if held_s is None else held_s)
        self.written_bytes += written.bytes
        self._announcer.emit(
            CheckpointWritten(
                step=written.step,
                path=str(written.path),
                bytes=written.bytes,
                seconds=seconds,
                held_s=held_s,
            )
        )

    def _content(self, state: RunState, engine: Engine, data: Cursor) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint."""
        content: dict[str, Any] = {
            "run": state.to_json(),
            "random": random_state(),
            "data": data.state_dict(),
            "chunk_rows": engine.chunk_rows,
            "chunk_rows_set": self._chunk_rows_set,
            "fingerprint": self._fingerprint,
            "threads": torch.get_num_threads(),
        }
        if engine.loss_scale is not None:
            content["loss_scale"] = engine.loss_scale.state_dict()
        return content

    def resume(self, checkpoint: Checkpoint, engine: Engine, data: Cursor) -> RunState:
        """Restore from `checkpoint`, or from the newest one before it that is whole, if it turns
        out to lack what this model needs and the user did not name it.

        Raises:
            BadInput: none is whole, or it belongs to another run.
        """
        while True:
            try:
                return self.restore(checkpoint, engine, data)
            except Damaged as damage:
                if checkpoint.named:
                    raise with_cure(damage) from None
                older = older_resumable(self._root, self._announcer.warn, checkpoint, damage)
            self._announcer.warn(f"took the checkpoint before it: {older.path.name}")
            checkpoint = older

    def restore(self, checkpoint: Checkpoint, engine: Engine, data: Cursor) -> RunState:
        """Restore engine, data and random generators from `checkpoint`.

        Raises:
            BadInput: it belongs to another model, data or configuration; says what differs.
            Damaged: it lacks a part of the model, or holds what no trainer writes.
        """
        content = trainer_content(checkpoint)
        refuse_other_run(checkpoint.path, content["fingerprint"], self._fingerprint)
        self.refuse_incomplete(checkpoint, engine)
        refuse_beyond_end(checkpoint, self._cadence.total_steps)
        with damage_of(checkpoint):
            state = RunState.from_json(content["run"])
            if state.step != checkpoint.step:
                raise ValueError(f"{TRAINER} is of step {state.step}")
            data.load_state_dict(content["data"])
            if data.served_steps not in (None, state.step):
                raise ValueError(f"its data are those of {data.served_steps:.6g} steps")
        if engine.loss_scale is not None:
            with damage_in_words_of(checkpoint):
                engine.loss_scale.load_state_dict(content.get("loss_scale", {}))
        self.load_weights(checkpoint, engine)
        engine.chunk_rows = self._chunk_rows_of(content)
        with damage_of(checkpoint):
            restore_random_state(content["random"])
        self._tell_of_threads(content["threads"])
        self.last = checkpoint
        self._cadence.done(checkpoint.step, 0.0)
        return state

    def _chunk_rows_of(self, content: dict[str, Any]) -> int:
        """Return the chunk that a run goes on with: the one it had, as losses depend on it, unless
        the user has set another one since."""
        had: int = content["chunk_rows"]
        asked = self._chunk_rows_set
        if asked in (None, had, content.get("chunk_rows_set", asked)):
            return had
        self._announcer.warn(
            f"placement.chunk_rows is {asked} now, as set, and was {had}: losses differ in their "
            "last digits from those of a run that never stopped, and with dropout by what is drawn"
        )
        return asked

    def refuse_incomplete(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Raise Damaged for a checkpoint without a shard of every group: what is missing would keep
        the weights that the run began with."""
        needed = (*engine.shard_names(), *self._optimizer.shard_names)
        held = {name for name, _ in checkpoint.shards}
        if lacking := [name for name in needed if name not in held]:
            raise Damaged(
                f"{checkpoint.path.name}: its manifest lacks {len(lacking)} of the {len(needed)} "
                f"groups of the model, first {lacking[0]!r}"
            )

    def best(self, state: RunState, engine: Engine) -> Checkpoint | None:
        """Return the checkpoint of the best evaluation; None where there is none.

        Raises Damaged.
        """
        if state.best_step is None:
            return None
        if self.last is not None and self.last.step == state.best_step:
            return self.last
        folder = step_folder(self._root, state.best_step)
        if not folder.is_dir():
            return None
        found = read_checkpoint(folder)
        self.refuse_incomplete(found, engine)
        return found

    def load_weights(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Load weights and states alone, as nothing is trained afterwards. Raises Damaged."""
        for name, tensors in load_shard_tensors(checkpoint):
            with damage_in_words_of(checkpoint, Impossible):
                if self._optimizer.load_state_shard(name, tensors):
                    continue
            with damage_in_words_of(checkpoint):
                refuse_later_steps(tensors, checkpoint.step)
                engine.load_state_shard(name, tensors)
        self.read_bytes += checkpoint.bytes

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

    def _make_room(self, needed_bytes: int, best_step: int | None) -> None:
        """Remove older checkpoints if a new one does not fit beside them; nothing is written yet.

        The newest one always stays, and the best one where it is needed. Raises NoSpace if the new
        one still does not fit.
        """
        free = free_bytes(self._root)
        if free is None or free >= needed_bytes:
            return
        best = step_folder(self._root, best_step) if best_step is not None else None
        found = list_checkpoints(self._root)[1:]
        older = [path for path in found if path != best]
        if best in found and not self._needs_best:
            older = [best, *older]  # goes last
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
        """Name the last good checkpoint, for messages, once it is whole."""
        last = self.last
        if self._under_way is not None:
            self._under_way.wait()
            last = self._under_way.checkpoint or last
        if last is None:
            return "no checkpoint was written yet"
        return f"the last good checkpoint is {last.path} (step {last.step})"
