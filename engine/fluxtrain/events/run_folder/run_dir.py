"""The run directory: the files of one run, and the lock of the process that uses it.

    runs/<id>/  run.json  plan.json  events.ndjson  engine.log  error.json  result.json
                timeline.ring  pid  ctl.sock  checkpoints/  model/  model-files.json

`pid` names the process that uses the directory and carries the lock; the directory is in use while
either lives. `result.json` and `error.json` hold `exit_code`; older than `pid` they belong to an
earlier process of the same run.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.events.events import RunPhase
from fluxtrain.events.journal import (
    ending_of_journal,
    first_hello,
    newest_phase,
    newest_step,
    newest_t_s,
)
from fluxtrain.events.printable import printable
from fluxtrain.events.run_folder.process import ProcessMark
from fluxtrain.events.run_folder.states import RunState, state_of_exit, state_word
from fluxtrain.events.typed import typed
from fluxtrain.files.atomic import check_space, read_json, storage_error, write_json
from fluxtrain.files.locks import is_at, try_lock
from fluxtrain.files.opening import is_plain_folder, open_plain, open_to_write

RUN_SPACE_BYTES = 1 << 20  # a run that cannot even write its journal need not start
MARK_LIMIT_BYTES = 1 << 16
LOCK_TRIES, LOCK_PAUSE_S = 5, 0.02  # a look at a run holds the lock for microseconds
REMOTE_SILENCE_S = 30.0  # a run on another host is dead when its journal is silent for longer


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a list of runs; None is unknown."""

    run_id: str
    path: str
    state: RunState
    started_s: float  # Unix time
    updated_s: float
    model: str | None = None
    method: str | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    exit_code: int | None = None
    message: str = ""
    eta_s: float | None = None  # when the newest step ended
    stepped_s: float = 0.0  # Unix time of the newest step
    step_s: float | None = None  # duration of the newest step
    phase: RunPhase | None = None  # the newest that a running run told
    saved_model: str | None = None  # of a finished run: its folder

    def word(self, now_s: float | None = None) -> str:
        """Return the word of its state at `now_s` (Unix time), or now."""
        quiet_s = (time.time() if now_s is None else now_s) - self.updated_s
        return state_word(self.state, self.phase, quiet_s)


class RunLock:
    """The lock of a run directory for writing; lasts until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def is_at(self, path: Path) -> bool:
        """Return whether the file that is locked is the one at `path`."""
        return is_at(path, self._descriptor)

    def release(self) -> None:
        """Let another process use the directory."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class RunDir:
    """The paths of one run, its lock and its state."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def create(cls, root: Path | str | None = None, name: str = "run") -> RunDir:
        """Make `root/<local time>-<name>`; unique also when two runs start in the same second.

        Raises `BadInput` where nothing can be written and `NoSpace` on a full disk.
        """
        root = runs_root() if root is None else Path(root)
        label = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:40] or "run"
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
        for attempt in range(1, 1000):
            path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                root.mkdir(parents=True, exist_ok=True)
                path.mkdir()
            except FileExistsError as error:
                if not root.is_dir():
                    raise BadInput(f"{root} is a file: choose a folder for the runs") from error
                continue
            except OSError as error:
                raise storage_error(path, error) from error
            made = cls(path)
            try:
                check_space(path, RUN_SPACE_BYTES)
            except BaseException:
                made.remove_if_bare()
                raise
            return made
        raise BadInput(f"{root} holds a thousand runs named {stem}: choose another --run-dir")

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def run(self) -> Path:
        """Configuration, versions and machine."""
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        """The whole plan with its reasons."""
        return self.path / "plan.json"

    @property
    def journal(self) -> Path:
        """Events, one a line."""
        return self.path / "events.ndjson"

    @property
    def timeline(self) -> Path:
        """The lanes of the last steps; see `ring`."""
        return self.path / "timeline.ring"

    @property
    def log(self) -> Path:
        """Holds what the trainer printed."""
        return self.path / "engine.log"

    @property
    def result(self) -> Path:
        """How the run ended."""
        return self.path / "result.json"

    @property
    def error(self) -> Path:
        """Why the run failed."""
        return self.path / "error.json"

    @property
    def pid(self) -> Path:
        """The process that uses the directory."""
        return self.path / "pid"

    @property
    def socket(self) -> Path:
        """Where the trainer takes commands."""
        return self.path / "ctl.sock"

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folders."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model"

    @property
    def model_list(self) -> Path:
        """The names and sizes of the trained model's files."""
        return self.path / "model-files.json"

    def lock(self, space_bytes: int = RUN_SPACE_BYTES) -> RunLock:
        """Claim the directory (made if missing); `BadInput` names the process that has it.

        Also raises `BadInput` for a read-only directory, and `NoSpace` where fewer than
        `space_bytes` are free.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = open_to_write(self.pid, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise storage_error(self.path, error) from error
        try:
            self._claim(descriptor)
            mark = msgspec.json.encode(ProcessMark.mine()) + b"\n"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, mark, 0)
            # ends on record are of earlier processes, also where the clock was set back since
            newest_ns = max(_written_ns(self.error), _written_ns(self.result)) + 1
            if newest_ns > os.fstat(descriptor).st_mtime_ns:
                os.utime(descriptor, ns=(newest_ns, newest_ns))
            check_space(self.path, space_bytes)
        except FluxTrainError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            raise storage_error(self.pid, error) from error
        return RunLock(descriptor)

    def user(self) -> ProcessMark | None:
        """Return the process that last locked the directory and did not release it."""
        try:
            with open_plain(self.pid) as file:
                return msgspec.json.decode(file.read(MARK_LIMIT_BYTES), type=ProcessMark)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def silence_s(self) -> float | None:
        """Return the seconds since the journal last grew; heartbeats make it grow every second.

        Of a trainer on this machine they are told by a clock that nobody sets.
        """
        told_s = newest_t_s(self.journal) if self._shares_clock() else None
        if told_s is not None and 0 < told_s <= time.monotonic():
            return time.monotonic() - told_s
        try:
            return max(0.0, time.time() - self.journal.stat().st_mtime)
        except OSError:
            return None

    def liveness(self) -> RunState:
        """Return the state of the run, from the files alone."""
        return self._state(self._ending())

    @property
    def has_trained(self) -> bool:
        """Return whether any process of the run made a step, as far as checkpoints and the
        journal's end tell."""
        has_checkpoint = is_plain_folder(self.checkpoints) and any(self.checkpoints.glob("step-*"))
        return has_checkpoint or newest_step(self.journal) is not None

    def summary(self) -> RunSummary:
        """Return state and newest numbers, read from the journal's end and the small files."""
        ending = self._ending()
        hello, step = first_hello(self.journal), newest_step(self.journal)
        started_s = hello.wall_s if hello else self.path.stat().st_mtime
        silence_s = self.silence_s()
        stepped_s = step.wall_s if step else 0.0
        if step is not None and 0 < step.t_s <= time.monotonic() and self._shares_clock():
            stepped_s = time.time() - (time.monotonic() - step.t_s)
        return RunSummary(
            run_id=self.run_id,
            path=str(self.path),
            state=self._state(ending),
            started_s=started_s,
            updated_s=started_s if silence_s is None else time.time() - silence_s,
            model=printable(hello.model) if hello else None,
            method=printable(hello.method) if hello else None,
            step=step.step if step else None,
            total_steps=step.total_steps if step else hello.total_steps if hello else None,
            loss=step.loss if step else None,
            exit_code=ending.get("exit_code"),
            message=printable(str(ending.get("message", ""))),
            eta_s=step.eta_s if step else None,
            stepped_s=stepped_s,
            step_s=step.step_s if step else None,
            phase=newest_phase(self.journal),
            saved_model=str(self.model) if is_plain_folder(self.model) else None,
        )

    def write_json(self, path: Path, value: Any) -> None:
        """Write JSON atomically in the run directory; see `atomic.write_json`."""
        write_json(path, value)

    def remove_if_bare(self) -> None:
        """Remove the directory if it holds nothing but the mark of its process."""
        with contextlib.suppress(OSError):
            within = set(self.path.iterdir())
            empty = {p for p in within & {self.log, self.journal} if not p.stat().st_size}
            if within <= {self.pid, *empty}:
                for path in within:
                    path.unlink()
                self.path.rmdir()

    def _claim(self, descriptor: int) -> None:
        held = True
        for _ in range(LOCK_TRIES):
            try:
                if try_lock(descriptor):
                    return
            except OSError:  # a disk without locks: the mark of the process has to do
                held = False
                break
            time.sleep(LOCK_PAUSE_S)
        user = self.user()
        if held or (user is not None and user.is_local and user.is_alive()):
            who = f"process {user.pid} on {user.host}" if user else "another process"
            raise BadInput(
                f"{self.path} is in use by {who}: "
                f"watch it with `{typed('fluxtrain-tui')} --attach {self.path}`, stop it, "
                "or choose another --run-dir"
            )

    def _shares_clock(self) -> bool:
        """Return whether the trainer is alive and its monotonic clock is that of this process."""
        user = self.user()
        return user is not None and user.shares_clock and user.is_alive()

    def _is_locked(self) -> bool:
        """Return whether a process holds the directory's lock, whatever is written of it."""
        try:
            with open_plain(self.pid) as file:
                return not try_lock(file.fileno(), shared=True)
        except OSError:
            return False

    def _ending(self) -> dict[str, Any]:
        """Return how the newest process of the run ended, by its files; {} if it wrote none."""
        since_ns = _written_ns(self.pid) if self.user() else 0
        files = [path for path in (self.error, self.result) if _written_ns(path) >= since_ns]
        oldest_first = sorted(files, key=_written_ns)
        found: dict[str, Any] = {}
        for ending in map(read_json, oldest_first):
            if ending is not None and ending.get("exit_code") == found.get("exit_code"):
                found |= ending  # both files tell of one failure
            else:
                found = ending or found
        if not isinstance(found.get("exit_code"), int):
            found = ending_of_journal(self.journal)
        return found

    def _state(self, ending: dict[str, Any]) -> RunState:
        if isinstance(code := ending.get("exit_code"), int):
            return "refused" if ending.get("refused") is True else state_of_exit(code)
        user = self.user()
        if user is None:
            return "dead" if self.journal.exists() else "waiting"
        if (user.is_local and user.is_alive()) or self._is_locked():
            return "running"  # a process of another container is known by its lock alone
        if user.is_local:
            return "dead"
        silence_s = self.silence_s()
        return "running" if silence_s is not None and silence_s < REMOTE_SILENCE_S else "dead"


def runs_root() -> Path:
    """Return the folder of all runs: $FLUXTRAIN_RUNS, or ./runs."""
    return Path(os.environ.get("FLUXTRAIN_RUNS") or "runs").absolute()


def list_runs(root: Path | str | None = None) -> list[RunSummary]:
    """List all runs below `root`, newest first; [] if the folder does not exist."""
    root = runs_root() if root is None else Path(root)
    if not root.is_dir():
        return []
    summaries = []
    for path in root.iterdir():
        run = RunDir(path)
        with contextlib.suppress(OSError):  # removed, another user's, or on a dead mount
            if run.journal.exists() or run.run.exists() or run.pid.exists():
                summaries.append(run.summary())
    return sorted(summaries, key=lambda one: (one.started_s, one.run_id), reverse=True)


def _written_ns(path: Path) -> int:
    """Return the time of the last write; -1 for a missing file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1
