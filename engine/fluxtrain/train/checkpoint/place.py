"""Keep the folder of a run's checkpoints usable, whatever is done to it while the run trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fluxtrain.errors import BadInput, DoesNotFit, FluxTrainError, NoSpace
from fluxtrain.events.run_folder.own_files import KEPT, kept_beside
from fluxtrain.files.atomic import free_bytes
from fluxtrain.files.opening import is_plain_folder, kind_of
from fluxtrain.machine.failures import as_told, first_line
from fluxtrain.train.checkpoint.checkpoint import (
    MANIFEST,
    Checkpoint,
    list_checkpoints,
    prune,
    remove,
)
from fluxtrain.units import bytes_text

T = TypeVar("T")
Warn = Callable[[str], None]


class CannotSave(BadInput):
    """A checkpoint cannot be written, for another reason than a full disk."""


def saved(write: Callable[[], T], ready: Callable[[], None]) -> T:
    """Return what `write` returns, after `ready`; do both once more where the folder, or a file in
    it, was taken away or replaced meanwhile.

    Raises:
        CannotSave: the second attempt failed too; says where and why.
        NoSpace: as `write`, or there is no room for the folder itself.
    """
    for attempt in (1, 2):
        try:
            ready()
            return write()
        except FluxTrainError:
            raise
        except OSError as error:
            told = as_told(error)
            if told is not None and not isinstance(told, BadInput):
                raise told from error
            if attempt == 2:
                raise _cannot_save(error) from error
    raise AssertionError("each attempt returns or raises")


def make_ready(root: Path, warn: Warn) -> None:
    """Make the folder where it is missing; put aside what stands in its place. Raises OSError."""
    if os.path.lexists(root) and not is_plain_folder(root):
        kind = kind_of(root) or "a file"
        place = kept_beside(root, root.parent / KEPT)
        warn(f"{root} is {kind}, and the run's checkpoints go there: it is {place} now")
    root.mkdir(exist_ok=True)


def make_room(
    root: Path,
    needed_bytes: int,
    warn: Warn,
    *,
    best: Path | None,
    needs_best: bool,
    last: Callable[[], str],
) -> None:
    """Remove older checkpoints if a new one does not fit beside them; nothing is written yet.

    The newest one always stays, and the `best` one where it is needed. Raises NoSpace if the new
    one does not fit even so; `last` names the one that stands.
    """
    free = free_bytes(root)
    if free is None or free >= needed_bytes:
        return
    found = list_checkpoints(root)[1:]
    older = [path for path in found if path != best]
    if best is not None and best in found and not needs_best:
        older = [best, *older]  # goes last
    for path in reversed(older):
        remove(path)
        free = free_bytes(root)
        warn(
            f"{path.name} was removed to make room for the next checkpoint "
            f"({bytes_text(needed_bytes)} needed, {bytes_text(free)} free now): lower "
            "train.keep_checkpoints or free some space to keep more"
        )
        if free is None or free >= needed_bytes:
            return
    raise NoSpace(
        f"the next checkpoint needs {bytes_text(needed_bytes)} and {bytes_text(free)} is free "
        f"under {root}: free some space, then go on with --resume; nothing was written, {last()}"
    )


def prune_or_tell(root: Path, keep: int, step: int, best_step: int | None, warn: Warn) -> None:
    """Remove the checkpoints beyond those to keep; where one cannot be removed, say so."""
    try:
        prune(root, keep, step, best_step)
    except OSError as error:
        warn(f"an older checkpoint cannot be removed ({reason_of(error)})")


def why_given_up(step: int, error: BaseException) -> str | None:
    """Say why a checkpoint beside the training was given up, where the next one may succeed: the
    disk was full, its files were taken away, or memory for its copies ran out. None for any other
    error."""
    why = as_told(error)
    if isinstance(why, DoesNotFit):
        return (
            f"a checkpoint beside the training was given up ({first_line(error)}): the next one "
            "follows at once, and training waits for it and for those after it"
        )
    if isinstance(why, NoSpace):
        return f"{why}; the next checkpoint follows at once"
    if not isinstance(error, OSError):
        return None
    return (
        f"the checkpoint of step {step} could not be written ({reason_of(error)}): the next one "
        "follows at once"
    )


def _cannot_save(error: OSError) -> CannotSave:
    return CannotSave(
        f"no checkpoint can be written, in 2 attempts ({reason_of(error)}): let this user write "
        "there, and leave the folder to the run"
    )


def reason_of(error: OSError) -> str:
    """Say which file the system refused, and why."""
    why = error.strerror or str(error)
    return f"{error.filename}: {why}" if error.filename else why


def stands(last: Checkpoint) -> bool:
    """Return whether a checkpoint that was whole is still there."""
    return (last.path / MANIFEST).is_file()


def told_of(last: Checkpoint | None) -> str:
    """Name the last checkpoint, for messages."""
    if last is None:
        return "no checkpoint was written yet"
    if not stands(last):
        return f"the last checkpoint ({last.path}, step {last.step}) was removed by others"
    return f"the last good checkpoint is {last.path} (step {last.step})"
