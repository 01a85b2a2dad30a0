"""The tokens of a data set in shards on disk: written shard by shard, and mapped into memory.

A manifest names the shards that are whole, so a writer that was killed goes on behind the last one.
Memory holds one shard while it is written, and 24 bytes a sample while it is read. The manifest has
a checksum of every file, which is verified when the store is opened: docs/decisions/0028.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.encoding.samples import Ids, Marks, Sample
from fluxtrain.data.row import Row
from fluxtrain.data.store.tokens import Ints, Keys, content_key
from fluxtrain.files.atomic import replace_file
from fluxtrain.files.cache import Damaged, read_sealed, write_sealed
from fluxtrain.files.opening import open_plain, read_again, read_range

SHARD_TOKENS = 1 << 24
MANIFEST = "manifest.json"
READ_BYTES = 1 << 20  # at once, while a checksum is verified
_INDEX = np.dtype(
    [("length", "<u8"), ("row", "<u8"), ("key", "<u8"), ("number", "<u8"), ("file", "<u4"),
     ("is_row", "<u4")]
)  # fmt: skip


def write_numbers(path: Path, numbers: npt.NDArray[Any]) -> int:
    """Write an array; return its checksum."""
    data = np.ascontiguousarray(numbers).tobytes()
    replace_file(path, data)
    return zlib.crc32(data)


class Numbers:
    """An array of `write_numbers`, whose checksum is verified when it is opened."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, count: int, checksum: int) -> None:
        """Read the file once. Raises Damaged where it is not the one that was written, and
        ReadFailed where the disk fails."""
        self._path = path
        self._dtype = np.dtype(dtype)
        try:
            with open_plain(path) as file:
                found = read_again(partial(_checksum, file), path)
                self._inode = os.fstat(file.fileno()).st_ino
                self._data = np.memmap(file, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise Damaged(f"{path} cannot be read: {error}") from error
        if len(self._data) != count * self._dtype.itemsize or found != checksum:
            raise Damaged(f"{path} is cut off or damaged")

    def __len__(self) -> int:
        return len(self._data) // self._dtype.itemsize

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return `count` numbers from `start` on. Raises ReadFailed where the disk fails or does
        not answer: at a mapped page that would end the process. The mapping serves where the cache
        was removed or built anew meanwhile."""
        size = self._dtype.itemsize
        first, length = start * size, count * size
        found = read_range(self._path, first, length, self._inode)
        return np.frombuffer(
            self._data[first : first + length].data if found is None else found, dtype=self._dtype
        )

    def whole(self) -> npt.NDArray[Any]:
        """Return all numbers. Raises ReadFailed as `read`."""
        return self.read(0, len(self))


class ShardWriter:
    """Writes the samples of rows, and goes on where an earlier writer stopped."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """Write to `folder`; a `vocabulary` of up to 65536 tokens takes 2 bytes each."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._manifest: dict[str, Any] = _manifest(folder) or {
            "shards": [], "files": [], "dtype": "<u2" if vocabulary <= 1 << 16 else "<u4",
            "notes": Notes().as_json(),
        }  # fmt: skip
        self._samples: list[tuple[Sample, int]] = []
        self._tokens = 0

    @property
    def notes(self) -> Notes:
        """Return what was noticed in the rows whose samples are on the disk."""
        return Notes.from_json(self._manifest["notes"])

    def write(self, rows: Iterable[Row], encoder: Encoder) -> None:
        """Write the samples of all rows; those on the disk already are passed over.

        Raises BadInput as the encoder does.
        """
        for batch in encoder.batches(islice(rows, self.notes.rows, None)):
            self._samples += batch
            self._tokens += sum(len(sample.ids) for sample, _ in batch)
            if self._tokens >= SHARD_TOKENS:
                self._flush(encoder.notes)
        self._flush(encoder.notes)
        if not self._manifest["shards"]:
            raise encoder.nothing()

    def _flush(self, notes: Notes) -> None:
        manifest, samples = self._manifest, self._samples
        if samples:
            stem = self._folder / f"{len(manifest['shards']):05d}"
            ids = np.concatenate([sample.ids for sample, _ in samples])
            marked = any(sample.marks is not None for sample, _ in samples)
            files: dict[str, npt.NDArray[Any]] = {"ids": ids.astype(manifest["dtype"])}
            if marked:
                files["marks"] = _marks_of(samples)
            files["index"] = self._index()
            checksums = {
                kind: write_numbers(stem.with_suffix(f".{kind}"), numbers)
                for kind, numbers in files.items()
            }
            shard = {"samples": len(samples), "tokens": len(ids), "largest": int(ids.max()),
                     "marks": marked, "digest": _digest(samples),
                     "checksums": checksums}  # fmt: skip
            manifest["shards"].append(shard)
        manifest["notes"] = notes.as_json()
        write_sealed(self._folder / MANIFEST, manifest)
        self._samples, self._tokens = [], 0

    def _index(self) -> np.ndarray[Any, Any]:
        index = np.zeros(len(self._samples), dtype=_INDEX)
        files: list[str] = self._manifest["files"]
        numbers = {name: at for at, name in enumerate(files)}
        for at, (sample, row) in enumerate(self._samples):
            origin = sample.row.origin
            if origin.file not in numbers:
                numbers[origin.file] = len(files)
                files.append(origin.file)
            index[at] = (
                len(sample.ids), row, content_key(sample.ids), origin.number,
                numbers[origin.file], origin.unit == "row",
            )  # fmt: skip
        return index


class StoredTokens:
    """The tokens that a `ShardWriter` wrote."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`. Raises Damaged where a file is missing, cut off, changed, or of other
        data."""
        manifest = _manifest(folder)
        if manifest is None or not manifest.get("shards"):
            raise Damaged(f"{folder} has no whole shard")
        shards: list[dict[str, Any]] = manifest["shards"]
        stems = [folder / f"{number:05d}" for number in range(len(shards))]
        self.notes = Notes.from_json(manifest["notes"])
        self._shards, self._files = shards, manifest["files"]

        def opened(number: int, kind: str, dtype: npt.DTypeLike) -> Numbers:
            shard, path = shards[number], stems[number].with_suffix(f".{kind}")
            count = shard["samples" if kind == "index" else "tokens"]
            return Numbers(path, dtype, count, shard["checksums"][kind])

        numbers = range(len(shards))
        self._ids = [opened(number, "ids", manifest["dtype"]) for number in numbers]
        self._marks = [
            opened(number, "marks", np.bool_) if shards[number]["marks"] else None
            for number in numbers
        ]
        self._indexes = [opened(number, "index", _INDEX) for number in numbers]
        self._borders = np.cumsum([0, *(shard["tokens"] for shard in shards)])
        self._samples = np.cumsum([0, *(shard["samples"] for shard in shards)])
        self.starts: Ints = np.zeros(int(self._samples[-1]) + 1, dtype=np.int64)
        np.cumsum(self._column("length"), out=self.starts[1:])
        self.rows: Ints = self._column("row").astype(np.int64)

    @property
    def documents(self) -> int:
        """Return the number of samples."""
        return len(self.starts) - 1

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return int(self._borders[-1])

    @property
    def has_marks(self) -> bool:
        """Return whether only marked tokens are trained on."""
        return any(shard["marks"] for shard in self._shards)

    @property
    def largest(self) -> int:
        """Return the largest token."""
        return int(max(shard["largest"] for shard in self._shards))

    def keys(self) -> Keys:
        """Return a hash of each sample's content."""
        return np.asarray(self._column("key"), dtype=np.uint64)

    def ids_at(self, start: int, count: int) -> Ids:
        """Return `count` tokens from `start` on, all of one sample."""
        shard, within = self._place(start)
        return self._ids[shard].read(within, count).astype(np.uint32, copy=False)

    def marks_at(self, start: int, count: int) -> Marks:
        """Return the marks of `count` tokens from `start` on, all of one sample."""
        shard, within = self._place(start)
        marks = self._marks[shard]
        return np.ones(count, dtype=np.bool_) if marks is None else marks.read(within, count)

    def origin(self, sample: int) -> str:
        """Return the place of the row that a sample is made of."""
        shard = int(np.searchsorted(self._samples, sample, side="right")) - 1
        entry = self._indexes[shard].read(sample - int(self._samples[shard]), 1)[0]
        unit = "row" if entry["is_row"] else "line"
        return f"{self._files[int(entry['file'])]} {unit} {int(entry['number'])}"

    def digest(self) -> str:
        """Return a hash of all tokens and marks, as they were written."""
        told = [shard["digest"] for shard in self._shards]
        return blake2b("".join(told).encode(), digest_size=16).hexdigest()

    def _place(self, start: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._borders, start, side="right")) - 1
        shard = min(shard, len(self._shards) - 1)  # the end of the last sample
        return shard, start - int(self._borders[shard])

    def _column(self, name: str) -> np.ndarray[Any, Any]:
        return np.concatenate([index.whole()[name] for index in self._indexes])


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        return read_sealed(folder / MANIFEST)
    except Damaged:
        return None


def can_go_on(folder: Path) -> bool:
    """Tell whether a writer may go on in a folder: its shards are whole, or it has none yet."""
    manifest = _manifest(folder)
    if manifest is None or not manifest.get("shards"):
        return not (folder / MANIFEST).exists()
    try:
        StoredTokens(folder)
    except Damaged:
        return False
    return True


def _marks_of(samples: list[tuple[Sample, int]]) -> Marks:
    return np.concatenate(
        [
            np.ones(len(sample.ids), dtype=np.bool_) if sample.marks is None else sample.marks
            for sample, _ in samples
        ]
    )


def _digest(samples: list[tuple[Sample, int]]) -> str:
    made = blake2b(digest_size=16)
    for sample, _ in samples:
        made.update(sample.ids.tobytes())
        made.update(b"" if sample.marks is None else sample.marks.tobytes())
    return made.hexdigest()


def _checksum(file: io.FileIO) -> int:
    file.seek(0)
    checksum = 0
    while part := file.read(READ_BYTES):
        checksum = zlib.crc32(part, checksum)
    return checksum
