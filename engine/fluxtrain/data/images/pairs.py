"""Reads pairs of images: a target, what it is made from, and the words that ask for the change.

Layouts: rows (`pairs.jsonl`, a CSV, or a data set of a hub on this disk, whose Parquet files hold
the pictures), or folders (`training_images/NAME.png` with `NAME.txt`, `control_images/NAME.png`,
further `NAME_control_1.png`, and `NAME_mask.png`). Every pair that cannot be used is named before
anything is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import log
from pathlib import Path
from typing import Any

from fluxtrain.data.containers.opening import SUFFIXES as CONTAINERS
from fluxtrain.data.containers.opening import container_of, is_about_data, records, suffix_of
from fluxtrain.data.containers.record import Problem, keys_of
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.images.pictures import (
    SUFFIXES,
    BadPicture,
    Bucket,
    bucket_for,
    buckets_of,
    decode,
    mask_weights,
    size_of,
)
from fluxtrain.errors import BadInput, ReadFailed, brief
from fluxtrain.files.atomic import write_bytes
from fluxtrain.files.cache import cache_root

TARGETS, CONTROLS = "training_images", "control_images"
_KEYS = {
    "image": ("image", "target_image", "target", "path_target"),
    "references": ("reference", "control_images", "control_image", "control", "path_control"),
    "prompt": ("prompt", "caption", "text"),
    "mask": ("mask", "control_mask", "path_mask"),
}
_NUMBERED = ("path_control_", "control_", "reference_")  # and a number: further references
_SHAPE = 0.02  # by which width / height of target and reference may differ, as a share
_OTHERS = (".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jfif")  # pictures, too
_MISSPELT = 0.8  # of a key's letters are those of one that is read
_NAMED = 8  # bad pairs that a message names
_LAYOUTS = (
    f"name a .jsonl with image, reference and prompt, a .csv or .parquet, or a folder with "
    f"{TARGETS}/ and {CONTROLS}/"
)
_Row = dict[str, Any]  # a pair as the data names it, with:
_FOLDER, _BAD = "/folder", "/bad"  # from where its paths count; why it cannot be used


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture by its content, so that a changed file is another one."""

    path: Path
    digest: str  # sha256 of the file's bytes, hexadecimal


IsKnown = Callable[[Picture, Bucket], bool]  # decoded before, at this size


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A pair that can be trained on, at the size of its bucket."""

    image: Picture
    references: tuple[Picture, ...]
    prompt: str
    mask: Picture | None
    bucket: Bucket

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Return the target and its references."""
        return (self.image, *self.references)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of the data, and notes on them for a person."""

    trained: tuple[Pair, ...]
    layout: str
    notes: tuple[str, ...]
    held_out: tuple[Pair, ...] = ()

    @property
    def all(self) -> tuple[Pair, ...]:
        """Return trained and held-out pairs."""
        return (*self.trained, *self.held_out)


def read_pairs(
    path: Path,
    side: int,
    *,
    most_bad: int = 0,
    is_known: IsKnown = lambda *_: False,
) -> Pairs:
    """Read and check all pairs; each is assigned to a size of about `side` x `side` pixels.

    Pictures that `is_known` were decoded before and are not decoded again. Raises BadInput, which
    names bad pairs with file and line, where there are more than `most_bad`, or no good one.
    """
    layout, rows = _found(path)
    bad: list[str] = []
    good: list[Pair] = []
    buckets = buckets_of(side)
    for where, row in rows:
        try:
            good.append(_pair(row, buckets, is_known))
        except BadPicture as error:
            bad.append(f"{where}: {error}")
    if not good and not bad:
        raise BadInput(f"{path} holds no pairs of images: {_LAYOUTS}")
    if len(bad) > most_bad or not good:
        shown = "; ".join(bad[:_NAMED]) + f"; and {len(bad) - _NAMED:,} more" * (len(bad) > _NAMED)
        least = f"at most {most_bad} may be bad" if good else "none is left"
        raise BadInput(
            f"{len(bad):,} of {len(bad) + len(good):,} pairs cannot be used ({least}): {shown}"
        )
    return Pairs(tuple(good), layout, tuple(_notes(good, bad)))


def _notes(pairs: Sequence[Pair], bad: Sequence[str]) -> Iterator[str]:
    if bad:
        yield f"{len(bad):,} pairs are left out: {'; '.join(bad[:_NAMED])}"
    if len({pair.prompt for pair in pairs}) == 1 < len(pairs):
        yield f"all {len(pairs):,} pairs have one prompt: the model learns this change alone"
    without = sum(not pair.references for pair in pairs)
    if without:
        yield f"{without:,} pairs have no reference: their images are learned from words alone"


def _found(path: Path) -> tuple[str, Iterable[tuple[str, _Row]]]:
    """Return the layout with the pairs as the data names them, and where it does."""
    if path.is_file():
        return f"rows of {path.name}", _rows_of([path])
    if not path.is_dir():
        raise BadInput(f"{path} does not exist: {_LAYOUTS}")
    files = sorted(
        file
        for file in (*path.iterdir(), *path.glob("data/*"), *path.glob("train*/*"))
        if file.is_file() and suffix_of(file) in CONTAINERS and not is_about_data(file)
        if suffix_of(file) not in (".txt", ".md")
    )
    folders = (path / TARGETS).is_dir()
    if folders + len({suffix_of(file) for file in files}) > 1:
        named = [f"{TARGETS}/"] * folders + [file.name for file in files[:3]]
        raise BadInput(
            f"{path} holds several layouts of pairs ({', '.join(named)}): set data.path to one file"
        )
    if folders:
        return "folders", _of_folders(path)
    more = f" and {len(files) - 1} more" * (len(files) > 1)
    return f"rows of {files[0].name if files else path}{more}", _rows_of(files)


def _of_folders(path: Path) -> Iterator[tuple[str, _Row]]:
    controls, targets = _pictures_in(path / CONTROLS), _pictures_in(path / TARGETS)
    for stem, image in targets.items():
        if stem.endswith("_mask") and stem.removesuffix("_mask") in targets:
            continue
        words = image.with_suffix(".txt")
        further = (f"{stem}_control_{number}" for number in range(1, len(controls) + 1))
        row: _Row = {
            "image": image,
            "reference": [controls[name] for name in (stem, *further) if name in controls],
            "mask": controls.get(f"{stem}_mask") or targets.get(f"{stem}_mask"),
        }
        try:
            row["prompt"] = words.read_text(encoding="utf-8")
        except OSError:
            row = {_BAD: f"{words.name} is missing beside it: write the prompt into it"}
        except ValueError:
            row = {_BAD: f"{words.name} is not UTF-8 text"}
        if controls and stem not in controls:
            row = {_BAD: f"{CONTROLS}/{stem}.* is missing: add it, or remove the image"}
        yield str(image), row


def _pictures_in(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix.lower() not in (*SUFFIXES, *_OTHERS):
            continue
        if (other := found.setdefault(file.stem, file)) != file:
            raise BadInput(
                f"{folder} holds {other.name} and {file.name}, which are one name: rename one"
            )
    return found


def _rows_of(files: Sequence[Path]) -> Iterator[tuple[str, _Row]]:
    for file in files:
        container = container_of(file).container
        if container == "text":
            raise BadInput(f"{file} is text: {_LAYOUTS}")
        with Source(file) as source:
            for record in records(source, container):
                if isinstance(record, Problem):
                    yield str(record.origin), {_BAD: record.said.lstrip(": ")}
                else:
                    yield str(record.origin), {_FOLDER: file.parent, **record.values}


def _named(row: _Row) -> _Row:
    """Return what a row has of each kind. Raises BadPicture without an image or a prompt."""
    if _BAD in row:
        raise BadPicture(row[_BAD])
    named = {kind: next((row[k] for k in keys if k in row), None) for kind, keys in _KEYS.items()}
    for kind, needed in (("image", object), ("prompt", str)):
        value = named[kind]
        if value is None:
            keys = keys_of({key: value for key, value in row.items() if key != _FOLDER})
            raise BadPicture(f"no {kind}: of {keys} none has {', '.join(_KEYS[kind])}")
        if not isinstance(value, needed):
            raise BadPicture(f"the {kind} is {brief(str(value), 40)}: write a text")
        if isinstance(value, str) and not value.strip():
            raise BadPicture(f"the {kind} is empty: write one, or leave the pair out")
    read = {key for keys in _KEYS.values() for key in keys}
    for kind in ("references", "mask"):
        for key in row.keys() - read if named[kind] is None else ():
            meant = get_close_matches(key, _KEYS[kind], 1, _MISSPELT)
            if meant and not key.startswith(_NUMBERED):
                raise BadPicture(f"{key} is not read: call it {meant[0]}, or leave it out")
    return named


def _check_shapes(image: Path, others: Sequence[Path]) -> None:
    """Compare the shapes of others with the image's. Raises BadPicture."""
    width, height = size_of(image)
    for other in others:
        w, h = size_of(other)
        if abs(log(w * height / (h * width))) > _SHAPE:
            raise BadPicture(
                f"{other.name} has {w} x {h} pixels and {image.name} {width} x {height}: another "
                "shape, so that the change would be learned shifted; crop both alike"
            )


def _pair(row: _Row, buckets: tuple[Bucket, ...], is_known: IsKnown) -> Pair:
    """Look at all files that a row names. Raises BadPicture."""
    named = _named(row)
    first = named["references"]
    numbered = [
        row[key]
        for start in _NUMBERED
        for key in sorted(row)
        if key.startswith(start) and key.removeprefix(start).isdecimal()
    ]
    given = [named["image"], *(first if isinstance(first, list) else [first]), *numbered]
    folder = row.get(_FOLDER, Path())
    paths = [_file_of(one, folder) for one in given if one]
    masks = [_file_of(one, folder) for one in [named["mask"]] if one]
    _check_shapes(paths[0], (*paths[1:2], *masks))
    for further in paths[2:]:
        size_of(further)
    bucket = bucket_for(*size_of(paths[0]), buckets)
    pictures = [picture_of(path) for path in paths]
    for picture in pictures:
        if not is_known(picture, bucket):
            decode(picture.path)
    mask = None
    if masks:
        mask = picture_of(masks[0])
        mask_weights(mask.path, bucket)
    return Pair(
        image=pictures[0], references=tuple(pictures[1:]), prompt=str(named["prompt"]).strip(),
        mask=mask, bucket=bucket,
    )  # fmt: skip


def _file_of(value: Any, folder: Path) -> Path:
    """Return the file of a picture; one that stands in the row itself is unpacked into the
    cache."""
    content = value.get("bytes") if isinstance(value, dict) else None
    if isinstance(content, bytes):
        place = cache_root() / "images" / "unpacked" / hashlib.sha256(content).hexdigest()
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, content)
        return place
    path = value.get("path") if isinstance(value, dict) else value
    if path and isinstance(path, str | Path):
        return folder / Path(path).expanduser()
    raise BadPicture(f"{type(value).__name__} where the path of a picture should be")


def picture_of(path: Path) -> Picture:
    """Read a file's digest. Raises BadPicture where it is missing."""
    try:
        with path.open("rb") as file:
            return Picture(path, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise BadPicture(f"{path.name} cannot be read ({error.strerror})") from None


def path_of(picture: Picture) -> Path:
    """Return where a picture's file is. Raises ReadFailed where it is another one by now."""
    try:
        if picture_of(picture.path) == picture:
            return picture.path
        wrong = f"{picture.path} was changed"
    except BadPicture as error:
        wrong = str(error)
    raise ReadFailed(f"{wrong} since the pairs were checked: put it back, or start a new run")
