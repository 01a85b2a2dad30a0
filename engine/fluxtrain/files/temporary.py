"""Temporary folders, and what moves them and the caches where their disk is full or only read."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fluxtrain.errors import BadInput, FluxTrainError, NoSpace, brief, system_error
from fluxtrain.files.folders import unfinished_folder
from fluxtrain.units import bytes_text

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# the names that `tempfile.mkdtemp` makes
_OURS = re.compile(r"\.fluxtrain-(trial|base|adapter|dry-run|rank)-[a-z0-9_]{8}")
_CACHES = (  # variable, folder below it, folder below the home without it
    ("HF_HUB_CACHE", "", ".cache/huggingface/hub"),
    ("HF_MODULES_CACHE", "", ".cache/huggingface/modules"),
    ("HF_HOME", "", ".cache/huggingface"),
    ("TRITON_CACHE_DIR", "", ".triton/cache"),
    ("XDG_CACHE_HOME", "fluxtrain", ".cache/fluxtrain"),
    ("XDG_CACHE_HOME", "huggingface", ".cache/huggingface"),
)


@contextmanager
def temporary_folder(purpose: str, what: str) -> Iterator[Path]:
    """Make a folder .fluxtrain-PURPOSE-... in the temporary directory, and remove it in the end;
    what killed processes left there goes first.

    Raises NoSpace or BadInput where it cannot be made; `what` is to be written there.
    """
    with ExitStack() as opened:
        try:
            parent, prefix = Path(tempfile.gettempdir()), f".fluxtrain-{purpose}-"
            made = opened.enter_context(unfinished_folder(parent, prefix))
        except OSError as error:
            raise temporary_error(error, what) from error
        yield made


@contextmanager
def written_in(folder: Path, what: str) -> Iterator[None]:
    """Let `what` be written in a temporary folder: raise what the system refuses there, also to
    libraries in Rust, as NoSpace or BadInput, which name TMPDIR."""
    try:
        yield
    except Exception as error:
        refused = error if isinstance(error, OSError) else system_error(error)
        if refused is None or isinstance(error, FluxTrainError) or refused.errno is None:
            raise
        file = refused.filename  # unknown where a write fails, or a library in Rust
        if file is not None and folder not in Path(os.fsdecode(file)).parents:
            raise
        raise temporary_error(refused, what) from error


def temporary_error(error: OSError, what: str) -> NoSpace | BadInput:
    """Return the error to raise where `what` cannot be written in the temporary directory."""
    folder = _temporary_directory()
    reason = error.strerror or str(error)
    if folder is None:
        words = f"{what} cannot be written: {brief(reason)}"
        return BadInput(f"{words}: set TMPDIR to a folder that can be written")
    if error.errno not in FULL:
        return BadInput(
            f"{what} cannot be written in {folder} ({reason}): set TMPDIR to a folder that can be "
            "written"
        )
    return NoSpace(
        f"no space left for {what} in {folder} ({reason}; {free_text(folder)} free): make room, or "
        "set TMPDIR to a folder on another disk"
    )


def moved_by(path: Path) -> str | None:
    """Return how a user moves the temporary folder or the cache that holds `path`, in words that
    follow `free some space, or`; None for a place of another kind."""
    places = (path, *path.parents)
    temporary = _temporary_directory()
    if any(_OURS.fullmatch(one.name) and one.parent == temporary for one in places):
        return "set TMPDIR to a folder on another disk"
    for variable, below, usual in _CACHES:
        base = os.environ.get(variable)
        folder = Path(base) / below if base else Path("~", usual)
        if Path(os.path.expanduser(folder)) in places:
            return f"set {variable} to a folder on another disk"
    return None


def free_text(folder: Path) -> str:
    """Return the free space on the disk of a folder, which need not exist, as text."""
    for place in (folder, *folder.absolute().parents):
        with suppress(OSError):
            return bytes_text(shutil.disk_usage(place).free)
    return "an unknown amount"


def _temporary_directory() -> Path | None:
    """Return the temporary directory; None where no folder can be written."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return None
