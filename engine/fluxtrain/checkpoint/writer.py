"""Write the checkpoints of a run when they are due, and restore the run from one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    step_folder,
    write_checkpoint,
)
from fluxtrain.checkpoint.randomness import random_state, restore_random_state
from fluxtrain.checkpoint.run_state import RunState
from fluxtrain.config.cadence import Cadence
from fluxtrain.errors import BadInput, FluxTrainError, NoSpace
from fluxtrain.optimizer.plausible import Impossible
from fluxtrain.reporting.announce import Announcer
from fluxtrain.reporting.disk_wait import DiskWait
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
        *,
        needs_best: bool = False,
        disk: DiskWait | None = None,
    ) -> None:
        self._root = root
        self._cadence = cadence
        self._keep, self._needs_best = keep, needs_best
        self._announcer = announcer
        self._fingerprint = fingerprint
        self._optimizer = optimizer
        self._disk = disk or DiskWait(0.0, announcer, lambda: False)
        self.last: Checkpoint | None = None
        self.read_bytes = 0
        self.written_bytes = 0

    def is_due(self, step: int) -> bool:
        """Return whether the cadence asks for a checkpoint now."""
        return self._cadence.is_due(step)

    def write(self, state: RunState, engine: Engine, data: Cursor) -> Checkpoint:
        """Save the run between two steps; do nothing if the step is saved already.

        Raises NoSpace after the wait for a full disk; the previous checkpoint stays the last one.
        """
        if self.last is not None and self.last.step == state.step:
            return self.last
        return self._disk.until_written(lambda: self._write(state, engine, data))

    def _write(self, state: RunState, engine: Engine, data: Cursor) -> Checkpoint:
        started_s = time.monotonic()
        self._make_room(engine.shard_bytes() + TRAINER_BYTES, state.best_step)
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
        prune(self._root, self._keep, state.step, state.best_step)
        self._announcer.emit(
            CheckpointWritten(
                step=state.step,
                path=str(self.last.path),
                bytes=self.last.bytes,
                seconds=seconds,
            )
        )
        return self.last

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
                self._announcer.warn(f"skipped a damaged checkpoint: {damage}")
            older = newest_resumable(self._root, self._announcer.warn, checkpoint.path.name)
            assert older is not None, "without an older one it raises"
            self._announcer.warn(f"took the checkpoint before it: {older.path.name}")
            checkpoint = older

    def restore(self, checkpoint: Checkpoint, engine: Engine, data: Cursor) -> RunState:
        """Restore engine, data and random generators from `checkpoint`.

        Raises:
            BadInput: it belongs to another model, data or configuration; says what differs.
            Damaged: it lacks a part of the model, or holds what no trainer writes.
        """
        content = trainer_content(checkpoint)
        _refuse_other_run(checkpoint.path, content["fingerprint"], self._fingerprint)
        self.refuse_incomplete(checkpoint, engine)
        self._refuse_beyond_end(checkpoint)
        with _damage_of(checkpoint):
            state = RunState.from_json(content["run"])
            if state.step != checkpoint.step:
                raise ValueError(f"{TRAINER} is of step {state.step}")
            data.load_state_dict(content["data"])
        if engine.loss_scale is not None:
            with _damage_in_words_of(checkpoint):
                engine.loss_scale.load_state_dict(content.get("loss_scale", {}))
        self.load_weights(checkpoint, engine)
        engine.chunk_rows = content["chunk_rows"]
        with _damage_of(checkpoint):
            restore_random_state(content["random"])
        self._tell_of_threads(content["threads"])
        self.last = checkpoint
        self._cadence.done(checkpoint.step, 0.0)
        return state

    def _refuse_beyond_end(self, checkpoint: Checkpoint) -> None:
        """Raise Damaged for a checkpoint of a step that the run does not have."""
        total = self._cadence.total_steps
        if checkpoint.step > total:
            raise Damaged(
                f"{checkpoint.path.name} is of step {checkpoint.step} and the run ends at step "
                f"{total}: raise train.steps (or train.epochs) if it was lowered"
            )

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
            with _damage_in_words_of(checkpoint, Impossible):
                if self._optimizer.load_state_shard(name, tensors):
                    continue
            with _damage_in_words_of(checkpoint):
                _refuse_later_steps(tensors, checkpoint.step)
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
        """Name the last good checkpoint, for messages."""
        if self.last is None:
            return "no checkpoint was written yet"
        return f"the last good checkpoint is {self.last.path} (step {self.last.step})"


def newest_valid(
    root: Path, warn: Callable[[str], None], before: str | None = None
) -> Checkpoint | None:
    """Find the newest checkpoint without damage; name and skip damaged ones.

    before: the name of a folder; only those of earlier steps are looked at.
    None if there are no checkpoints. Raises BadInput if all are damaged.
    """
    found = [path for path in list_checkpoints(root) if before is None or path.name < before]
    for path in found:
        try:
            return _of_its_name(read_checkpoint(path))
        except Damaged as damage:
            warn(f"skipped a damaged checkpoint: {damage}")
    if found:
        raise _all_damaged(root)
    return None


def _of_its_name(checkpoint: Checkpoint) -> Checkpoint:
    """Return it; raise Damaged for one under the name of another step, such as a copy."""
    if checkpoint.path.name != step_folder(checkpoint.path.parent, checkpoint.step).name:
        raise Damaged(f"{checkpoint.path.name} holds step {checkpoint.step}")
    return checkpoint


def newest_resumable(
    root: Path, warn: Callable[[str], None], before: str | None = None
) -> Checkpoint | None:
    """Find the newest checkpoint whose trainer's state can be read too, as `newest_valid` does.

    None if there are no checkpoints. Raises BadInput if none is whole, also `before` a folder.
    """
    while (found := newest_valid(root, warn, before)) is not None:
        try:
            trainer_content(found)
            return found
        except Damaged as damage:
            warn(f"skipped a damaged checkpoint: {damage}")
        before = found.path.name
    if before is not None:
        raise _all_damaged(root)
    return None


def with_cure(damage: Damaged) -> Damaged:
    """Add what to do about a damaged checkpoint that the user named."""
    return Damaged(
        f"{damage}: name another checkpoint, or the run's folder to go on from its newest whole one"
    )


def _all_damaged(root: Path) -> BadInput:
    return BadInput(
        f"all {len(list_checkpoints(root))} checkpoints under {root} are damaged: start again in "
        "another --run-dir"
    )


@contextmanager
def _damage_of(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise Damaged for errors that content makes which no trainer writes, if its seal is right."""
    try:
        yield
    except FluxTrainError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise Damaged(f"{checkpoint.path.name}: {TRAINER} is not what was written ({e})") from e


@contextmanager
def _damage_in_words_of(checkpoint: Checkpoint, kind: type[BadInput] = BadInput) -> Iterator[None]:
    """Raise Damaged for what a part of the run refuses to be restored to."""
    try:
        yield
    except kind as error:
        raise Damaged(f"{checkpoint.path.name}: {error}") from error


def _refuse_later_steps(tensors: dict[str, Tensor], last: int) -> None:
    """Raise BadInput for a parameter that counts more updates than the run has made steps."""
    for name, count in tensors.items():
        if name.endswith(".step") and count.numel() == 1 and int(count) > last:
            raise BadInput(f"its {name} is {int(count)}, after step {last}")


def trainer_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read what `CheckpointWriter.write` wrote. Raises Damaged for anything else."""
    try:
        content = checkpoint.trainer_state()
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{checkpoint.path.name}: {TRAINER} cannot be read ({error})") from None
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
