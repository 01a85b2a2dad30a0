"""When a checkpoint is due, what goes into it, and how a run comes back from one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fluxtrain.errors import BadInput
from fluxtrain.telemetry.events import CheckpointWritten
from fluxtrain.train.announce import Announcer
from fluxtrain.train.checkpoint import (
    Checkpoint,
    Damaged,
    list_checkpoints,
    load_shard_tensors,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from fluxtrain.train.randomness import random_state, restore_random_state
from fluxtrain.train.run_state import RunState

if TYPE_CHECKING:
    from fluxtrain.data.batches import BatchSource
    from fluxtrain.stream.engine import Engine

AUTO_PERIOD_S = 600.0
AUTO_SHARE = 0.05  # of the time, at most, goes into checkpoints that nobody asked for


@dataclass(frozen=True, kw_only=True)
class CheckpointRule:
    """When checkpoints are written without being asked for."""

    every: int | Literal["auto", "end"]
    total_steps: int

    def is_due(self, step: int, last_step: int, since_s: float, last_cost_s: float) -> bool:
        """Whether to save `step`, `since_s` after the last save, which took `last_cost_s`."""
        if step >= self.total_steps:
            return True
        if self.every == "end":
            return False
        if self.every != "auto":
            return step % self.every == 0
        affordable = since_s >= last_cost_s / AUTO_SHARE
        tenth = max(1, -(-self.total_steps // 10))
        return affordable and (step - last_step >= tenth or since_s >= AUTO_PERIOD_S)


class CheckpointKeeper:
    """Writes, prunes and restores the checkpoints of one run."""

    def __init__(
        self,
        root: Path,
        rule: CheckpointRule,
        keep: int,
        announcer: Announcer,
        fingerprint: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._rule = rule
        self._keep = keep
        self._announcer = announcer
        self._fingerprint = fingerprint
        self._clock = clock
        self._last_s = clock()
        self._cost_s = 0.0
        self.last: Checkpoint | None = None
        self.written_bytes = 0

    def is_due(self, step: int) -> bool:
        """Whether the rule asks for a checkpoint now."""
        last_step = self.last.step if self.last else 0
        since_s = self._clock() - self._last_s
        return self._rule.is_due(step, last_step, since_s, self._cost_s)

    def write(self, state: RunState, engine: Engine, data: BatchSource) -> Checkpoint:
        """Save the run as it is between two steps; at a step that is saved already, do nothing.

        Raises NoSpace; the checkpoint before stays the last one.
        """
        if self.last is not None and self.last.step == state.step:
            return self.last
        started_s = self._clock()
        content = {
            "run": state.to_json(),
            "random": random_state(),
            "data": data.state_dict(),
            "chunk_rows": engine.chunk_rows,
            "fingerprint": self._fingerprint,
        }
        self.last = write_checkpoint(self._root, state.step, engine.state_shards(), content)
        self._last_s = self._clock()
        self._cost_s = self._last_s - started_s
        self.written_bytes += self.last.bytes
        prune(self._root, self._keep)
        self._announcer.emit(
            CheckpointWritten(
                step=state.step,
                path=str(self.last.path),
                bytes=self.last.bytes,
                seconds=self._cost_s,
            )
        )
        return self.last

    def restore(self, checkpoint: Checkpoint, engine: Engine, data: BatchSource) -> RunState:
        """Put engine, data and random generators where `checkpoint` was.

        Raises:
            BadInput: it belongs to another model, data or configuration; says what differs.
        """
        content = checkpoint.trainer_state()
        _refuse_other_run(checkpoint.path, content["fingerprint"], self._fingerprint)
        data.load_state_dict(content["data"])
        for name, tensors in load_shard_tensors(checkpoint):
            engine.load_state_shard(name, tensors)
        engine.chunk_rows = content["chunk_rows"]
        restore_random_state(content["random"])
        self.last = checkpoint
        return RunState.from_json(content["run"])

    def last_text(self) -> str:
        """The last good checkpoint in words, for messages."""
        if self.last is None:
            return "no checkpoint was written yet"
        return f"the last good checkpoint is {self.last.path} (step {self.last.step})"


def newest_valid(root: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose bytes are all as written; damaged ones are named and skipped.

    None when there is none at all. Raises BadInput when there are some and all are damaged.
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


def _refuse_other_run(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
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
