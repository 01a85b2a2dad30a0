"""The tokens of a data set in shards on disk: written shard by shard, and mapped into memory.

A manifest names the shards that are whole, so a writer that was killed goes on behind the last one.
Memory holds one shard while it is written, and 26 bytes a sample while it is read.

Checksums say that a file holds what was written, not that this was sound: a part that a crash left
as zeros may be sealed again by what copied or repaired it. So a sample's tokens are also compared
with their hash in the index, and one with marks has a token to learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
from fluxtrain.data.store.shard_files import (
    Numbers,
    write_numbers,
)
from fluxtrain.data.store.tokens import Ints, Keys, content_key
from fluxtrain.files.cache import Damaged, read_sealed, write_sealed

SHARD_TOKENS = 1 << 24
MANIFEST = "manifest.json"
_INDEX = np.dtype(
    [("length", "<u8"), ("row", "<u8"), ("key", "<u8"), ("number", "<u8"), ("file", "<u4"),
     ("is_row", "<u4")]
)  # fmt: skip


class ShardWriter:
    """Writes the samples of rows, and goes on where an earlier writer stopped."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`vocabulary` tokens are known: up to 65536 of them take 2 bytes each."""
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
            self._samples += batch.samples
            self._tokens += sum(len(sample.ids) for sample, _ in batch.samples)
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
            guards = {"ids": write_numbers(stem.with_suffix(".ids"), ids.astype(manifest["dtype"]))}
            if marked:
                guards["marks"] = write_numbers(stem.with_suffix(".marks"), _marks_of(samples))
            guards["index"] = write_numbers(stem.with_suffix(".index"), self._index())
            shard = {"samples": len(samples), "tokens": len(ids), "largest": int(ids.max()),
                     "marks": marked, "digest": _digest(samples), "guards": guards}  # fmt: skip
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
        """Raises Damaged where a file is missing, cut off, changed, or of other data."""
        manifest = _manifest(folder)
        if manifest is None or not manifest.get("shards"):
            raise Damaged(f"{folder} has no whole shard")
        try:
            self._open(folder, manifest)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            if isinstance(error, Damaged):
                raise
            raise Damaged(f"{folder} is of another version: {error!r}") from error

    def _open(self, folder: Path, manifest: dict[str, Any]) -> None:
        shards: list[dict[str, Any]] = manifest["shards"]
        stems = [folder / f"{number:05d}" for number in range(len(shards))]
        self.notes = Notes.from_json(manifest["notes"])
        self._folder = folder
        self._shards, self._files = shards, manifest["files"]

        def opened(number: int, kind: str, dtype: npt.DTypeLike) -> Numbers:
            path = stems[number].with_suffix(f".{kind}")
            return Numbers(path, dtype, shards[number]["guards"][kind])

        numbers = range(len(shards))
        self._ids = [opened(number, "ids", manifest["dtype"]) for number in numbers]
        self._marks = [
            opened(number, "marks", np.bool_) if shards[number]["marks"] else None
            for number in numbers
        ]
        self._indexes = [opened(number, "index", _INDEX) for number in numbers]
        for shard, ids in zip(shards, self._ids, strict=True):
            if len(ids) != shard["tokens"]:
                raise Damaged(f"{folder} holds a shard of another length than its manifest says")
        for shard, index in zip(shards, self._indexes, strict=True):
            lengths = index.whole()["length"]
            if not lengths.all() or int(lengths.sum()) != shard["tokens"]:
                raise Damaged(f"{folder} holds samples of other lengths than its manifest says")
        self._borders = np.cumsum([0, *(shard["tokens"] for shard in shards)])
        self._samples = np.cumsum([0, *(shard["samples"] for shard in shards)])
        self.starts: Ints = np.zeros(int(self._samples[-1]) + 1, dtype=np.int64)
        np.cumsum(self._column("length"), out=self.starts[1:])
        self.rows: Ints = self._column("row").astype(np.int64)
        self._seen_ids, self._seen_marks = np.zeros((2, len(self.rows)), dtype=np.bool_)

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
        """Return whether only marked tokens are learnt."""
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
        with self._told():
            found = self._read_ids(start, count)
            if count and not self._seen_ids[sample := self._sample_at(start)]:
                self._check_ids(sample, found)
            return found

    def marks_at(self, start: int, count: int) -> Marks:
        """Return the marks of `count` tokens from `start` on, all of one sample."""
        shard, within = self._place(start)
        marks = self._marks[shard]
        if marks is None or not count:
            return np.ones(count, dtype=np.bool_)
        with self._told():
            found: Marks = marks.read(within, count)
            if not self._seen_marks[sample := self._sample_at(start)]:
                self._check_marks(sample, marks, found)
            return found

    def origin(self, sample: int) -> str:
        """Return the place of the row that a sample is made of."""
        entry = self._entry(sample)
        unit = "row" if entry["is_row"] else "line"
        return f"{self._files[int(entry['file'])]} {unit} {int(entry['number'])}"

    def digest(self) -> str:
        """Return a hash of all tokens and marks, as they were written."""
        told = [shard["digest"] for shard in self._shards]
        return blake2b("".join(told).encode(), digest_size=16).hexdigest()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Forget the shards where one is damaged, so that the next run makes them anew."""
        try:
            yield
        except Damaged as error:
            with suppress(OSError):  # of a folder that is only read
                (self._folder / MANIFEST).unlink(missing_ok=True)
            raise Damaged(
                f"{error}: these tokens were given up; start again, or resume, and they are made "
                "anew"
            ) from error

    def _read_ids(self, start: int, count: int) -> Ids:
        shard, within = self._place(start)
        return self._ids[shard].read(within, count).astype(np.uint32, copy=False)

    def _check_ids(self, sample: int, found: Ids) -> None:
        """Raise Damaged unless a sample's tokens, of which some were `found`, have their hash."""
        start, end = (int(place) for place in self.starts[sample : sample + 2])
        whole = found if len(found) == end - start else self._read_ids(start, end - start)
        if content_key(whole) != int(self._entry(sample)["key"]):
            raise Damaged(f"{self._folder} holds other tokens than those of {self.origin(sample)}")
        self._seen_ids[sample] = True

    def _check_marks(self, sample: int, marks: Numbers, found: Marks) -> None:
        """Raise Damaged unless a sample, of which some marks were `found`, has a token to learn."""
        start, end = (int(place) for place in self.starts[sample : sample + 2])
        if not found.any() and not marks.read(self._place(start)[1], end - start).any():
            raise Damaged(f"{self._folder} holds no token to learn of {self.origin(sample)}")
        self._seen_marks[sample] = True

    def _sample_at(self, place: int) -> int:
        return int(np.searchsorted(self.starts, place, side="right")) - 1

    def _entry(self, sample: int) -> Any:
        """Return what the index says of a sample."""
        shard = int(np.searchsorted(self._samples, sample, side="right")) - 1
        return self._indexes[shard].read(sample - int(self._samples[shard]), 1)[0]

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
