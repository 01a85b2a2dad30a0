"""Weights whose header was damaged are loaded whole or refused in words, by the whole way from the
files to the model: never another exception. A tokenizer that aborts native code has words too."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluxtrain.errors import BadInput
from fluxtrain.models.loading import ModelSource, load_model
from tests.hostile import many

LIMIT_S = 20.0
BYTES = st.binary(min_size=1, max_size=8) | st.sampled_from(
    [b"0", b"9" * 8, b"-1", b"\x00", b"\xff\xff", b'"', b"{", b"}", b"]", b"F64", b"I8", b"1e9"]
)
DAMAGE = st.tuples(st.sampled_from(["replace", "insert", "remove", "length"]), st.floats(0, 1))


@pytest.fixture
def sound(model_folder: Callable[..., Path]) -> tuple[Path, bytes]:
    """A model's folder, and its weights as they were saved; of all examples of a test."""
    folder = model_folder()
    return folder, (folder / "model.safetensors").read_bytes()


def damaged(raw: bytes, kind: str, place: float, new: bytes) -> bytes:
    """Damage the header at a place, 0 its beginning and 1 its end."""
    (length,) = struct.unpack("<Q", raw[:8])
    if kind == "length":
        return (new + bytes(8))[:8] + raw[8:]
    at = 8 + int(place * (length - 1))
    behind = at if kind == "insert" else at + len(new)
    put = b"" if kind == "remove" else new
    header = raw[8:at] + put + raw[min(behind, 8 + length) : 8 + length]
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


@many
@given(st.lists(st.tuples(DAMAGE, BYTES), min_size=1, max_size=3))
@example([(("length", 0.0), b"\xff" * 8)])
def test_a_damaged_header_is_loaded_or_refused_in_words(
    sound: tuple[Path, bytes], damages: list[tuple[tuple[str, float], bytes]]
) -> None:
    folder, raw = sound
    for (kind, place), new in damages:
        if struct.unpack("<Q", raw[:8])[0] < len(raw):
            raw = damaged(raw, kind, place, new)
    (folder / "model.safetensors").write_bytes(raw)
    began_s = time.monotonic()
    try:
        loaded = load_model(ModelSource(path=str(folder)))
    except BadInput as error:
        assert str(folder) in str(error)
    else:
        assert sum(one.numel() for one in loaded.model.parameters()) > 0
    assert time.monotonic() - began_s < LIMIT_S
