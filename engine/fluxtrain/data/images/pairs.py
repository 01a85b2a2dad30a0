"""Reads pairs of images: a target, what it is made from, and the words that ask for the change.

Layouts: rows (`pairs.jsonl`, a CSV, or a data set of a hub on this disk, whose Parquet files hold
the pictures), or folders (`training_images/NAME.png` with `NAME.txt`, `control_images/NAME.png`,
further `NAME_control_1.png`, and `NAME_mask.png`). Every pair that cannot be used is named before
anything is loaded.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from fluxtrain.data.containers.opening import SUFFIXES as CONTAINERS
from fluxtrain.data.containers.opening import container_of, is_about_data, records, suffix_of
from fluxtrain.data.containers.record import Problem, Record, keys_of
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.images.buckets import Bucket, bucket_for, buckets_of
from fluxtrain.data.images.pictures import SUFFIXES, BadPicture, decode, mask_weights, size_of
from fluxtrain.errors import BadInput
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
_NAMED = 8  # bad pairs that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPair:
    """A pair as the data names it, not looked at yet."""

    image: Path
    references: tuple[Path, ...]  # none: the image is made from the words alone
    prompt: str
    mask: Path | None
    where: str  # the file and line


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture by its content, so that a changed file is another one."""

    path: Path
    digest: str  # sha256 of the file's bytes, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A pair that can be trained on, at the size of its bucket."""

    image: Picture
    references: tuple[Picture, ...]
    prompt: str
    mask: Picture | None
    bucket: Bucket
    where: str

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Return the target and its references."""
        return (self.image, *self.references)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of the data, and notes on them for a person."""

    pairs: tuple[Pair, ...]
    layout: str
    notes: tuple[str, ...]


def read_pairs(
    path: Path,
    side: int,
    *,
    most_bad: int = 0,
    is_known: Callable[[Picture, Bucket], bool] = lambda *_: False,
) -> Pairs:
    """Read and check all pairs; each is assigned to a size of about `side` x `side` pixels.

    Pictures that `is_known` were decoded before and are not decoded again. Raises BadInput, which
    names bad pairs with file and line, where there are more than `most_bad`, or no good one.
    """
    layout, found = _found(path)
    bad: list[str] = []
    good: list[Pair] = []
    buckets = buckets_of(side)
    for one in found:
        if isinstance(one, str):
            bad.append(one)
            continue
        try:
            good.append(_checked(one, buckets, is_known))
        except BadPicture as error:
            bad.append(f"{one.where}: {error}")
    if len(bad) > most_bad or not good:
        shown = "; ".join(bad[:_NAMED]) + f"; and {len(bad) - _NAMED:,} more" * (len(bad) > _NAMED)
        if not bad:
            raise BadInput(f"{path} holds no pairs of images: {_layouts()}")
        least = f"at most {most_bad} may be bad" if good else "none is left"
        raise BadInput(
            f"{len(bad):,} of {len(bad) + len(good):,} pairs cannot be used ({least}): {shown}"
        )
    return Pairs(tuple(good), layout, tuple(_notes(good, bad)))


def _notes(pairs: Sequence[Pair], bad: Sequence[str]) -> Iterator[str]:
    if bad:
        yield f"{len(bad):,} pairs are left out: {'; '.join(bad[:_NAMED])}"
    prompt, count = Counter(pair.prompt for pair in pairs).most_common(1)[0]
    if count == len(pairs) > 1:
        yield f"all {count:,} pairs have one prompt: the model learns this change alone"
    elif not prompt.strip():
        yield f"{count:,} pairs have an empty prompt"
    without = sum(not pair.references for pair in pairs)
    if without:
        yield f"{without:,} pairs have no reference: their images are learned from words alone"


def _layouts() -> str:
    return (
        f"name a .jsonl with image, reference and prompt, a .csv or .parquet, or a folder with "
        f"{TARGETS}/ and {CONTROLS}/"
    )


def _found(path: Path) -> tuple[str, Iterable[FoundPair | str]]:
    """Return the layout with the pairs, or with what is wrong with each."""
    if path.is_file():
        return f"rows of {path.name}", _of_rows([path])
    if not path.is_dir():
        raise BadInput(f"{path} does not exist: {_layouts()}")
    files = sorted(
        file
        for file in (*path.iterdir(), *path.glob("data/*"), *path.glob("train*/*"))
        if file.is_file() and suffix_of(file) in CONTAINERS and not is_about_data(file)
        if suffix_of(file) not in (".txt", ".md")
    )
    folders = (path / TARGETS).is_dir()
    kinds = dict.fromkeys(suffix_of(file) for file in files)
    if folders + len(kinds) > 1:
        named = [*([f"{TARGETS}/"] if folders else []), *(file.name for file in files[:3])]
        raise BadInput(
            f"{path} holds several layouts of pairs ({', '.join(named)}): set data.path to one file"
        )
    if folders:
        return "folders", _of_folders(path)
    if not files:
        raise BadInput(f"{path} holds no pairs of images: {_layouts()}")
    return f"rows of {files[0].name}" + f" and {len(files) - 1} more" * (len(files) > 1), _of_rows(
        files
    )


def _of_folders(path: Path) -> Iterator[FoundPair | str]:
    controls = _pictures_in(path / CONTROLS)
    targets = _pictures_in(path / TARGETS)
    for stem, image in targets.items():
        if stem.endswith("_mask") and stem.removesuffix("_mask") in targets:
            continue
        words = image.with_suffix(".txt")
        if not words.is_file():
            yield f"{image}: {words.name} is missing beside it: write the prompt into it"
            continue
        try:
            prompt = words.read_text(encoding="utf-8").strip()
        except ValueError:
            yield f"{words}: is not UTF-8 text"
            continue
        further = [f"{stem}_control_{number}" for number in range(1, len(controls) + 1)]
        names = [stem, *further]
        references = tuple(controls[name] for name in names if name in controls)
        if controls and stem not in controls:
            yield f"{image}: {CONTROLS}/{stem}.* is missing: add the reference, or remove the image"
            continue
        mask = controls.get(f"{stem}_mask") or targets.get(f"{stem}_mask")
        yield FoundPair(
            image=image, references=references, prompt=prompt, mask=mask, where=str(image)
        )


def _pictures_in(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    files = sorted(folder.iterdir())
    return {file.stem: file for file in files if file.suffix.lower() in (*SUFFIXES, ".gif")}


def _of_rows(files: Sequence[Path]) -> Iterator[FoundPair | str]:
    for file in files:
        container = container_of(file).container
        if container == "text":
            raise BadInput(f"{file} is text: {_layouts()}")
        with Source(file) as source:
            for record in records(source, container):
                if isinstance(record, Problem):
                    yield str(record)
                    continue
                try:
                    yield _of_record(record, file.parent)
                except BadPicture as error:
                    yield f"{record.origin}: {error}"


def _of_record(record: Record, folder: Path) -> FoundPair:
    values = record.values
    found = {
        kind: next((values[key] for key in keys if key in values), None)
        for kind, keys in _KEYS.items()
    }
    if found["image"] is None:
        raise BadPicture(f"no image: of {keys_of(values)} none is {', '.join(_KEYS['image'])}")
    if not isinstance(found["prompt"], str):
        raise BadPicture(f"no prompt: of {keys_of(values)} none is {', '.join(_KEYS['prompt'])}")
    first = found["references"]
    references = first if isinstance(first, list) else [first]
    numbered = [
        values[key]
        for start in _NUMBERED
        for key in sorted(values)
        if key.startswith(start) and key.removeprefix(start).isdecimal()
    ]
    return FoundPair(
        image=_file_of(found["image"], folder),
        references=tuple(_file_of(one, folder) for one in (*references, *numbered) if one),
        prompt=found["prompt"].strip(),
        mask=None if found["mask"] is None else _file_of(found["mask"], folder),
        where=str(record.origin),
    )


def _file_of(value: Any, folder: Path) -> Path:
    """Return the file of a picture; one that stands in the row itself is unpacked into the
    cache."""
    if isinstance(value, str) and value:
        return folder / Path(value).expanduser()
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        content: bytes = value["bytes"]
        place = cache_root() / "images" / "unpacked" / hashlib.sha256(content).hexdigest()
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, content)
        return place
    if isinstance(value, dict) and value.get("path"):
        return folder / str(value["path"])
    raise BadPicture(f"{type(value).__name__} where the path of a picture should be")


def _checked(
    found: FoundPair, buckets: tuple[Bucket, ...], is_known: Callable[[Picture, Bucket], bool]
) -> Pair:
    width, height = _named(found.image, size_of)
    bucket = bucket_for(width, height, buckets)
    for number, reference in enumerate(found.references):
        size = _named(reference, size_of)
        if number == 0 and abs(log(size[0] * height / (size[1] * width))) > _SHAPE:
            raise BadPicture(
                f"{reference.name} has {size[0]} x {size[1]} pixels and {found.image.name} "
                f"{width} x {height}: another shape, so that the change would be learned shifted; "
                "crop both alike"
            )
    pictures = []
    for path in (found.image, *found.references):
        picture = _named(path, picture_of)
        if not is_known(picture, bucket):
            _named(path, decode)
        pictures.append(picture)
    mask = None
    if found.mask is not None:
        mask = _named(found.mask, picture_of)
        _named(found.mask, lambda path: mask_weights(path, bucket))
    return Pair(
        image=pictures[0], references=tuple(pictures[1:]), prompt=found.prompt, mask=mask,
        bucket=bucket, where=found.where,
    )  # fmt: skip


def _named(path: Path, look: Callable[[Path], Any]) -> Any:
    """Look at a picture; what is wrong with it is told with its name."""
    try:
        return look(path)
    except BadPicture as error:
        raise BadPicture(f"{path.name} {error}") from None


def picture_of(path: Path) -> Picture:
    """Read a file's digest. Raises BadPicture where it is missing."""
    try:
        with path.open("rb") as file:
            return Picture(path, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise BadPicture(f"cannot be read ({error.strerror})") from None
