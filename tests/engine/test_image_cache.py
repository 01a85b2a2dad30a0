"""Images and prompts are encoded once: the next start, also after a kill, reads them."""

from __future__ import annotations

import errno
import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fluxtrain.config.schema import RunConfig, load_config
from fluxtrain.data.images.pairs import Pair, read_pairs
from fluxtrain.errors import BadInput, NoSpace, ReadFailed
from fluxtrain.methods.image import encoding
from fluxtrain.methods.image.adapter import find_layers
from fluxtrain.methods.image.encoding import Encodings, encode, encodings_of
from fluxtrain.methods.image.method import read_data
from fluxtrain.methods.method import method_of
from fluxtrain.models import loading
from fluxtrain.models.loading import ModelSource
from fluxtrain.models.pipeline import open_pipeline, open_transformer
from fluxtrain.train.placing.row_length import with_row_length
from tests.engine.images import PAIRS, Images

PICTURES, PROMPTS = 2 * PAIRS, 5  # four changes, and the empty prompt


def opened(images: Images, folder: Path, pipeline: Path | None = None) -> Encodings:
    return encodings_of(open_pipeline(str(pipeline or images.pipeline)), "float32", 16, str(folder))


def encoded(encodings: Encodings, pairs: tuple[Pair, ...]) -> tuple[int, int]:
    return encode(encodings, pairs, torch.device("cpu"), lambda _: None)


def test_the_second_start_encodes_nothing(images: Images, tmp_path: Path) -> None:
    pairs = read_pairs(images.data, 64).trained
    assert encoded(opened(images, tmp_path), pairs) == (PICTURES, PROMPTS)
    again = opened(images, tmp_path)
    assert encoded(again, pairs) == (0, 0)
    assert again.is_known(pairs[0].image, pairs[0].bucket)
    assert again.latents(pairs[0].image, pairs[0].bucket).shape == (4, 8, 8)
    words, pooled = again.prompt("")
    assert words.shape == (16, 32) and pooled.shape == (32,)


def test_a_start_that_was_killed_goes_on_where_it_was(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = read_pairs(images.data, 64).trained
    written: list[Path] = []

    def dies(path: Path, content: bytes, _: str) -> None:
        if len(written) == 7:
            raise KeyboardInterrupt
        written.append(path)
        path.write_bytes(content)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(encoding, "write_bytes", dies)
        encoded(opened(images, tmp_path), pairs)
    assert encoded(opened(images, tmp_path), pairs) == (PICTURES - 7, PROMPTS)


def test_on_a_full_disk_the_setting_that_moves_the_cache_is_named(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fluxtrain.files.atomic.replace_file", full)
    with pytest.raises(NoSpace, match=r"another disk with --set image\.cache=FOLDER"):
        encoded(opened(images, tmp_path), read_pairs(images.data, 64).trained)


def test_a_changed_image_and_another_vae_are_encoded_anew(images: Images, tmp_path: Path) -> None:
    data, pipeline, cache = tmp_path / "data", tmp_path / "pipeline", tmp_path / "cache"
    shutil.copytree(images.data, data)
    encoded(opened(images, cache), read_pairs(data, 64).trained)
    shutil.copy(data / "001-after.png", data / "000-after.png")
    shutil.copy(data / "001-before.png", data / "000-before.png")
    (data / "002-after.png").write_bytes((data / "002-before.png").read_bytes() + b"\0")
    changed = read_pairs(data, 64).trained
    assert encoded(opened(images, cache), changed) == (1, 0)

    shutil.copytree(images.pipeline, pipeline)
    weights = pipeline / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["decoder.conv_out.bias"] += 1
    save_file(tensors, weights)
    assert encoded(opened(images, cache, pipeline), changed)[0] > PICTURES - 3


@pytest.mark.parametrize("change", ["removed", "changed"])
def test_a_picture_that_changes_after_it_was_checked_is_not_encoded(
    images: Images, tmp_path: Path, change: str
) -> None:
    shutil.copytree(images.data, tmp_path / "data")
    pairs = read_pairs(tmp_path / "data", 64).trained
    path = tmp_path / "data" / "001-after.png"
    path.unlink()
    if change == "changed":
        shutil.copy(images.data / "002-after.png", path)
    with pytest.raises(ReadFailed, match=r"001-after\.png .* since the pairs were checked"):
        encoded(opened(images, tmp_path / "cache"), pairs)


def test_the_encoders_are_gone_before_the_transformer_comes(images: Images, tmp_path: Path) -> None:
    config, _ = with_row_length(load_config(images.config(tmp_path, image__cache=str(tmp_path))))
    found: list[str] = []

    def fits(*_: Any) -> None:
        found.append("the fit")
        kinds = {type(one).__name__ for one in gc.get_objects()}
        found.extend(kinds & {"AutoencoderKL", "CLIPTextModel", "T5EncoderModel"})

    method_of(config).load(config, fits, None, lambda _: None)
    assert found == ["the fit"]


def refused(images: Images, tmp_path: Path, **changes: Any) -> str:
    config: RunConfig = load_config(images.config(tmp_path, **changes))
    with pytest.raises(BadInput) as error:
        with_row_length(config)
    return str(error.value)


def test_a_folder_that_holds_only_the_transformer_is_named(images: Images, tmp_path: Path) -> None:
    shutil.copytree(images.pipeline / "transformer", tmp_path / "part" / "transformer")
    assert "lacks vae" in refused(images, tmp_path, model__path=str(tmp_path / "part"))
    (tmp_path / "part" / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    for path in images.pipeline.iterdir():
        if path.is_dir():
            shutil.copytree(path, tmp_path / "part" / path.name, dirs_exist_ok=True)
    assert "is a SanaPipeline" in refused(images, tmp_path, model__path=str(tmp_path / "part"))


def test_a_pipeline_on_a_hub_is_told_to_be_downloaded_whole(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    monkeypatch.setattr(loading, "_fetched", lambda *_: tmp_path)
    assert "hf download owner/kontext" in refused(images, tmp_path, model__path="owner/kontext")


def test_long_prompts_are_told(images: Images, tmp_path: Path) -> None:
    config = load_config(images.config(tmp_path, image__caption_tokens=8))
    rows = [
        {"image": str(images.data / f"00{number}-after.png"), "prompt": "make it red " * 700}
        for number in range(2)
    ]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = config.data.model_copy(update={"path": str(path)})
    found = read_data(config.model_copy(update={"data": data}))
    assert "2 prompts have more than 8 words" in found.notes[-1]


def test_settings_of_text_are_refused(images: Images, tmp_path: Path) -> None:
    assert "data.chat_template" in refused(images, tmp_path, data__chat_template="chatml")


def test_the_head_is_no_target(images: Images) -> None:
    source = ModelSource(path=str(images.pipeline))
    model = open_transformer(open_pipeline(source.path), source).model
    with pytest.raises(BadInput, match=r"'proj_out' also names proj_out.*single_transformer"):
        find_layers(model, ["proj_out"])
    with pytest.raises(BadInput, match="called 'q_proj'"):
        find_layers(model, ["q_proj"])
    assert find_layers(model, ["single_transformer_blocks.0.proj_out"])
    assert len(find_layers(model, "auto")) == 2 * 12 + 4 * 4
