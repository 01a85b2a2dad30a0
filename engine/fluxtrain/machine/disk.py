"""Describes the disk below a folder: its free space and its file system."""

from __future__ import annotations

import os
from pathlib import Path

from fluxtrain.events.answers.machine import Disk

MOUNTS = Path("/proc/self/mountinfo")
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "9p", "ceph", "lustre", "gpfs", "beegfs",
     "afs", "virtiofs"}
)  # fmt: skip


def read_disk(path: Path, mounts: Path = MOUNTS) -> Disk:
    """Return facts about the disk of `path`, or of its nearest parent that exists."""
    unknown: dict[str, str] = {}
    place = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    total = free = None
    try:
        facts = os.statvfs(place)
        total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    except OSError as error:
        unknown |= dict.fromkeys(("total_bytes", "free_bytes"), f"statvfs: {error.strerror}")
    kind = _file_system(place.resolve(), mounts)
    if kind is None:
        reason = f"{mounts} does not name its mount"
        unknown |= dict.fromkeys(("file_system", "in_memory", "on_network"), reason)
    return Disk(
        path=str(path),
        total_bytes=total,
        free_bytes=free,
        file_system=kind,
        in_memory=None if kind is None else kind in MEMORY_FILE_SYSTEMS,
        on_network=None if kind is None else kind.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS,
        unknown=unknown,
    )


def _file_system(place: Path, mounts: Path) -> str | None:
    """Return the type of the longest mount point that holds `place`; on equal ones the later wins.

    Source: proc_pid_mountinfo(5): field 5 is the mount point with octal escapes, the first field
    after the lone "-" is the type.
    """
    best: tuple[int, str] | None = None
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if b"-" not in fields[6:]:
            continue
        point = Path(os.fsdecode(_unescaped(fields[4])))
        if place.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), fields[fields.index(b"-", 6) + 1].decode())
    return None if best is None else best[1]


def _unescaped(name: bytes) -> bytes:
    for code in (b" ", b"\t", b"\n"):
        name = name.replace(b"\\%03o" % code[0], code)
    return name.replace(b"\\134", b"\\")
