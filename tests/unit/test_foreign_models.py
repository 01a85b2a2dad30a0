"""A model's folder that was made elsewhere is checked without running, waiting or leaving it."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.errors import BadInput
from fluxtrain.models.model_files import check_model_folder
from tests.conftest import MANY

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8,
    "hidden_size": 4, "num_hidden_layers": 2, "text_config": {"num_hidden_layers": 2},
}  # fmt: skip
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
}
INDEX: dict[str, Any] = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
SECRET = "the secret of another folder"


def a_model(folder: Path, *, indexed: bool = False, header: Any = None) -> Path:
    """Write a sound model's folder, or one whose weights have another `header`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    raw = json.dumps(HEADER if header is None else header).encode()
    weights = struct.pack("<Q", len(raw)) + raw + bytes(32)
    (folder / ("model-1.safetensors" if indexed else "model.safetensors")).write_bytes(weights)
    if indexed:
        (folder / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    return folder


def test_a_sound_folder_and_one_of_the_hubs_cache_pass(tmp_path: Path) -> None:
    assert check_model_folder(a_model(tmp_path / "model", indexed=True)).parameters == 8
    blobs = a_model(tmp_path / "models--a--b" / "blobs")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1f0c"
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    assert check_model_folder(snapshot).parameters == 8
    (tmp_path / "named").symlink_to(snapshot)
    assert check_model_folder(tmp_path / "named").parameters == 8


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "new.py"])
def test_a_file_that_lies_elsewhere_is_refused_with_the_cure(tmp_path: Path, name: str) -> None:
    folder, elsewhere = a_model(tmp_path / "model"), a_model(tmp_path / "elsewhere")
    (elsewhere / "new.py").write_text("")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(elsewhere / name)
    with pytest.raises(BadInput, match="outside of the model's folder: put a copy"):
        check_model_folder(folder)


@pytest.mark.parametrize("base", ["/somewhere/else", "../base", "owner/name"])
@pytest.mark.parametrize("linked", [False, True])
def test_an_adapter_beside_a_model_is_refused_with_the_base_that_it_names(
    tmp_path: Path, base: str, linked: bool
) -> None:
    folder = a_model(tmp_path / "model")
    where = tmp_path / "elsewhere.json" if linked else folder / "adapter_config.json"
    where.write_text(json.dumps({"base_model_name_or_path": base}))
    if linked:
        (folder / "adapter_config.json").symlink_to(where)
    with pytest.raises(BadInput) as refused:
        check_model_folder(folder)
    assert linked or base in str(refused.value)


@pytest.mark.parametrize("part", ["", "text_config", "vision_config"])
def test_an_attention_kernel_of_the_hub_is_refused_in_every_part(tmp_path: Path, part: str) -> None:
    folder = a_model(tmp_path / "model")
    named = {"_attn_implementation": "owner/kernel"}
    config = {**CONFIG, **({part: named} if part else named)}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="wants to run an attention kernel from the hub"):
        check_model_folder(folder)
    check_model_folder(folder, trust_remote_code=True)


# --- whatever anybody may write -------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**66), 2**66), st.floats(), st.text(max_size=6),
    st.sampled_from(["../x", "/dev/zero", "model.safetensors", "F32", "BF16", "I8", "F4"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
    "model.safetensors.index.json", "adapter_config.json", "pytorch_model.bin", "inner/x.json",
)  # fmt: skip


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """Replace, drop or add something anywhere in a JSON value."""
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    keys = list(range(len(value))) if isinstance(value, list) else keys
    if not keys or draw(st.integers(0, 4)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(keys))
    made = dict(value) if isinstance(value, dict) else list(value)
    if draw(st.integers(0, 3)) == 0:
        del made[key]
    else:
        made[key] = draw(altered(value[key]))
    return made


def alter(draw: Any, folder: Path, outside: Path) -> None:
    """Put something else in the place of one file."""
    path = folder / draw(st.sampled_from(NAMES))
    kind = draw(st.sampled_from(["link", "dangling", "pipe", "folder", "bytes", "json", "gone"]))
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(draw(st.sampled_from([outside, "/dev/zero", "..", ".", path.name])))
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(draw(st.binary(max_size=40)))
    elif kind == "json":
        path.write_text(json.dumps(draw(VALUES)))


@given(data=st.data())
@settings(max_examples=MANY)
def test_any_folder_is_taken_or_refused_in_words_and_in_time(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        outside = Path(place) / "outside.json"
        outside.write_text(json.dumps({**CONFIG, "secret": SECRET}))
        header = data.draw(altered(HEADER)) if data.draw(st.booleans()) else HEADER
        folder = a_model(Path(place) / "model", indexed=data.draw(st.booleans()), header=header)
        for name, value in (("config.json", CONFIG), ("model.safetensors.index.json", INDEX)):
            if (folder / name).exists() and data.draw(st.booleans()):
                (folder / name).write_text(json.dumps(data.draw(altered(value))))
        if data.draw(st.booleans()):
            alter(data.draw, folder, outside)
        begun_s = time.monotonic()
        with contextlib.suppress(BadInput):
            found = check_model_folder(folder)
            assert SECRET not in json.dumps(found.config), "read through a link"
        assert time.monotonic() - begun_s < 20
