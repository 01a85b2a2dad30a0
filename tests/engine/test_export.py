"""A saved model loads anywhere and is the same; a failed save leaves what was there."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import SafetensorError

from fluxtrain.errors import EXIT_NO_SPACE, BadInput, NoSpace
from fluxtrain.files import atomic
from fluxtrain.models.export import save_model
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model

Folder = Callable[..., Path]
FAMILIES = ("llama", "qwen2", "gpt2")
IDS = torch.arange(1, 33)[None]


def _loaded(folder: Path) -> LoadedModel:
    return load_model(ModelSource(path=str(folder)))


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_with_every_bit(
    model_folder: Folder, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    loaded = _loaded(model_folder(family, dtype))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.01)  # trained a little
    written_bytes = save_model(loaded.model, loaded.tokenizer, tmp_path / "run" / "model")
    assert written_bytes == sum(p.stat().st_size for p in (tmp_path / "run/model").iterdir())
    again = _loaded(tmp_path / "run" / "model")
    assert again.model.dtype == dtype
    before, after = loaded.model.state_dict(), again.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert again.model.generation_config.eos_token_id == 0
    assert again.tokenizer.chat_template == loaded.tokenizer.chat_template


def test_parameters_that_are_views_of_an_arena_are_saved_as_themselves(
    model_folder: Folder, tmp_path: Path
) -> None:
    loaded = _loaded(model_folder("llama"))
    expected = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    memory = [bytearray(p.nbytes) for p in loaded.model.parameters()]
    for parameter, place in zip(loaded.model.parameters(), memory, strict=True):
        view = torch.frombuffer(place, dtype=parameter.dtype).view(parameter.shape)
        parameter.data = view.copy_(parameter.data)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "model")
    saved = _loaded(tmp_path / "model").model.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_a_second_save_replaces_the_first_and_leaves_nothing_beside_it(
    model_folder: Folder, tmp_path: Path
) -> None:
    loaded = _loaded(model_folder())
    folder = tmp_path / "run" / "model"
    save_model(loaded.model, loaded.tokenizer, folder)
    (folder / "old-shard.safetensors").write_text("stale")
    with torch.no_grad():
        next(loaded.model.parameters()).zero_()
    save_model(loaded.model, loaded.tokenizer, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert not (folder / "old-shard.safetensors").exists()
    assert not next(_loaded(folder).model.parameters()).any()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~atomic._umask()


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_that_is_too_small_is_told_before_writing(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = _loaded(model_folder())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10**6, 10**6, 4096))
    with pytest.raises(NoSpace, match="and 4.00 KiB is free") as caught:
        save_model(loaded.model, loaded.tokenizer, tmp_path / "model")
    assert caught.value.exit_code == EXIT_NO_SPACE
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_saving_leaves_the_earlier_model(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    loaded = _loaded(model_folder())
    folder = tmp_path / "run" / "model"
    save_model(loaded.model, loaded.tokenizer, folder)
    before = _contents(folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(loaded.tokenizer, "save_pretrained", full)
    with pytest.raises(NoSpace, match="no space left while saving"):
        save_model(loaded.model, loaded.tokenizer, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert _contents(folder) == before


@pytest.mark.parametrize("raised", [SafetensorError, Exception])  # tokenizers raise that one
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, BadInput)],
)
def test_what_the_writer_of_weights_tells_of_the_disk_is_understood(
    model_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[Exception],
    raised: type[Exception],
) -> None:
    loaded = _loaded(model_folder())
    said = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"

    def full(*_: Any, **__: Any) -> None:
        raise raised(said)

    monkeypatch.setattr(loaded.model, "save_pretrained", full)
    with pytest.raises(kind):
        save_model(loaded.model, loaded.tokenizer, tmp_path / "model")
    assert list(tmp_path.glob("*model*")) == []


def test_a_place_that_cannot_be_written_is_told(model_folder: Folder, tmp_path: Path) -> None:
    loaded = _loaded(model_folder())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match="cannot be written"):
        save_model(loaded.model, loaded.tokenizer, tmp_path / "file" / "model")
