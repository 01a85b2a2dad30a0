"""Write the checkpoints of a run when they are due, and restore the run from one."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fluxtrain.config.cadence import Cadence
from fluxtrain.core.optimizer.state_shards import EXCHANGE
from fluxtrain.core.ranks.join import ALONE
from fluxtrain.errors import BadInput, DoesNotFit, FluxTrainError, NoSpace
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import CheckpointWritten
from fluxtrain.events.run_folder.own_files import KEPT, kept_beside
from fluxtrain.events.run_folder.run_dir import Holding
from fluxtrain.files.atomic import free_bytes
from fluxtrain.files.cache import Damaged
from fluxtrain.files.opening import is_plain_folder, kind_of
from fluxtrain.machine.failures import as_told, first_line
from fluxtrain.train.checkpoint.background import BackgroundWrite, CopyMemory
from fluxtrain.train.checkpoint.checkpoint import (
    MANIFEST,
    Checkpoint,
    list_checkpoints,
    prune,
    read_checkpoint,
    remove,
    step_folder,
    write_checkpoint,
)
from fluxtrain.train.checkpoint.newest import (
    changed_settings,
    chunk_rows_of,
    damage_in_words_of,
    older_resumable,
    refuse_beyond_end,
    with_cure,
)
from fluxtrain.train.checkpoint.randomness import (
    random_state,
    restore_random_state,
    tell_of_threads,
)
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.observe.disk_wait import DiskWait
from fluxtrain.units import bytes_text

if TYPE_CHECKING:
    from torch import Tensor

    from fluxtrain.methods.engine import TrainingEngine as Engine
    from fluxtrain.methods.objective import Cursor
    from fluxtrain.methods.optimizer import Optimizer

PERIOD_S = 600.0
TRAINER_BYTES = 1 << 20  # of a checkpoint besides weights and states, at most
SHARE = 0.05  # of the time, at most, goes into checkpoints that nobody asked for


class CannotSave(BadInput):
    """A checkpoint cannot be written, for another reason than a full disk."""


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
        """Prepare checkpoints.

        `budget_bytes` of host memory may hold copies for writing in the background; 0: training
        always waits. `chunk_rows` is the user's; None: by the plan.
        """
        self._root = root
        self._cadence = cadence
        self._keep, self._needs_best = keep, needs_best
        self._announcer = announcer
        self._fingerprint = fingerprint
        self._optimizer = optimizer
        self._disk = disk
        self.budget_bytes = budget_bytes
        self._state_bytes = 0  # of a checkpoint, once it is known
        self._chunk_rows_set = chunk_rows
        self.together = ALONE  # the ranks that share the weights
        self.generation: dict[str, Any] = {}  # settings that training has set, for an export
        self._under_way: BackgroundWrite | None = None
        self._memory: CopyMemory | None = None
        self._started_s = self._held_s = 0.0
        self._failed = False  # the last one in the background: the disk was full
        self.last: Checkpoint | None = None
        self._look: Callable[[], None] = lambda: None
        self._glance = self._look
        self.read_bytes = self.written_bytes = 0

    def follow(self, holding: Holding, state_bytes: int = 0) -> None:
        """Check where the run's folder is before each checkpoint, and from time to time. A
        checkpoint holds `state_bytes`, where known."""
        self._state_bytes = state_bytes
        self._look, self._glance = holding.look, holding.glance
        holding.followed_by(self._moved)

    def _moved(self, old: Path, new: Path) -> None:
        self._root = new / self._root.relative_to(old)
        if self.last is not None and self.last.path.is_relative_to(old):
            self.last = replace(self.last, path=new / self.last.path.relative_to(old))

    def _ready(self) -> None:
        """Make the folder where it is missing; move anything else in its place aside.

        Raises OSError, and BadInput as `Holding.look`.
        """
        self._look()
        root = self._root
        if os.path.lexists(root) and not is_plain_folder(root):
            kind = kind_of(root) or "a file"
            place = kept_beside(root, root.parent / KEPT)
            self._announcer.warn(
                f"{root} is {kind}, and the run's checkpoints go there: it is {place} now"
            )
        root.mkdir(exist_ok=True)

    def is_due(self, step: int) -> bool:
        """Return whether the cadence asks for a checkpoint now; an automatic one does not while
        another is under way."""
        if self._under_way is not None and self._cadence.every == "auto":
            return step >= self._cadence.total_steps
        return self._failed or self._cadence.is_due(step)

    def write(self, state: RunState, engine: Engine, data: Cursor) -> Checkpoint | None:
        """Save the run between two steps; do nothing if the step is saved already.

        Raises NoSpace after the wait for a full disk, and CannotSave where its folder cannot be
        written; the previous checkpoint stays the last one. BadInput: see `Holding.look`.
        """
        self.finish()
        try:
            if (standing := self._standing(state.step)) is not None:
                return standing
            write = partial(self._write_again, state, engine, data)
            return write() if self._disk is None else self._disk.until_written(write)
        finally:
            self.together.of_first(False)  # the other ranks go on

    def save(
        self, state: RunState, engine: Engine, data: Cursor, *, background: bool = True
    ) -> None:
        """Save the run between two steps, in the `background` if the plan has memory for it: `poll`
        and `finish` tell of its end. Where its folder cannot be written, say so and go on.

        Raises NoSpace as `write`.
        """
        started_s = time.monotonic()
        try:
            self.finish()
            if not (background and self._begins(state, engine, data)):
                self.write(state, engine, data)
        except CannotSave as error:
            self._failed = False
            self._cadence.done(state.step, time.monotonic() - started_s)
            self._announcer.warn(
                f"step {state.step} is not saved, and the training goes on until the next "
                f"checkpoint is due: {error}"
            )

    def _begins(self, state: RunState, engine: Engine, data: Cursor) -> bool:
        """Begin to save the run in the background, where allowed and possible; return whether it
        began."""
        if not self.budget_bytes or self._failed or self._standing(state.step) is not None:
            return False
        on_disk = any(row.is_on("disk", "state") for row in engine.plan.groups)
        self._started_s = time.monotonic()
        try:
            self._ready()
            self._make_room(engine, state.best_step)
        except OSError:  # `write` tries again, or waits for room
            return False
        content, step, best = self._content(state, engine, data), state.step, state.best_step

        def write(
            shards: Iterator[tuple[str, dict[str, Tensor]]],
            forget: Callable[[dict[str, Tensor]], None],
        ) -> Checkpoint:
            with engine.device.recorder.working("disk", "checkpoint", f"step {step}"):
                written = write_checkpoint(self._root, step, shards, content, forget)
            self._prune(step, best)
            return written

        memory = None if on_disk else self._copy_memory()
        try:
            self._under_way = BackgroundWrite(
                engine, step, write, self.budget_bytes, memory, in_place=on_disk
            )
        except (RuntimeError, MemoryError) as error:  # no thread or memory, else it is raised
            self._given_up(step, error)
            return False
        self._held_s = time.monotonic() - self._started_s
        return True

    def _copy_memory(self) -> CopyMemory | None:
        """Return the memory for copies, where the budget holds all of the state at once."""
        if self._memory is None and 0 < self._state_bytes <= self.budget_bytes:
            self._memory = CopyMemory(self.budget_bytes)
        return self._memory

    def poll(self, step: int) -> None:
        """Tell of the checkpoint in the background, if it is whole since the last call, look where
        the run's folder is, and take memory for the next copies. Raises what made it fail; a full
        disk is waited for by the next `save`, at once."""
        self._glance()
        if self._cadence.nears(step) and (memory := self._copy_memory()) is not None:
            memory.make_ahead()
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
            self._given_up(under_way.step, under_way.error or AssertionError("it is done"))
            return
        seconds = time.monotonic() - self._started_s
        path = self._root / under_way.checkpoint.path.name  # it may have moved since
        held_s = self._held_s + under_way.held_s
        self._note(replace(under_way.checkpoint, path=path), seconds, held_s)

    def close(self) -> None:
        """Wait for the checkpoint in the background where the run ends, whose own error counts."""
        with suppress(Exception):
            self.finish()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _given_up(self, step: int, error: BaseException) -> None:
        """Go on without the checkpoint in the background, where the next one may succeed: the disk
        was full, its files were taken away, or memory for its copies ran out. Raises any other
        error."""
        refused = as_told(error)
        if not isinstance(error, OSError) and not isinstance(refused, DoesNotFit | NoSpace):
            raise error
        waits = ""
        if isinstance(refused, DoesNotFit):
            self.budget_bytes, self._memory = 0, None
            waits = ", and training waits for it and for those after it"
        self._failed = True
        reason = _reason_of(error) if isinstance(error, OSError) else first_line(error)
        self._announcer.warn(
            f"the checkpoint of step {step} could not be written during the training ({reason}): "
            f"the next checkpoint follows at once{waits}"
        )

    def write_last(self, state: RunState, engine: Engine, data: Cursor) -> None:
        """Save the steps of a run that ends for want of memory; where that fails too, say so."""
        try:
            engine.flush()
            if state.step > 0:
                self.write(state, engine, data)
        except (FluxTrainError, RuntimeError, MemoryError) as error:
            self._announcer.warn(f"no checkpoint of step {state.step}: {first_line(error)}")

    def _write_again(self, state: RunState, engine: Engine, data: Cursor) -> Checkpoint:
        """Write a checkpoint; once more where the folder, or a file in it, was taken away or
        replaced meanwhile. Raises NoSpace, and CannotSave where the second attempt fails too."""
        for is_last in (False, True):
            try:
                self._ready()
                return self._write(state, engine, data)
            except FluxTrainError:
                raise
            except OSError as error:
                refused = as_told(error)
                if refused is not None and not isinstance(refused, BadInput):
                    raise refused from error
                if is_last:
                    raise CannotSave(
                        f"no checkpoint can be written, in 2 attempts ({_reason_of(error)}): let "
                        "this user write there, and leave the folder to the run; "
                        f"{self.last_text()}"
                    ) from error
        raise AssertionError("each attempt returns or raises")

    def _write(self, state: RunState, engine: Engine, data: Cursor) -> Checkpoint:
        started_s = time.monotonic()
        self._make_room(engine, state.best_step)
        content = self._content(state, engine, data)
        with engine.device.recorder.working("disk", "checkpoint", f"step {state.step}"):
            self.together.of_first(True)  # the other ranks send what they are home to
            shards = self._shards(engine)
            try:
                written = write_checkpoint(self._root, state.step, shards, content)
            finally:
                deque(shards, maxlen=0)  # also where it failed: they send all
        self._prune(state.step, state.best_step)
        self._note(written, time.monotonic() - started_s, None)
        return written

    def _prune(self, step: int, best_step: int | None) -> None:
        try:
            prune(self._root, self._keep, step, best_step)
        except OSError as error:
            self._announcer.warn(f"an older checkpoint cannot be removed ({_reason_of(error)})")

    def _note(self, written: Checkpoint, seconds: float, held_s: float | None) -> None:
        """Announce a complete checkpoint, and count its cost."""
        self.last, self._failed = written, False
        self._cadence.done(written.step, seconds if held_s is None else held_s)
        self.written_bytes += written.bytes
        self._announcer.emit(
            CheckpointWritten(
                step=written.step, path=str(written.path), bytes=written.bytes,
                seconds=seconds, held_s=held_s,
            )
        )  # fmt: skip

    def _content(self, state: RunState, engine: Engine, data: Cursor) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint."""
        content: dict[str, Any] = {
            "run": state.to_json(), "random": random_state(), "data": data.state_dict(),
            "chunk_rows": engine.chunk_rows, "chunk_rows_set": self._chunk_rows_set,
            "fingerprint": self._fingerprint, "threads": torch.get_num_threads(),
            "generation": self.generation,
        }  # fmt: skip
        if engine.loss_scale is not None:
            content["loss_scale"] = engine.loss_scale.state_dict()
        return content

    def resume(self, checkpoint: Checkpoint, engine: Engine, data: Cursor) -> RunState:
        """Restore from `checkpoint`, or from the newest one before it that is whole, if it turns
        out to lack what this model needs and the user did not name it.

        Raises BadInput: none is whole, or it belongs to another run.
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
            Damaged: a file of it cannot be read any more.
        """
        content = checkpoint.trainer_state()
        changed = changed_settings(checkpoint.path, content["fingerprint"], self._fingerprint)
        refuse_beyond_end(checkpoint, self._cadence.total_steps)
        state = RunState.from_json(content["run"])
        data.load_state_dict(content["data"])
        if engine.loss_scale is not None:
            engine.loss_scale.load_state_dict(content["loss_scale"])
        self.load_weights(checkpoint, engine)
        before, now = _compression_of(checkpoint), engine.compression
        if before not in ("", now):
            self._announcer.warn(
                f"gradients were compressed by {before}, and are now "
                f"{f'by {now}' if now else 'not compressed'}: what compression keeps from step to "
                "step begins anew"
            )
        engine.chunk_rows = chunk_rows_of(content, self._chunk_rows_set, self._announcer.warn)
        restore_random_state(content["random"])
        tell_of_threads(content["threads"], self._announcer.warn)
        if changed:
            words = f"from step {state.step + 1} on {'; '.join(changed)}"
            state.changed.append(words)
            self._announcer.warn(f"{words}: the losses are not those of a run that never stopped")
        self.last = checkpoint
        self._cadence.done(checkpoint.step, 0.0)
        return state

    def best(self, state: RunState) -> Checkpoint | None:
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
        return read_checkpoint(folder)

    def load_weights(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Load weights and states alone, as nothing is trained afterwards. Raises Damaged."""
        for name, tensors in checkpoint.load_shards():
            if self._optimizer.load_state_shard(name, tensors):
                continue
            with damage_in_words_of(checkpoint):
                engine.load_state_shard(name, tensors)
        self.read_bytes += checkpoint.bytes

    def _shards(self, engine: Engine) -> Iterator[tuple[str, dict[str, Tensor]]]:
        yield from engine.state_shards()
        yield from self._optimizer.state_shards()

    def _make_room(self, engine: Engine, best_step: int | None) -> None:
        """Remove older checkpoints if a new one does not fit otherwise; nothing is written yet.

        The newest one always stays, and the best one where it is needed. Raises NoSpace if the new
        one does not fit even so.
        """
        needed = engine.shard_bytes() + TRAINER_BYTES
        free = free_bytes(self._root)
        if free is None or free >= needed:
            return
        best = step_folder(self._root, best_step) if best_step is not None else None
        found = list_checkpoints(self._root)[1:]
        older = [path for path in found if path != best]
        if best is not None and best in found and not self._needs_best:
            older = [best, *older]  # goes last
        for path in reversed(older):
            remove(path)
            free = free_bytes(self._root)
            self._announcer.warn(
                f"{path.name} was removed to make room for the next checkpoint "
                f"({bytes_text(needed)} needed, {bytes_text(free)} free now): lower "
                "train.keep_checkpoints or free some space to keep more"
            )
            if free is None or free >= needed:
                return
        raise NoSpace(
            f"the next checkpoint needs {bytes_text(needed)} and {bytes_text(free)} is free under "
            f"{self._root}: free some space, then go on with --resume; nothing was written, "
            f"{self.last_text()}"
        )

    def _standing(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of `step` if it is the last one and still exists."""
        last = self.last
        return last if last is not None and last.step == step and _stands(last) else None

    def last_text(self) -> str:
        """Name the last good checkpoint, for messages, once it is whole."""
        last = self.last
        if self._under_way is not None:
            self._under_way.wait()
            last = self._under_way.checkpoint or last
        if last is None:
            return "no checkpoint was written yet"
        if not _stands(last):
            return f"the last checkpoint ({last.path}, step {last.step}) was removed by others"
        return f"the last good checkpoint is {last.path} (step {last.step})"


def _compression_of(checkpoint: Checkpoint) -> str:
    """Return the compression of gradients that a checkpoint has the state of; "" if of none."""
    named = [name for name, _ in checkpoint.shards if name.startswith(EXCHANGE)]
    return named[0].split(".", 2)[2] if named else ""


def _stands(last: Checkpoint) -> bool:
    """Return whether a complete checkpoint still exists."""
    return (last.path / MANIFEST).is_file()


def _reason_of(error: OSError) -> str:
    """Say which file the system refused, and why."""
    why = error.strerror or str(error)
    return f"{error.filename}: {why}" if error.filename else why
