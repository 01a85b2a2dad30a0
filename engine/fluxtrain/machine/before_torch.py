"""What has to be set before torch is imported. Imports no torch."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, MutableMapping
from importlib.machinery import PathFinder
from pathlib import Path

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads both
SETTING = "expandable_segments:True"
PAGE_BYTES = 20 << 20  # by which a segment of large blocks grows (torch's kLargeBuffer)
GPU_NODE = "dev/nvidiactl"  # the driver's; WSL2 has another one, which is untested


def let_segments_grow(
    environment: MutableMapping[str, str] | None = None, root: Path = Path("/")
) -> None:
    """Let torch's allocator map pages where it needs them; call it before torch is imported.

    It usually takes segments of fixed sizes. Tensors that live as long as the run, optimizer states
    above all, then fragment the memory: on a card that is planned to be full, the tenth that should
    be free is in pieces too small for a chunk (docs/benchmarks.md). Does nothing if the user has
    set an option of the allocator, or without a GPU.
    """
    found = os.environ if environment is None else environment
    if not any(name in found for name in NAMES) and (root / GPU_NODE).exists():
        found[NAMES[0]] = SETTING


def segments_grow(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether torch's allocator is set to take memory page by page."""
    found = os.environ if environment is None else environment
    return any(SETTING in found.get(name, "").replace(" ", "") for name in NAMES)


def limit_within(bytes_left: int, *, grow: bool) -> int:
    """Return the limit to set so that torch's allocator takes no more than `bytes_left`.

    Before torch takes a block, a multiple of 2 MiB, it compares its limit with the block's size; a
    segment that grows (`grow`) then takes whole pages for the block. So it can exceed its limit by
    less than a page, even a limit of whole pages, because small blocks have smaller pages.
    """
    return max(0, bytes_left - PAGE_BYTES) if grow else bytes_left


# libgomp's own count is 300,000: beside other programs a thread then spins for one that the system
# has preempted, and burns the processor time that one needs (docs/benchmarks.md).
SPINS = 2000
SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
GPU_NODES = ("dev/nvidiactl", "dev/dxg")  # the driver's, and that of WSL2


def share_cores(
    environment: MutableMapping[str, str] | None = None, root: Path = Path("/")
) -> None:
    """Let waiting threads sleep soon if the processor computes everything.

    Call it before torch is imported, because libgomp reads the setting once. Does nothing if the
    user has set it, or with a GPU, when the host computes AdamW alone.
    """
    found = os.environ if environment is None else environment
    set_by_user = any(name in found for name in SET_BY_USERS)
    if not set_by_user and not any((root / node).exists() for node in GPU_NODES):
        found["GOMP_SPINCOUNT"] = str(SPINS)


def keep_compiled() -> None:
    """Let Python keep compiled modules in the user's cache, if those of torch are not compiled and
    Python would not keep them: images of containers tell it so, and some installers compile none.
    Each start would compile torch and transformers again, which doubles the time of their import.
    """
    found = PathFinder.find_spec("torch")
    if found is None or found.origin is None or found.cached is None or sys.pycache_prefix:
        return
    package = Path(found.origin)
    keeps = not sys.dont_write_bytecode and os.access(package.parent, os.W_OK)
    if keeps or _is_compiled(package, Path(found.cached)):
        return
    from fluxtrain.files.cache import cache_root  # msgspec with it, 40 ms of each command

    folder = cache_root() / "modules"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = folder.stat()
    except OSError:
        return
    others_may_write = held.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if held.st_uid == os.geteuid() and not others_may_write:  # what is there will be run
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def _is_compiled(source: Path, compiled: Path) -> bool:
    """Return whether Python would use a compiled module (PEP 552): copied files often have another
    time than the one in its head."""
    try:
        with compiled.open("rb") as file:
            head = file.read(12)
        changed_s = int(source.stat().st_mtime) & 0xFFFFFFFF
    except OSError:
        return False
    is_by_hash = bool(head[4:8].strip(b"\0"))
    return is_by_hash or int.from_bytes(head[8:12], "little") == changed_s
