"""Opens a data file for reading in order, unpacked on the way where it is .gz or .zst.

Memory is bounded whatever the file holds. What is cut off or damaged is told with its place.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fluxtrain.errors import BadInput
from fluxtrain.files.opening import open_plain
from fluxtrain.units import bytes_text

Compression = Literal["gzip", "zstandard"]

INSTALL = "pip install 'fluxtrain[data]'"
SUFFIXES: dict[str, Compression] = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstandard",
    ".zstd": "zstandard",
}

_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"(\xb5/\xfd"
_SKIPPABLE = b"*M\x18"  # behind a byte of 0x50 to 0x5f: pzstd begins with such a frame
_WINDOW_BYTES = 1 << 31  # `zstd --long=31`, as archives of text are packed
_PACKED_AT_ONCE_BYTES = {"gzip": 16 << 10, "zstandard": 4 << 10}  # at most 16 and 170 MiB unpacked
_BUFFER_BYTES = 256 << 10


def compression_of(path: Path) -> Compression | None:
    """Tell from the first bytes how a file is packed, whatever its name says."""
    with opened_raw(path) as file:
        try:
            head = file.read(4)
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    if head.startswith(_GZIP):
        return "gzip"
    skippable = len(head) == 4 and head[0] >> 4 == 5 and head.endswith(_SKIPPABLE)
    return "zstandard" if head == _ZSTANDARD or skippable else None


def opened_raw(path: Path) -> BinaryIO:
    """Open a regular file. Raises BadInput for everything else."""
    try:
        if not path.exists():
            raise BadInput(f"{path} does not exist: check data.path")
        if not path.is_file():
            raise BadInput(f"{path} is not a regular file: data is read more than once")
        return io.BufferedReader(open_plain(path, follow=True))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error


class Source:
    """A file's bytes in order, after unpacking. Use it as a context manager."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)
        self.compression = compression_of(path)
        self.at = 0  # bytes that were taken, unpacked
        self.jumped = False  # lines are numbered by the bytes before them
        self.rows_share: float | None = None  # of the rows, where the file knows how many it has
        self._raw = opened_raw(path)
        self._size_bytes = path.stat().st_size
        self._unpacked: _Unpacked | None = None
        self.file: BinaryIO = self._raw
        if self.compression is not None:
            self._unpacked = _Unpacked(self._raw, self.compression, self.name)
            self.file = io.BufferedReader(self._unpacked, _BUFFER_BYTES)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self._raw.close()

    def readline(self, most_bytes: int) -> bytes:
        """Return the next line with its end, or its first `most_bytes`; b"" at the end."""
        return self._taken(lambda: self.file.readline(most_bytes))

    def read(self, most_bytes: int) -> bytes:
        """Return the next bytes; b"" at the end."""
        return self._taken(lambda: self.file.read(most_bytes))

    def skip_blank_lines(self) -> int:
        """Skip the lines of white space that come next, as fast as bytes are read; return how many
        there were."""
        skipped = 0
        while ahead := self._ahead():
            blank = ahead[: len(ahead) - len(ahead.lstrip())]
            whole = blank.rfind(b"\n") + 1  # what stands before words is theirs
            if not whole:
                break
            skipped += self.read(whole).count(b"\n")
        return skipped

    def jump(self, offset: int) -> None:
        """Continue with the first line that begins behind `offset`; only in files that are not
        packed.

        From here on lines are numbered by the bytes before them.
        """
        self.file.seek(offset)
        self.at, self.jumped = offset, True
        while (skipped := self.readline(1 << 20)) and not skipped.endswith(b"\n"):
            pass

    @property
    def share(self) -> float:
        """Return the fraction of the file read so far; for packed files an estimate."""
        if self.rows_share is not None:
            return self.rows_share
        whole = float(self._size_bytes)
        if self._unpacked is not None:
            whole *= self._unpacked.made_bytes / max(1, self._raw.tell())
        return min(1.0, self.at / max(1.0, whole))

    def _ahead(self) -> bytes:
        """Return bytes that come next, without taking them."""
        assert isinstance(self.file, io.BufferedReader)
        try:
            return self.file.peek(_BUFFER_BYTES)
        except OSError:
            return b""  # said by the next read

    def _taken(self, read: Callable[[], bytes]) -> bytes:
        try:
            data = read()
        except OSError as error:
            raise BadInput(
                f"{self.name} cannot be read any further than {bytes_text(self.at)}: "
                f"{error.strerror or error}"
            ) from error
        self.at += len(data)
        return data


def zstandard() -> Any:
    """Return the library that reads .zst. Raises BadInput with the command that installs it."""
    try:
        import zstandard as library
    except ImportError as error:
        raise BadInput(f"a .zst file needs the package zstandard: {INSTALL}") from error
    return library


class _Unpacked(io.RawIOBase):
    """Unpacks frame after frame, and refuses a file that ends within one."""

    def __init__(self, raw: BinaryIO, compression: Compression, name: str) -> None:
        super().__init__()
        self._raw, self._compression, self._name = raw, compression, name
        self._errors: tuple[type[Exception], ...] = (zlib.error, gzip.BadGzipFile)
        if compression == "zstandard":
            self._errors = (zstandard().ZstdError,)
        self._frame = self._new_frame()
        self._within = False  # a frame has begun and has not ended
        self._ready = memoryview(b"")
        self.made_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not len(self._ready):
            packed = self._raw.read(_PACKED_AT_ONCE_BYTES[self._compression])
            if not packed:
                if self._within:
                    raise self._damaged("is cut off in the middle: download or pack it again")
                return 0
            self._ready = memoryview(self._made_of(packed))
            self.made_bytes += len(self._ready)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _new_frame(self) -> Any:
        if self._compression == "gzip":
            return zlib.decompressobj(wbits=31)
        return zstandard().ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()

    def _made_of(self, packed: bytes) -> bytes:
        parts: list[bytes] = []
        while packed:
            if not self._within and self._compression == "gzip":
                packed = packed.lstrip(b"\0")  # tape blocks are filled up with zeros
                if not packed:
                    break
            try:
                parts.append(self._frame.decompress(packed))
            except self._errors as error:
                raise self._damaged(f"is damaged ({error}): download or pack it again") from error
            self._within = not self._frame.eof
            if self._within:
                break
            packed = self._frame.unused_data
            self._frame = self._new_frame()
        return b"".join(parts)

    def _damaged(self, what: str) -> BadInput:
        return BadInput(
            f"{self._name} {what} (after {bytes_text(self._raw.tell())} of the {self._compression} "
            f"file, {bytes_text(self.made_bytes)} unpacked)"
        )
