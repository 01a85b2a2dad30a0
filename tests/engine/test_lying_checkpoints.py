"""A checkpoint that lies is refused in words, and the one before it is taken.

Flipped bits are told by the hashes; values that cannot be, sealed again, by the values alone.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.checkpoint.checkpoint import list_checkpoints
from fluxtrain.checkpoint.newest import newest_resumable
from fluxtrain.data.batches import BatchSource
from fluxtrain.errors import BadInput
from tests.conftest import EXPLORES
from tests.engine.test_checkpoint_writer import (
    FakeData,
    FakeEngine,
    state_at,
    writer,
)
from tests.engine.test_foreign_checkpoints import (
    NEWEST,
    listed_again,
    resumed,
    sealed_again,
    two_checkpoints,
)

FLIPS = 5_000 if EXPLORES else 150


# --- flipped bits ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    two_checkpoints(root)
    return root


@given(data=st.data())
@settings(max_examples=FLIPS)
def test_a_flipped_bit_anywhere_costs_the_checkpoint_and_no_more(
    pristine: Path, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        shutil.copytree(pristine, root)
        path = data.draw(st.sampled_from(sorted((root / NEWEST).iterdir())))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
        harmed = bytes(content) != path.read_bytes()
        path.write_bytes(content)
        step, engine, warnings = resumed(root)
        assert step == (5 if harmed else 10)
        for name, tensors in FakeEngine(step).shards.items():
            assert torch.equal(engine.shards[name]["w"], tensors["w"])
        assert any(NEWEST in text and "damaged" in text for text in warnings) is harmed


def test_a_copy_beside_the_checkpoints_is_none_of_them(pristine: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(pristine, root)
    shutil.copytree(root / "step-00000005", root / "step-00000099")
    shutil.copytree(root / "step-00000005", root / "step-before")
    step, _, warnings = resumed(root)
    assert step == 10
    assert warnings == ["skipped a damaged checkpoint: step-00000099 holds step 5"]
    assert list_checkpoints(root)[0].name == "step-00000099"


# --- values that cannot be, under a right seal ----------------------------------------------------


STATES: list[tuple[str, Any, str]] = [
    ("losses", [math.nan], "not finite"),
    ("losses", [1.0] * 30, "more losses than steps"),
    ("trained_s", -1.0, "below zero"),
    ("trained_s", math.inf, "not finite"),
    ("total_tokens", -5, "below zero"),
    ("best_step", 99, "after its last step, 10"),
    ("best_loss", 1.0, "without its step"),
    ("stale_evaluations", -1, "below zero"),
    ("total_tokens", 10**40, "beyond all bounds"),
    ("trained_s", 1e308, "beyond all bounds"),
    ("skipped_in_a_row", 5, "more skipped steps"),
    ("skipped", 11, "more skipped steps"),
]


@pytest.mark.parametrize(("key", "value", "words"), STATES)
def test_a_progress_that_no_run_has_is_refused_for_the_one_before(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    two_checkpoints(tmp_path)
    content = json.loads((tmp_path / NEWEST / "trainer.json").read_text())
    content["run"][key] = value
    listed_again(tmp_path / NEWEST, "trainer.json", json.dumps(content).encode())
    step, _, warnings = resumed(tmp_path)
    assert step == 5
    assert any(NEWEST in text and words in text for text in warnings), warnings


@pytest.mark.parametrize("position", [625, -1, 10**6])
def test_a_generator_beyond_its_words_is_refused_and_never_read(
    tmp_path: Path, position: int
) -> None:
    two_checkpoints(tmp_path)
    content = json.loads((tmp_path / NEWEST / "trainer.json").read_text())
    content["random"]["numpy"][2] = position
    listed_again(tmp_path / NEWEST, "trainer.json", json.dumps(content).encode())
    step, _, warnings = resumed(tmp_path)
    assert step == 5
    assert any(f"at word {position}" in text for text in warnings), warnings


@pytest.mark.parametrize(
    ("generator", "at", "value", "words"),
    [
        ("numpy", 4, math.inf, "keeps inf"),
        ("numpy", 4, math.nan, "keeps nan"),
        ("python", 2, math.inf, "keeps inf"),
        ("python", 2, "x", "must be real number"),
        ("cuda", None, [7], "no texts"),
        ("cuda", None, "x", "no texts"),
    ],
)
def test_a_generator_that_keeps_what_none_does_is_refused(
    tmp_path: Path, generator: str, at: int | None, value: Any, words: str
) -> None:
    two_checkpoints(tmp_path)
    content = json.loads((tmp_path / NEWEST / "trainer.json").read_text())
    if at is None:
        content["random"][generator] = value
    else:
        content["random"][generator][at] = value
    listed_again(tmp_path / NEWEST, "trainer.json", json.dumps(content).encode())
    step, _, warnings = resumed(tmp_path)
    assert step == 5
    assert any(NEWEST in text and words in text for text in warnings), warnings


@pytest.mark.parametrize("change", ["swapped", "twice"])
def test_groups_that_have_each_others_files_are_refused(tmp_path: Path, change: str) -> None:
    two_checkpoints(tmp_path)
    manifest = json.loads((tmp_path / NEWEST / "manifest.json").read_text())
    shards = manifest["shards"]
    if change == "swapped":
        shards[0][1], shards[1][1] = shards[1][1], shards[0][1]
    else:
        shards[1][1] = shards[0][1]
    sealed_again(tmp_path / NEWEST, manifest)
    step, _, warnings = resumed(tmp_path)
    assert step == 5
    assert any(NEWEST in text and "as part" in text for text in warnings), warnings


def test_a_step_beyond_the_end_of_the_run_is_refused_with_the_cure(tmp_path: Path) -> None:
    made, _ = writer(tmp_path)
    for step in (20, 25):
        made.write(state_at(step), FakeEngine(step), FakeData())
    step, _, warnings = resumed(tmp_path)
    assert step == 20
    assert any("is of step 25 and the run ends at step 20: raise" in text for text in warnings)


def test_a_run_that_ends_before_all_its_checkpoints_is_told_so_and_of_no_damage(
    tmp_path: Path,
) -> None:
    made, _ = writer(tmp_path)
    for step in (24, 25):
        made.write(state_at(step), FakeEngine(step), FakeData())
    with pytest.raises(BadInput, match=r"step-00000024 is of step 24 .*: raise train\.steps"):
        resumed(tmp_path)


class FakeRows:
    """Seven rows, as far as a cursor asks."""

    packed, sequence_length = True, 8

    def __len__(self) -> int:
        return 7

    def fingerprint(self) -> str:
        return "seven"


@pytest.mark.parametrize(
    ("moved", "whole"),
    [
        ({}, True),
        ({"position": 6}, False),
        ({"position": 3.0}, False),
        ({"position": 3.5}, False),
        ({"epoch": 0}, False),
        ({"epoch": 10**30}, False),
        ({"epoch": True}, False),
        ({"position": 7}, False),
        ({"position": -1}, False),
        ({"epoch": -1}, False),
        ({"position": math.nan}, False),
        ({"position": None}, False),
    ],
)
def test_a_cursor_beyond_the_data_is_refused_for_the_one_before(
    tmp_path: Path, moved: dict[str, Any], whole: bool
) -> None:
    rows: Any = FakeRows()
    made, _ = writer(tmp_path)
    for step in (5, 10):
        source = BatchSource(rows, batch_rows=1)
        source._epoch, source._position = divmod(step, 7)
        made.write(state_at(step), FakeEngine(step), source)
    content = json.loads((tmp_path / NEWEST / "trainer.json").read_text())
    content["data"] |= moved
    listed_again(tmp_path / NEWEST, "trainer.json", json.dumps(content).encode())
    again, _ = writer(tmp_path)
    found = newest_resumable(tmp_path, print)
    assert found is not None
    source = BatchSource(rows, batch_rows=1)
    engine: Any = FakeEngine(99)
    assert again.resume(found, engine, source).step == (10 if whole else 5)
    expected = moved.get("position", 3) if whole else 5
    assert source.state_dict()["position"] == expected


class FakeScale:
    """What a checkpoint asks of a loss scale."""

    def __init__(self) -> None:
        from fluxtrain.updates.loss_scale import LossScale

        self._real = LossScale(torch.device("cpu"))
        self.state_dict, self.load_state_dict = self._real.state_dict, self._real.load_state_dict


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -2.0, 1e30])
def test_a_loss_scale_that_cannot_be_is_refused_for_the_one_before(
    tmp_path: Path, scale: float
) -> None:
    made, _ = writer(tmp_path)
    engine: Any = FakeEngine(1)
    engine.loss_scale = FakeScale()
    for step in (5, 10):
        made.write(state_at(step), engine, FakeData())
    content = json.loads((tmp_path / NEWEST / "trainer.json").read_text())
    content["loss_scale"]["scale"] = scale
    listed_again(tmp_path / NEWEST, "trainer.json", json.dumps(content).encode())
    again, told = writer(tmp_path)
    found = newest_resumable(tmp_path, print)
    assert found is not None
    assert again.resume(found, engine, FakeData()).step == 5
    assert any("loss scale" in event.text for event in told.events)


def test_where_all_lie_the_run_is_refused_with_code_2(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for path in list_checkpoints(tmp_path):
        content = json.loads((path / "trainer.json").read_text())
        content["run"]["losses"] = [math.inf]
        listed_again(path, "trainer.json", json.dumps(content).encode())
    with pytest.raises(BadInput, match="start again in another --run-dir") as refused:
        resumed(tmp_path)
    assert refused.value.exit_code == 2
