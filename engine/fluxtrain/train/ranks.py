"""`fluxtrain train` as one of several processes: rank 0 keeps the records, the others compute."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxtrain.config.schema import RunConfig
from fluxtrain.core.ranks.join import Ranks, join_launched, launched_world, lost_text
from fluxtrain.errors import EXIT_DEVICE_FAILED, BadInput, Interrupted
from fluxtrain.events.events import Hello
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.parent import has_agent
from fluxtrain.files.temporary import temporary_folder
from fluxtrain.train.checkpoint.recovery import Target, truly_told
from fluxtrain.train.checkpoint.writer import CheckpointWriter
from fluxtrain.train.run import Run, train
from fluxtrain.train.sharded_run import ShardedRun

if TYPE_CHECKING:
    from fluxtrain.methods.engine import TrainingEngine
    from fluxtrain.methods.objective import Cursor, Sampler
    from fluxtrain.train.checkpoint.run_state import RunState

_LOOK_S = 1.0  # between two looks at the other processes of this machine
_GRACE_S = 5.0  # for a rank to end by itself once another one is gone


def train_as_rank(
    config: RunConfig,
    locate: Callable[[], Target],
    told: Callable[[Target], Any],
    *,
    kinds: tuple[type[Run], type[Run]] | None = None,
    **how: Any,
) -> None:
    """Join the other processes and train with them; rank 0 does so in the directory that `locate`
    finds or makes, inside of `told`. The others keep their records in a temporary folder. `kinds`
    are other classes of run, of rank 0 and of the others.

    Raises as `train`; RankLost where another rank has ended.
    """
    _refuse_other_count(config)
    if kinds is None:
        kinds = (ShardedRun, FollowingRun) if config.is_sharded else (Run, ComputingRun)
    cards, on_gpus = config.parallel.cards, config.placement.device != "cpu"
    ranks = join_launched(cards if on_gpus and isinstance(cards, int) else 1)
    with contextlib.ExitStack() as opened:
        target = locate() if ranks.is_first else None
        if target is not None:
            opened.enter_context(told(target))
        _refuse_apart(ranks, target)
        if target is None:
            folder = opened.enter_context(temporary_folder("rank", "the records of a process"))
            target = Target(run_dir=RunDir(folder / "run"), resumes=False)
            opened.enter_context(truly_told(target))
            nowhere = opened.enter_context(open(os.devnull, "w", encoding="utf-8"))
            opened.enter_context(contextlib.redirect_stdout(nowhere))
            how |= {"live_fd": None, "opened": lambda _: None}
        how["kind"] = kinds[not ranks.is_first]
        opened.enter_context(_ending_with_others(ranks))
        try:
            train(config, target, ranks=ranks, **how)
        except Interrupted as stopped:
            if not has_agent():
                raise
            if ranks.is_first:  # a failure would let torchrun start all again
                print(stopped, file=sys.stderr)


class NoWriter(CheckpointWriter):
    """Restores what rank 0 has written, and writes nothing."""

    def is_due(self, step: int) -> bool:
        """Leave it to rank 0."""
        return False

    def save(
        self, state: RunState, engine: TrainingEngine, data: Cursor, *, background: bool = True
    ) -> None:
        """Send rank 0 what it writes."""
        self.write(state, engine, data)

    def write(self, state: RunState, engine: TrainingEngine, data: Cursor) -> None:
        """Send rank 0 what it writes, as often as it asks."""
        while self.together.of_first(False):
            deque(engine.state_shards(), maxlen=0)


class ComputingRun(Run):
    """The run of a rank that keeps no records."""

    keeps_checkpoints = False
    checkpoint_writer = NoWriter

    def announce(self, hello: Hello) -> None:
        """Announce nothing: rank 0 tells of the plan."""

    def finish(self) -> None:
        """Leave the trained model to rank 0, which has all of it."""

    def _samples(self) -> Sampler | None:
        """Write no samples."""


class FollowingRun(ComputingRun, ShardedRun):
    """The run of a rank of a sharded model, which makes samples with the others."""

    _samples = ShardedRun._samples


def _refuse_other_count(config: RunConfig) -> None:
    asked, there = config.parallel.processes, launched_world()
    if asked not in (1, there):
        raise BadInput(
            f"parallel.processes is {asked}, and a launcher has started {there}: leave it out, or "
            "start `fluxtrain train` without the launcher"
        )


def _refuse_apart(ranks: Ranks, target: Target | None) -> None:
    """Raise BadInput where not all ranks see the folder of the run, which rank 0 has found."""
    path, word, mark = Path(), "", None
    if target is not None:
        path, word = target.run_dir.path, secrets.token_hex(8)
        path.mkdir(parents=True, exist_ok=True)
        mark = path / f".seen-{word}"
        mark.touch()
    path, word = ranks.of_first((path, word))
    seen = ranks.gather((path / f".seen-{word}").exists())
    if mark is not None:
        mark.unlink(missing_ok=True)
    if not all(seen):
        raise BadInput(
            f"rank {seen.index(False)} does not see {path}, where rank 0 writes checkpoints: name "
            "a folder that all machines share with --run-dir"
        )


@contextlib.contextmanager
def _ending_with_others(ranks: Ranks) -> Iterator[None]:
    """End this process soon after another one of its machine, also where it waits on a GPU for
    what that one was to send."""

    def look() -> None:
        while not ranks.trained.wait(_LOOK_S):
            if ranks.ended():
                time.sleep(_GRACE_S)
                if not ranks.trained.is_set():
                    os.write(2, f"{lost_text(ranks)}\n".encode())
                    os._exit(EXIT_DEVICE_FAILED)

    ranks.trained.clear()
    threading.Thread(target=look, name="ranks", daemon=True).start()
    try:
        yield
    finally:
        ranks.trained.set()
