"""Pairs of images: four layouts read alike, and everything that cannot be trained on is named."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fluxtrain.config.schema import validate
from fluxtrain.data.images.pairs import read_pairs
from fluxtrain.data.images.pictures import (
    MULTIPLE,
    bucket_for,
    buckets_of,
    cropped,
    mask_weights,
    size_of,
)
from fluxtrain.errors import BadInput

Image = pytest.importorskip("PIL.Image")
PngImageFile = pytest.importorskip("PIL.PngImagePlugin").PngImageFile


def picture(path: Path, size: tuple[int, int] = (64, 64), mode: str = "RGB", **how: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise(size, 60).convert(mode).save(path, **how)
    return path.name


def pair(folder: Path, **changes: Any) -> dict[str, Any]:
    row = {
        "image": picture(folder / "a.png"),
        "reference": picture(folder / "b.png"),
        "prompt": "x",
    }
    return {**row, **changes}


def rows(folder: Path, *values: dict[str, Any]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_four_layouts_give_the_same_pairs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("target", "first", "second", "mask"):
        picture(source / f"{name}.png")
    names = {"image": "target.png", "reference": ["first.png", "second.png"], "mask": "mask.png"}
    found = [read_pairs(rows(source, {**names, "prompt": "swap"}), 64).trained]

    folders = tmp_path / "folders"
    for place, name in (
        ("training_images/one.png", "target"), ("control_images/one.png", "first"),
        ("control_images/one_control_1.png", "second"), ("training_images/one_mask.png", "mask"),
    ):  # fmt: skip
        (folders / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / f"{name}.png", folders / place)
    (folders / "training_images/one.txt").write_text("swap\n")
    found.append(read_pairs(folders, 64).trained)

    table = source / "pairs.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path_target", "path_control", "path_control_1", "path_mask", "prompt"])
        writer.writerow(["target.png", "first.png", "second.png", "mask.png", "swap"])
    found.append(read_pairs(table, 64).trained)

    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    held = {name: {"bytes": (source / f"{name}.png").read_bytes(), "path": None}
            for name in ("target", "first", "second", "mask")}  # fmt: skip
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    row = {"target_image": held["target"], "control_images": [held["first"], held["second"]],
           "control_mask": held["mask"], "prompt": "swap"}  # fmt: skip
    parquet.write_table(arrow.Table.from_pylist([row]), hub / "train-00000.parquet")
    found.append(read_pairs(hub.parent, 64).trained)

    contents = [
        [([one.digest for one in p.pictures], p.mask and p.mask.digest, p.prompt) for p in pairs]
        for pairs in found
    ]
    assert len(contents[0]) == 1 and contents[0][0][1]
    assert contents[1:] == contents[:1] * 3


def drawn(folder: Path, value: Any) -> Any:
    """Draw the picture that a tuple describes, and return its name."""
    if not isinstance(value, tuple):
        return value
    name, size, mode = value
    if mode in ("black", "I;16"):
        kind = np.uint16 if mode == "I;16" else np.uint8
        Image.fromarray(np.zeros(size, dtype=kind)).save(folder / name)
        return name
    return picture(folder / name, size, mode)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reference": "gone.png"}, "gone.png does not exist"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": 5}, "the prompt is 5: write a text"),
        ({"image": None}, "no image"),
        ({"reference": ("wide.png", (96, 64), "RGB")}, "another shape"),
        ({"image": ("a.gif", (64, 64), "P")}, "GIF: save it as PNG"),
        ({"image": ("a.jpg", (64, 64), "CMYK")}, "CMYK"),
        ({"image": ("a16.png", (64, 64), "I;16")}, "more than 8 bits"),
        ({"image": ("huge.png", (30_000, 16), "L")}, "30,000 x 16 pixels"),
        ({"mask": ("wide.png", (96, 64), "L")}, "wide.png has 96 x 64 pixels and a.png 64 x 64"),
        ({"mask": ("black.png", (64, 64), "black")}, "black all over"),
    ],
)
def test_a_bad_pair_is_named_with_its_line_and_the_cure(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    made = {key: drawn(tmp_path, value) for key, value in change.items()}
    path = rows(tmp_path, pair(tmp_path), pair(tmp_path, **made))
    with pytest.raises(BadInput, match=r"1 of 2 pairs") as refused:
        read_pairs(path, 64)
    assert "line 2" in str(refused.value) and said in str(refused.value)
    assert len(read_pairs(path, 64, most_bad=1).trained) == 1


def test_a_cut_file_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    path = rows(tmp_path, pair(tmp_path))
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match="cut or damaged"):
        read_pairs(path, 64)


def test_what_is_no_file_is_refused_without_waiting_for_its_bytes(tmp_path: Path) -> None:
    path = rows(tmp_path, pair(tmp_path) | {"image": "/dev/zero"})
    with pytest.raises(BadInput, match=r"zero is cut or damaged \(not a regular file\)"):
        read_pairs(path, 64)


def test_a_photo_is_turned_and_transparency_is_white(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    for name in ("turned.jpg", "turned.png"):
        picture(tmp_path / name, (64, 32), exif=turned)
        assert size_of(tmp_path / name) == (32, 64)
    picture(tmp_path / "plain.png", (64, 32))
    with patch.object(PngImageFile, "load", side_effect=AssertionError):  # by its header alone
        assert size_of(tmp_path / "plain.png") == (64, 32)
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert cropped(tmp_path / "clear.png", (64, 64)).min() == 255


def test_two_layouts_in_one_folder_are_refused(tmp_path: Path) -> None:
    rows(tmp_path, pair(tmp_path))
    (tmp_path / "training_images").mkdir()
    with pytest.raises(BadInput, match=r"training_images/, pairs\.jsonl"):
        read_pairs(tmp_path, 64)


def test_a_caption_or_reference_that_is_missing_in_folders_is_named(tmp_path: Path) -> None:
    for stem in ("one", "two"):
        picture(tmp_path / "training_images" / f"{stem}.png")
    picture(tmp_path / "control_images" / "one.png")
    (tmp_path / "training_images" / "two.txt").write_text("x")
    with pytest.raises(BadInput, match=r"one\.txt is missing.*control_images/two\.\* is missing"):
        read_pairs(tmp_path, 64)


def test_pictures_in_folders_that_would_be_passed_over_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "training_images"
    for name in ("one.png", "one.jpg", "two.tiff"):
        picture(folder / name)
        (folder / name).with_suffix(".txt").write_text("x")
    with pytest.raises(BadInput, match=r"holds one\.jpg and one\.png, which are one name"):
        read_pairs(tmp_path, 64)
    (folder / "one.jpg").unlink()
    with pytest.raises(BadInput, match=r"two\.tiff is a TIFF: save it as PNG"):
        read_pairs(tmp_path, 64)


def test_a_mask_that_a_table_leaves_empty_is_none(tmp_path: Path) -> None:
    assert read_pairs(rows(tmp_path, pair(tmp_path, mask="")), 64).trained[0].mask is None


def test_a_misspelt_key_is_refused_and_others_are_passed_over(tmp_path: Path) -> None:
    good = pair(tmp_path, likes="9", control_1="b.png", reference=None)
    (found,) = read_pairs(rows(tmp_path, good), 64).trained
    assert len(found.references) == 1
    bad = {**pair(tmp_path), "refrence": "b.png"}
    del bad["reference"]
    with pytest.raises(BadInput, match="refrence is not read: call it reference"):
        read_pairs(rows(tmp_path, bad), 64)


def test_one_prompt_for_all_is_told(tmp_path: Path) -> None:
    found = read_pairs(rows(tmp_path, pair(tmp_path), pair(tmp_path)), 64)
    assert "all 2 pairs have one prompt" in found.notes[0]


def test_sizes_are_whole_tokens_of_about_one_area() -> None:
    for side in (64, 512, 1024):
        for width, height in buckets_of(side):
            assert width % MULTIPLE == height % MULTIPLE == 0
            assert 0.7 < width * height / side**2 < 1.3
    assert len(buckets_of(1024)) == 17
    assert bucket_for(4000, 3000, buckets_of(1024)) == (1184, 880)


def test_a_mask_weighs_tokens(tmp_path: Path) -> None:
    half = np.zeros((64, 64), dtype=np.uint8)
    half[:, 32:] = 255
    Image.fromarray(half).save(tmp_path / "half.png")
    weights = mask_weights(tmp_path / "half.png", (64, 64)).reshape(4, 4)
    assert weights[:, :2].max() == 0 and weights[:, 2:].min() == 1


def test_an_area_of_no_whole_tokens_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="1000 is no multiple of 16.*use 992"):
        validate({"image": {"size": 1000}})
