"""Frozen weights on disk on a GPU: the bits of a training that holds them in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import ReadFailed
from fluxtrain.plan import states
from fluxtrain.plan.states import StorageFormat
from tests.engine.test_weights_on_disk import KEY, LAYOUTS, bits, damaged, same, wrapped
from tests.gpu.exactly import exactly
from tests.packed_models import LEAST, trained

pytestmark = pytest.mark.gpu
WIDTH = 1024  # files of several blocks


@pytest.fixture(autouse=True)
def exact_and_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(states, "LEAST_PACKED", LEAST)
    with exactly():
        yield


@pytest.mark.parametrize("storage", ["nf4-double", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_has_the_bits_of_one_in_memory(
    tmp_path: Path, storage: StorageFormat, layout: str
) -> None:
    how = {"device": "cuda", "width": WIDTH, **LAYOUTS[layout]}
    base = wrapped(tmp_path / "a", storage, 0, **how)
    wanted = trained(base, steps=6)
    streamed = wrapped(tmp_path / "b", storage, 3, **how)
    assert trained(streamed, steps=6) == wanted
    assert same(bits(streamed), bits(base))
    assert engine_of(streamed).device.disk_read_bytes > 0


def test_a_damaged_file_ends_the_step_with_its_name(tmp_path: Path) -> None:
    model = wrapped(tmp_path, "nf4-double", 4, device="cuda", width=WIDTH)
    trained(model, steps=1)
    damaged(tmp_path / KEY)
    with pytest.raises(ReadFailed, match="not the bytes that were written"):
        trained(model, steps=2)
