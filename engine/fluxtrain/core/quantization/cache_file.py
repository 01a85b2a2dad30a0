"""The file of a packed model: where its groups lie, its header, and fast reads that are checked.

    magic | length of the header | sha256 of the header | header (JSON)
    groups, each from a multiple of 4 KiB on, byte for byte as they are in memory

A group's checksum is the sha256 of the sha256 of its pieces, so that several threads share the
work. A thread hashes 1.4 GB/s (an EPYC core; blake2b 0.5, CRC-32 2.0), a fast disk reads 3.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from fluxtrain.files.cache import Damaged

MAGIC = b"FLUXPCK1"
ALIGN_BYTES = 4096
PIECE_BYTES = 8 << 20
_LENGTH_BYTES = 8
_HASH_BYTES = 32
_NO_CHECKSUM = "0" * 64


@dataclass(frozen=True)
class Contents:
    """The key of a file, and its groups in their order with offsets and sizes in bytes."""

    key: str
    offsets: dict[str, int]
    sizes: dict[str, int]

    @staticmethod
    def of(key: str, groups: Mapping[str, int]) -> Contents:
        """Lay out groups of these names and sizes in bytes."""
        empty = Contents(key, dict.fromkeys(groups, 0), dict(groups))
        # Offsets have fewer digits than this one, so the header does not grow over its place.
        largest = 2 * (sum(groups.values()) + (len(groups) + 1) * (ALIGN_BYTES + 512))
        widest = Contents(key, dict.fromkeys(groups, largest), dict(groups))
        at, offsets = _aligned(len(widest.header(dict.fromkeys(groups, _NO_CHECKSUM)))), {}
        for name, size in empty.sizes.items():
            offsets[name] = at
            at += _aligned(size)
        return Contents(key, offsets, empty.sizes)

    @property
    def size_bytes(self) -> int:
        """Count the bytes of the whole file."""
        return max(
            (self.offsets[name] + _aligned(size) for name, size in self.sizes.items()),
            default=ALIGN_BYTES,
        )

    def header(self, checksums: Mapping[str, str]) -> bytes:
        """Return the beginning of the file."""
        groups = [
            [name, self.offsets[name], self.sizes[name], checksums[name]] for name in self.sizes
        ]
        text = json.dumps({"key": self.key, "groups": groups}).encode()
        length = len(text).to_bytes(_LENGTH_BYTES, "little")
        return MAGIC + length + hashlib.sha256(text).digest() + text


def read_header(fd: int, contents: Contents) -> dict[str, str]:
    """Return the checksums of the file's groups; raise Damaged if it does not hold `contents`."""
    start = os.pread(fd, len(MAGIC) + _LENGTH_BYTES + _HASH_BYTES, 0)
    if start[: len(MAGIC)] != MAGIC:
        raise Damaged("it is no packed model")
    length = int.from_bytes(start[len(MAGIC) : len(MAGIC) + _LENGTH_BYTES], "little")
    if length > contents.size_bytes:
        raise Damaged("its header is damaged")
    text = os.pread(fd, length, len(start))
    if hashlib.sha256(text).digest() != start[-_HASH_BYTES:]:
        raise Damaged("its header is damaged")
    try:
        checksums = {str(name): str(sum_) for name, _, _, sum_ in json.loads(text)["groups"]}
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged("its header is none of a packed model") from error
    if set(checksums) != set(contents.sizes) or not (start + text == contents.header(checksums)):
        raise Damaged("it holds another model")
    if (size := os.fstat(fd).st_size) != contents.size_bytes:
        raise Damaged(f"it has {size:,} bytes of {contents.size_bytes:,}")
    return checksums


class Pieces:
    """Reads, writes and hashes groups with several threads."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="packed-cache")

    def read(self, fd: int, offset: int, into: Tensor) -> str:
        """Read a group into uint8 (bytes,) on the host; return the checksum of what was read."""

        def one(start: int, piece: memoryview) -> bytes:
            done = 0
            while done < len(piece):
                count = os.preadv(fd, [piece[done:]], offset + start + done)
                if count == 0:
                    raise Damaged("it is truncated")
                done += count
            return hashlib.sha256(piece).digest()

        return self._checksum(one, into)

    def write(self, fd: int, offset: int, packed: Tensor) -> str:
        """Write a group from uint8 (bytes,) on the host; return its checksum."""

        def one(start: int, piece: memoryview) -> bytes:
            done = 0
            while done < len(piece):
                done += os.pwrite(fd, piece[done:], offset + start + done)
            return hashlib.sha256(piece).digest()

        return self._checksum(one, packed)

    def checksum(self, packed: Tensor) -> str:
        """Return the checksum of uint8 (bytes,) on the host."""
        return self._checksum(lambda _, piece: hashlib.sha256(piece).digest(), packed)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _checksum(self, one: Callable[[int, memoryview], bytes], memory: Tensor) -> str:
        whole = memory.numpy().data
        starts = range(0, len(whole), PIECE_BYTES)
        pieces = [whole[start : start + PIECE_BYTES] for start in starts]
        return hashlib.sha256(b"".join(self._pool.map(one, starts, pieces))).hexdigest()


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
