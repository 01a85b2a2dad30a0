"""The run directory: the files of one run, and the lock of the process that uses it.

`pid` names the process that uses the directory and carries the lock; the directory is in use while
either lives. `result.json` and `error.json` hold `exit_code`; older than `pid` they belong to an
earlier process of the same run.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.events.events import RunPhase
from fluxtrain.events.journal import JournalEnd, first_hello, read_end
from fluxtrain.events.printable import printable
from fluxtrain.events.run_folder.process import ProcessMark
from fluxtrain.events.run_folder.states import RunState, state_of_exit, state_word
from fluxtrain.events.typed import typed
from fluxtrain.files.atomic import check_space, read_json, replace_file, storage_error, write_json
from fluxtrain.files.folders import is_at, leads_to, try_lock
from fluxtrain.files.opening import is_plain_folder, open_plain, open_to_write, whole

RUN_SPACE_BYTES = 1 << 20  # a run that cannot even write its journal need not start
MARK_LIMIT_BYTES = 1 << 16
LOCK_TRIES, LOCK_PAUSE_S = 5, 0.02  # a look at a run holds the lock for microseconds
LAST = "last"  # names the newest run
LOOK_PERIOD_S = 1.0  # between two looks of a run at its own folder
REMOTE_SILENCE_S = 30.0  # a run on another host is dead when its journal is silent for longer

Follower = Callable[[Path, Path], None]


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
    checkpoint_step: int | None = None  # of its newest checkpoint
    evaluation_loss: float | None = None
    tokens_per_s: float | None = None  # of the newest step
    seconds: float | None = None  # of its last process, once that has ended in order

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

    def __exit__(self, *_: object) -> None:
        self.release()


class _Place:
    """A file or folder of a run, where the run's folder is by now."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.path / self._name


class RunDir:
    """The paths of one run, its lock and its state."""

    run = _Place("run.json")  # configuration, versions and machine
    plan = _Place("plan.json")  # the whole plan with its reasons
    journal = _Place("events.ndjson")  # events, one a line
    timeline = _Place("timeline.ring")  # the lanes of the last steps; see `ring`
    log = _Place("engine.log")  # what the trainer printed
    result = _Place("result.json")  # how the run ended
    error = _Place("error.json")  # why it failed
    pid = _Place("pid")  # the process that uses the directory
    socket = _Place("ctl.sock")  # where the trainer takes commands
    checkpoints = _Place("checkpoints")
    model = _Place("model")  # the trained model
    model_list = _Place("model-files.json")  # names and sizes of its files

    def __init__(self, path: Path | str) -> None:
        self.path = whole(Path(path))

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
        """Return the folder's name."""
        return self.path.name

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

    @contextlib.contextmanager
    def held_for_children(self) -> Iterator[None]:
        """Keep the directory (made if missing) for processes that this one starts, of which one
        will `lock` it, against others that start some. Raises as `lock`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise storage_error(self.path, error) from error
        try:
            self._claim(folder)
            self.lock().release()  # what uses it already is told here, in one voice
            yield
        finally:
            os.close(folder)

    def user(self) -> ProcessMark | None:
        """Return the process that last locked the directory and did not release it."""
        try:
            with open_plain(self.pid) as file:
                return msgspec.json.decode(file.read(MARK_LIMIT_BYTES), type=ProcessMark)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def holds_run(self) -> bool:
        """Return whether a run has begun here. Raises OSError."""
        return any(file.exists() for file in (self.journal, self.run, self.pid))

    def liveness(self) -> RunState:
        """Return the state of the run, from the files alone."""
        end = read_end(self.journal)
        return self._state(self._ending(end), end)

    @property
    def has_trained(self) -> bool:
        """Return whether any process of the run made a step, by its checkpoints and the journal's
        end."""
        return bool(self._checkpoint_steps()) or read_end(self.journal).step is not None

    def _checkpoint_steps(self) -> list[int]:
        """Return the steps of the checkpoints, by the names of their folders."""
        if not is_plain_folder(self.checkpoints):
            return []
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return [int(name) for name in names if name.isascii() and name.isdecimal()]

    def summary(self) -> RunSummary:
        """Return state and newest numbers, read from the journal's end and the small files."""
        hello, end = first_hello(self.journal), read_end(self.journal)
        ending, step = self._ending(end), end.step
        started_s = hello.wall_s if hello else self.path.stat().st_mtime
        silence_s = self._silence_s(end)
        stepped_s = step.wall_s if step else 0.0
        if step is not None and 0 < step.t_s <= time.monotonic() and self._shares_clock():
            stepped_s = time.time() - (time.monotonic() - step.t_s)
        return RunSummary(
            run_id=self.run_id,
            path=str(self.path),
            state=self._state(ending, end),
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
            phase=end.phase,
            saved_model=str(self.model) if is_plain_folder(self.model) else None,
            checkpoint_step=max(self._checkpoint_steps(), default=None),
            evaluation_loss=end.evaluation.loss if end.evaluation else None,
            tokens_per_s=step.tokens_per_s if step else None,
            seconds=end.done.seconds if end.done else None,
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
        if held or (user is not None and user.is_alive()):
            who = f"process {user.pid} on {user.host}" if user else "another process"
            raise BadInput(
                f"{self.path} is in use by {who}: "
                f"watch it with `{typed('fluxtrain-tui')} --attach {self.path}`, stop it, "
                "or choose another --run-dir"
            )

    def _silence_s(self, end: JournalEnd) -> float | None:
        """Return the seconds since the journal last grew; heartbeats make it grow every second.

        For a trainer on this machine the monotonic clock counts, which nobody can set.
        """
        if end.last and 0 < end.last.t_s <= time.monotonic() and self._shares_clock():
            return time.monotonic() - end.last.t_s
        try:
            return max(0.0, time.time() - self.journal.stat().st_mtime)
        except OSError:
            return None

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

    def _ending(self, end: JournalEnd) -> dict[str, Any]:
        """Return how the newest process of the run ended, by its files; {} if it wrote none."""
        since_ns = _written_ns(self.pid) if self.user() else 0
        files = [path for path in (self.error, self.result) if _written_ns(path) >= since_ns]
        found: dict[str, Any] = {}
        for ending in map(read_json, sorted(files, key=_written_ns)):  # oldest first
            if ending is not None and ending.get("exit_code") == found.get("exit_code"):
                found |= ending  # both files tell of one failure
            else:
                found = ending or found
        return found if isinstance(found.get("exit_code"), int) else end.ending

    def _state(self, ending: dict[str, Any], end: JournalEnd) -> RunState:
        if isinstance(code := ending.get("exit_code"), int):
            return "refused" if ending.get("refused") is True else state_of_exit(code)
        user = self.user()
        if user is None:
            return "dead" if self.journal.exists() else "waiting"
        if user.is_alive() or self._is_locked():
            return "running"  # a process of another container is known by its lock alone
        if user.is_local:
            return "dead"
        silence_s = self._silence_s(end)
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
            if run.holds_run():
                summaries.append(run.summary())
    return sorted(summaries, key=lambda one: (one.started_s, one.run_id), reverse=True)


def find_run(wanted: str, root: Path | None = None) -> Path:
    """Find the directory of a run named by its id, the beginning of the id, its path, or `last`.

    Raises:
        BadInput: there is no such run; the message has the nearest names.
    """
    root = root or runs_root()
    runs = list_runs(root)
    if wanted == LAST and (newest := [*runs[:1], *_started_elsewhere(root)]):
        return Path(max(newest, key=lambda one: one.started_s).path)
    names = [run.run_id for run in runs]
    matching = [name for name in names if name == wanted] or [
        name for name in names if wanted and name.startswith(wanted)
    ]
    if len(matching) == 1:
        return root / matching[0]
    if len(matching) > 1:
        raise BadInput(f"several runs begin with '{wanted}': {', '.join(matching[:5])}")
    with contextlib.suppress(OSError):  # such as a name that no folder can have
        if RunDir(wanted).holds_run():
            return RunDir(wanted).path
    if not names:
        raise BadInput(
            f"no run '{wanted}': there are no runs in {root}: name a run's folder, or set "
            "FLUXTRAIN_RUNS to the folder of the runs"
        )
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3) or names[:3]
    raise BadInput(f"no run '{wanted}' in {root}; did you mean {', '.join(near)}?")


def _state_file() -> Path:
    """Return where the last run that was started elsewhere is noted."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "fluxtrain" / "last-run"


def note_started(run: RunDir) -> None:
    """Remember a run that starts outside the folder of all runs, so that `last` finds it."""
    if run.path.parent != runs_root():
        with contextlib.suppress(OSError):  # a home that cannot be written: `last` does without
            _state_file().parent.mkdir(parents=True, exist_ok=True)
            replace_file(_state_file(), os.fsencode(run.path))


def _started_elsewhere(root: Path) -> list[RunSummary]:
    """Return the run that `note_started` remembers, if it is still there and `root` is the user's
    own folder."""
    with contextlib.suppress(OSError, ValueError):
        run = RunDir(os.fsdecode(_state_file().read_bytes()))
        if root == runs_root() and run.holds_run():
            return [run.summary()]
    return []


def newest_training(root: Path | None = None) -> tuple[Path, str]:
    """Find the newest run that trains; without one the newest of all, with a sentence that says so.

    Raises:
        BadInput: there are no runs.
    """
    runs = list_runs(root or runs_root())
    training = [run for run in runs if run.state in ("running", "waiting")]
    if training:
        return Path(training[0].path), ""
    newest = find_run(LAST, root)
    word = next(run.word() for run in runs if Path(run.path) == newest)
    return newest, f"no run trains now: this is the newest, {newest.name}, {word}"


def _written_ns(path: Path) -> int:
    """Return the time of the last write; -1 for a missing file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


class Holding:
    """Holds the folder of a run by its lock, and notices where it is renamed, deleted or taken.

    A lock follows the file, and what a run writes goes by path: without a look now and then a
    second run, started at the old path of a renamed folder, would share its files with the first.
    Asked by the run's thread alone.
    """

    def __init__(self, run_dir: RunDir) -> None:
        """Take the lock. Raises as `RunDir.lock`, and BadInput where the folder vanishes."""
        self.run_dir = run_dir
        self._lock = run_dir.lock()
        note_started(run_dir)
        self._followers: list[Follower] = []
        self._looked_s = time.monotonic()
        try:
            self._folder = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self._lock.release()
            raise self._gone() from None

    def followed_by(self, follower: Follower) -> None:
        """Call `follower` with the old and the new path when the folder was renamed."""
        self._followers.append(follower)

    def glance(self) -> None:
        """Look as `look` does, where the last time is a second ago."""
        if time.monotonic() - self._looked_s >= LOOK_PERIOD_S:
            self.look()

    def look(self) -> None:
        """Go on in the folder where it is now, and lock it anew where its lock was removed.

        Raises:
            BadInput: the folder was deleted, or another process has locked it.
        """
        self._looked_s = time.monotonic()
        if not leads_to(self.run_dir.path, self._folder):
            self._follow()
        pid = self.run_dir.pid
        if self._lock.is_at(pid):
            return
        if os.path.lexists(pid):
            raise BadInput(
                f"{pid} was replaced while the run trained, so another process may use the folder: "
                "this run ends and writes nothing more there; end the other one, then go on with "
                "--resume from the newest checkpoint"
            )
        lock = self.run_dir.lock(space_bytes=0)
        self._lock.release()
        self._lock = lock

    @property
    def is_held(self) -> bool:
        """Return whether the folder exists, and no other process has it."""
        try:
            self.look()
        except BadInput:
            return False
        return True

    def release(self) -> None:
        """Let another process use the folder."""
        self._lock.release()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _follow(self) -> None:
        old, new = self.run_dir.path, self._place()
        if new is None:
            raise self._gone()
        self.run_dir.path = new
        for follower in self._followers:
            follower(old, new)

    def _place(self) -> Path | None:
        """Return where the folder is now; None where it is nowhere. Source: proc(5), fd."""
        with contextlib.suppress(OSError):
            place = Path(os.readlink(f"/proc/self/fd/{self._folder}"))
            if leads_to(place, self._folder):
                return place
        return None

    def _gone(self) -> BadInput:
        return BadInput(
            f"{self.run_dir.path} was deleted, or moved to another disk, while the run used it: "
            "nothing more can be saved there; start the run again, or go on with --resume in the "
            "place where its folder is now"
        )
