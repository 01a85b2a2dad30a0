"""A checkpoint that somebody else sealed again is taken whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fluxtrain
from fluxtrain.checkpoint.checkpoint import Damaged, read_checkpoint
from fluxtrain.checkpoint.newest import newest_resumable
from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.wrapping.engine import engine_of
from tests.conftest import MANY
from tests.engine.test_checkpoint_writer import FakeData, FakeEngine, state_at, writer

NEWEST = "step-00000010"


def sealed_again(path: Path, manifest: Any) -> None:
    """Write a manifest with the seal that anybody can make."""
    if isinstance(manifest, dict):
        manifest = {key: value for key, value in manifest.items() if key != "sha256"}
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def manifest_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


def listed_again(path: Path, name: str, content: bytes) -> None:
    """Put other content into a file, and its hash into the manifest."""
    (path / name).write_bytes(content)
    manifest = manifest_of(path)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    sealed_again(path, {**manifest, "files": {**manifest["files"], name: facts}})


def two_checkpoints(root: Path) -> None:
    """Write those of steps 5 and 10, of the same run."""
    made, _ = writer(root)
    for step in (5, 10):
        made.write(state_at(step), FakeEngine(step), FakeData())


def resumed(root: Path) -> tuple[int, FakeEngine, list[str]]:
    """Resume from the newest whole checkpoint: step, engine, warnings."""
    made, told = writer(root)
    warnings: list[str] = []
    found = newest_resumable(root, warnings.append)
    assert found is not None
    engine: Any = FakeEngine(99)
    state = made.resume(found, engine, FakeData())
    return state.step, engine, [*warnings, *(event.text for event in told.events)]


def lack_all(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "shards": []}


def lack_one(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "shards": manifest["shards"][:1]}


def one_twice(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "shards": [*manifest["shards"], manifest["shards"][0]]}


def other_names(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "shards": [[f"x{name}", file] for name, file in manifest["shards"]]}


def other_step(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "step": 7}


FORGERIES: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lack_all, lack_one, one_twice, other_names, other_step,
]  # fmt: skip


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_manifest_without_its_groups_is_skipped_in_words_for_the_one_before(
    tmp_path: Path, forge: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    two_checkpoints(tmp_path)
    sealed_again(tmp_path / NEWEST, forge(manifest_of(tmp_path / NEWEST)))
    step, engine, warnings = resumed(tmp_path)
    assert step == 5 and torch.equal(engine.shards["a"]["w"], FakeEngine(5).shards["a"]["w"])
    assert torch.equal(engine.shards["b.0"]["w"], FakeEngine(5).shards["b.0"]["w"])
    assert any(text.startswith(f"skipped a damaged checkpoint: {NEWEST}") for text in warnings)


def test_the_message_counts_the_groups_that_lack(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    sealed_again(tmp_path / NEWEST, lack_one(manifest_of(tmp_path / NEWEST)))
    made, _ = writer(tmp_path)
    with pytest.raises(Damaged, match="lacks 1 of the 2 groups of the model, first 'b.0'"):
        made.restore(read_checkpoint(tmp_path / NEWEST), FakeEngine(9), FakeData())


def test_where_none_is_whole_nothing_is_started_over(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for path in tmp_path.glob("step-*"):
        sealed_again(path, lack_all(manifest_of(path)))
    with pytest.raises(BadInput, match="all 2 checkpoints under .* are damaged"):
        resumed(tmp_path)


def test_a_checkpoint_that_the_user_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    sealed_again(tmp_path / NEWEST, lack_all(manifest_of(tmp_path / NEWEST)))
    named = replace(read_checkpoint(tmp_path / NEWEST), named=True)
    made, _ = writer(tmp_path)
    with pytest.raises(Damaged, match="lacks 2 of the 2 groups.*: name another checkpoint"):
        made.resume(named, FakeEngine(9), FakeData())


def test_the_best_checkpoint_must_be_whole_too(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    sealed_again(tmp_path / NEWEST, lack_all(manifest_of(tmp_path / NEWEST)))
    made, _ = writer(tmp_path)
    state = state_at(12)
    state.best_step = 10
    with pytest.raises(Damaged, match="lacks 2 of the 2 groups"):
        made.best(state, FakeEngine(9))


@pytest.mark.parametrize(
    "kind", ["folder", "manifest.json", "trainer.json", "shard-00000.safetensors"]
)
@pytest.mark.parametrize("odd", ["link", "pipe", "device"])
def test_a_link_or_a_pipe_in_a_checkpoint_is_damage(tmp_path: Path, kind: str, odd: str) -> None:
    two_checkpoints(tmp_path)
    path = tmp_path / NEWEST / ("" if kind == "folder" else kind)
    path.rename(aside := tmp_path / "aside")
    if odd == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(aside if odd == "link" else "/dev/zero")
    step, _, warnings = resumed(tmp_path)
    assert step == 5
    assert (odd == "link" and kind != "folder") <= bool(warnings)
    assert (aside / "manifest.json").exists() if kind == "folder" else aside.exists()


def test_every_group_of_an_engine_is_asked_for(tiny: Any) -> None:
    engine = engine_of(fluxtrain.wrap(tiny("llama")))
    assert engine.shard_names() == [name for name, _ in engine.state_shards()]
    assert len(engine.shard_names()) > 2


# --- whatever anybody may write -------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.sampled_from(["a", "b.0", "trainer.json", "shard-00000.safetensors", "../x", "/dev/zero"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """Replace, drop or add something anywhere in a JSON value."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    if not keys or draw(st.integers(0, 4)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(keys))
    made = dict(value) if isinstance(value, dict) else list(value)
    if draw(st.integers(0, 3)) == 0:
        del made[key]
    else:
        made[key] = draw(altered(value[key]))
    return made


def assert_whole_or_refused(root: Path) -> None:
    """Resuming gives the state of step 5 or 10, all of it, or is refused in words."""
    try:
        step, engine, _ = resumed(root)
    except FluxTrainError as error:
        assert error.exit_code == 2
        return
    assert step in (5, 10)
    for name, tensors in FakeEngine(step).shards.items():
        assert torch.equal(engine.shards[name]["w"], tensors["w"])


@given(data=st.data())
@settings(max_examples=MANY)
def test_any_manifest_with_a_right_seal_is_taken_whole_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        two_checkpoints(root := Path(folder))
        manifest = manifest_of(root / NEWEST)
        manifest.pop("sha256")
        sealed_again(root / NEWEST, data.draw(altered(manifest)))
        assert_whole_or_refused(root)


@given(data=st.data())
@settings(max_examples=MANY)
def test_any_trainers_state_with_a_right_hash_is_taken_whole_or_refused(
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        two_checkpoints(root := Path(folder))
        state = json.loads((root / NEWEST / "trainer.json").read_text())
        state["random"] = {}  # 20 kB of numbers: they would be altered all the time
        content = json.dumps(data.draw(altered(state))).encode()
        listed_again(root / NEWEST, "trainer.json", content)
        assert_whole_or_refused(root)
