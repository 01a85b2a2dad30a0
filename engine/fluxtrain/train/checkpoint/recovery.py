"""Finds the run directory that a command means, and the checkpoint from which its run resumes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fluxtrain
from fluxtrain.config.schema import RunConfig, overridden
from fluxtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, BadInput, Interrupted
from fluxtrain.events.run_folder.own_files import refuse_odd_places
from fluxtrain.events.run_folder.run_dir import RunDir, find_run, runs_root
from fluxtrain.events.trace.ring import is_ring
from fluxtrain.files.atomic import read_json
from fluxtrain.files.opening import is_plain_folder, read_plain
from fluxtrain.files.terminations import Terminated, terminations_raised

AUTO = "auto"
TRUST, DISTRUST = "model.trust_remote_code=true", "model.trust_remote_code=false"
_CACHE = "data.token_cache"
_MANIFEST = "manifest.json"
_MARKS = (
    {"config", "versions"},
    {"choices", "chunk_rows"},
    {"exit_code", "message"},
    {"model_files"},
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The directory of a run, whether the run is resumed, and from which checkpoint."""

    run_dir: RunDir
    resumes: bool
    checkpoint: Path | None = None  # None: the newest valid one
    made: bool = False  # this process made the directory


def locate(resume: str | None, run_dir: Path | None, config: RunConfig) -> Target:
    """Find the run that `--resume` and `--run-dir` mean; make a new directory only if needed.

    Raises:
        BadInput: there is no such run, or the directory is used by another one.
    """
    return find(resume, run_dir, config) or new_run(config)


def new_run(config: RunConfig) -> Target:
    """Make a new directory for a new run."""
    name = Path(config.model.path).name
    return Target(run_dir=RunDir.create(name=name), resumes=False, made=True)


@contextlib.contextmanager
def truly_told(target: Target) -> Iterator[None]:
    """Remove the new directory of a run that ends before its configuration or result is written.

    If the run is interrupted or terminated while no `Session` handles signals, tell what its
    directory holds.

    Raises:
        Interrupted: in place of `KeyboardInterrupt`, if the directory stays.
    """
    run_dir = target.run_dir
    try:
        with terminations_raised():
            yield
    except BaseException as error:
        if target.made:
            run_dir.remove_if_bare()
        if isinstance(error, Interrupted) and target.made and _removed_without_run(run_dir):
            words = "stopped before a step was made: nothing was kept"
            raise Interrupted(words, error.exit_code) from None
        if not isinstance(error, KeyboardInterrupt | Terminated):
            raise
        code = EXIT_TERMINATED if isinstance(error, Terminated) else EXIT_INTERRUPTED
        if run_dir.path.exists():
            held = ", ".join(sorted(path.name for path in run_dir.path.iterdir())) or "nothing"
            at = f"while it was not training: {run_dir.path} is there and holds {held}"
            raise Interrupted(f"interrupted {at}", code) from None
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Interrupted("interrupted before anything was started", code) from None


def _removed_without_run(run_dir: RunDir) -> bool:
    """Remove the directory of a run without a configuration that holds only its process's own
    marks; return whether it is gone. A directory that another process uses meanwhile stays."""
    own = {run_dir.pid, run_dir.log, run_dir.journal, run_dir.socket, run_dir.result}
    with contextlib.suppress(OSError):
        within = set(run_dir.path.iterdir())
        if within <= own and run_dir.user() is None:
            for path in within:
                path.unlink()
            run_dir.path.rmdir()
    return not run_dir.path.exists()


def find(resume: str | None, run_dir: Path | None, config: RunConfig | None) -> Target | None:
    """Find the run as `locate` does, but make nothing; None: the run needs a new directory.

    Raises:
        BadInput: there is no such run, or the directory is used by another one.
    """
    for name in (resume, run_dir):
        _refuse_undecodable(name)
    if resume is None:
        return None if run_dir is None else _fresh(run_dir)
    if resume != AUTO:
        named = Path(resume).expanduser()
        if not named.exists() and len(named.parts) == 1:  # `last`, or a run's id
            named = find_run(resume)
        return _named(named, run_dir)
    if run_dir is not None:
        chosen = RunDir(run_dir)
        return Target(run_dir=chosen, resumes=True) if has_run(chosen) else _started_in(run_dir)
    if config is None:
        raise BadInput(
            "--resume auto does not know which run: name a CONFIG.yaml, --run-dir, or use --demo"
        )
    found = _newest_of(config)
    return None if found is None else Target(run_dir=found, resumes=True)


def stored_config(run_dir: RunDir, overrides: list[str] | None = None) -> RunConfig:
    """Return the configuration that `run_dir` was started with.

    Raises:
        BadInput: no configuration can be read, or a link stands in its folder.
    """
    refuse_odd_places(run_dir)
    told: Any = None
    content: Any = None
    try:
        told = json.loads(read_plain(run_dir.run))
        content = told["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    if not isinstance(content, dict):
        raise BadInput(
            f"{run_dir.path} has no readable run.json: name its configuration file as well"
        )
    try:
        return overridden(content, overrides or [], str(run_dir.run))
    except BadInput as error:
        versions = told.get("versions")
        by = versions.get("fluxtrain") if isinstance(versions, dict) else None
        if not isinstance(by, str) or by == fluxtrain.__version__:
            raise
        raise BadInput(
            f"{error}; FluxTrain {by} wrote it and this is {fluxtrain.__version__}, which may know "
            f"other settings: `pip install 'fluxtrain>={by}'` reads it"
        ) from error


def resumed_config(run_dir: RunDir, overrides: list[str]) -> RunConfig:
    """Return the configuration that `run_dir` goes on with, where the user names no other one.

    The folder may be made elsewhere, so it cannot say that its model's code is to be trusted, or
    that tokens are to be kept where none are yet.

    Raises:
        BadInput: no configuration can be read, or only the folder wants one of these.
    """
    config = stored_config(run_dir, overrides)
    told = stored_config(run_dir, [DISTRUST, f"{_CACHE}=auto", *overrides])  # by the user
    cache = config.data.token_cache
    if cache != told.data.token_cache and not may_keep_tokens(cache):
        raise BadInput(
            f"{run_dir.run} wants to keep the tokens of its data in {cache}, where none are yet, "
            f"and a run's folder may be made by anybody: add --set {_CACHE}=FOLDER, or "
            f"--set {_CACHE}=auto"
        )
    if config.model.trust_remote_code == told.model.trust_remote_code:
        return config
    raise BadInput(
        f"{run_dir.run} wants to run Python code that comes with its model "
        f"({config.model.path}), and a run's folder may be made by anybody: read that code, then "
        f"add --set {TRUST}; or --set {DISTRUST} to go on without it"
    )


def may_keep_tokens(wished: str) -> bool:
    """Return whether tokens may be kept where a run's folder says: in the user's cache, nowhere, or
    where tokens are kept already."""
    from fluxtrain.data.store.cache import cache_folder, holds_entries

    return wished in ("auto", "off") or holds_entries(cache_folder(wished))


def has_run(run_dir: RunDir) -> bool:
    """Return whether a run was started here before. A folder `checkpoints` alone proves nothing:
    other programs use that name too."""
    if run_dir.journal.exists():
        return True
    folders = run_dir.checkpoints.glob("*") if is_plain_folder(run_dir.checkpoints) else ()
    return any(path.match("step-*") or (path / _MANIFEST).exists() for path in folders)


def _refuse_undecodable(name: str | Path | None) -> None:
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise BadInput(f"{name} is not UTF-8, and the journal is: choose another name") from None


def _fresh(run_dir: Path) -> Target:
    chosen = RunDir(run_dir)
    if has_run(chosen):
        state = chosen.liveness()
        if state == "running":
            return Target(run_dir=chosen, resumes=True)  # refused by its lock, with what to do
        if not chosen.has_trained and state != "finished":
            return Target(run_dir=chosen, resumes=True)  # nothing to lose: a mistake was mended
        raise BadInput(
            f"{run_dir} holds a run already: add --resume auto to go on with it, or choose "
            "another --run-dir"
        )
    return _started_in(run_dir)


def _started_in(run_dir: Path) -> Target:
    """Start a run in a directory that the user named and that holds no run yet."""
    chosen = RunDir(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise BadInput(f"--run-dir {run_dir} is a file: name a folder")
    if run_dir.is_symlink() and not run_dir.exists():
        raise BadInput(f"--run-dir {run_dir} is a link that leads nowhere: name a folder")
    _refuse_others_files(chosen)
    if os.path.lexists(chosen.model):
        raise BadInput(
            f"{chosen.model} is there already and is not of a run; the trained model would replace "
            "it: choose another --run-dir"
        )
    return Target(run_dir=chosen, resumes=False)


def _refuse_others_files(chosen: RunDir) -> None:
    """Raise BadInput for a folder whose files the run would replace. Files of an earlier process
    of the run that made no step may be replaced."""
    facts = (chosen.run, chosen.plan, chosen.result, chosen.error, chosen.model_list)
    own = (*facts, chosen.pid, chosen.timeline)
    there = [path for path in own if os.path.lexists(path) and not _is_of_a_run(path, chosen)]
    if there:
        raise BadInput(
            f"{there[0]} is there already and is not of a run; the run would replace it: choose "
            "another --run-dir"
        )


def _is_of_a_run(path: Path, run_dir: RunDir) -> bool:
    """Return whether a file belongs to a run, by the content of each kind: a run's facts, a plan's
    choices, an exit code, the process that has the run (none once it let go), or the head of a
    ring. Links count as the run's own: the code that writes to them refuses them."""
    if path == run_dir.pid:
        return path.is_symlink() or not path.stat().st_size or run_dir.user() is not None
    if path == run_dir.timeline:
        return path.is_symlink() or is_ring(path)
    content = read_json(path) or {}
    return any(marks <= content.keys() for marks in _MARKS)


def _named(path: Path, run_dir: Path | None) -> Target:
    path = path.absolute()
    if not path.is_dir():
        raise BadInput(f"--resume {path}: no such run directory or checkpoint")
    is_checkpoint = (path / _MANIFEST).exists() or path.parent.name == "checkpoints"
    owner = path.parent.parent if is_checkpoint else path
    if run_dir is not None and run_dir.absolute() != owner:
        raise BadInput(
            f"--resume {path} goes on in {owner}, and --run-dir names {run_dir}: leave one out"
        )
    found = RunDir(owner)
    if not has_run(found):
        raise BadInput(f"--resume {path}: there is no run in it (no journal, no checkpoints)")
    return Target(run_dir=found, resumes=True, checkpoint=path if is_checkpoint else None)


def _newest_of(config: RunConfig) -> RunDir | None:
    """Find the newest unfinished run below the runs folder that has this configuration."""
    wanted: dict[str, Any] = config.model_dump(mode="json")
    root = runs_root()
    folders = sorted(root.iterdir(), reverse=True) if root.is_dir() else []
    for folder in folders:
        run = RunDir(folder)
        try:
            same = json.loads(read_plain(run.run))["config"] == wanted
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if same and run.liveness() != "finished":
            return run
    return None
