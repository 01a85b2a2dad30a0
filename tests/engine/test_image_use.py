"""Around an image run: its plan without logits, its inspection, and images of its model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.commands.pairs_inspection import inspect_pairs, license_of
from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import load_config
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.machine_file import PlannedMachine, read_machine_file
from fluxtrain.results.image_sampling import SampleRequest, sample
from fluxtrain.results.model_request import find_model
from fluxtrain.units import GIB
from tests.engine.images import PAIRS, Images
from tests.engine.runs import run

Image = pytest.importorskip("PIL.Image")
# the real transformer
KONTEXT = {
    "_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "guidance_embeds": True,
    "in_channels": 64, "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19,
    "num_single_layers": 38, "patch_size": 1, "pooled_projection_dim": 768,
}  # fmt: skip


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.thinned(1)
def test_a_runs_model_makes_images_from_a_picture_and_words(
    images: Images, tmp_path: Path, method: str
) -> None:
    run(images.config(tmp_path, method__name=method), tmp_path / "run")
    request = SampleRequest(
        run=str(tmp_path / "run"), prompt="make it red", reference=images.data / "000-before.png",
        to=tmp_path / "made.png", steps=2, device="cpu",
    )  # fmt: skip
    torch.backends.cuda.enable_cudnn_sdp(True)
    found = sample(request, lambda _: None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    first = (tmp_path / "made.png").read_bytes()
    assert (found.width, found.height) == (64, 64)
    sample(request, lambda _: None)
    assert (tmp_path / "made.png").read_bytes() == first
    sample(replace(request, reference=None), lambda _: None)
    assert (tmp_path / "made.png").read_bytes() != first
    with pytest.raises(BadInput, match="gone.png does not exist"):
        sample(replace(request, reference=tmp_path / "gone.png"), lambda _: None)
    cut = tmp_path / "cut.png"
    picture = (images.data / "000-before.png").read_bytes()
    cut.write_bytes(picture[: len(picture) // 2])
    with pytest.raises(BadInput, match=r"cut\.png is cut or damaged"):
        sample(replace(request, reference=cut), lambda _: None)
    with pytest.raises(BadInput, match="makes images: `fluxtrain sample"):
        find_model(str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(BadInput, match="has saved no model yet"):
        sample(request, lambda _: None)


def test_the_plan_counts_the_tokens_of_both_images(images: Images, tmp_path: Path) -> None:
    config = load_config(images.config(tmp_path))
    plan = preview(config, machine(tmp_path, 64))
    assert plan.sequence_length == 16 + 2 * 16
    assert plan.estimated_rows == PAIRS - 1 and not plan.rows_estimated


def test_a_model_of_images_is_not_sharded(images: Images, tmp_path: Path) -> None:
    asked = {"parallel__mode": "fsdp", "parallel__processes": 2, "train__batch_rows": 2}
    with pytest.raises(BadInput, match="shards language models: for one of images leave it out"):
        preview(load_config(images.config(tmp_path, **asked)))


def test_inspecting_draws_a_contact_sheet(images: Images, tmp_path: Path) -> None:
    found = inspect_pairs(load_config(images.config(tmp_path)), whole=True)
    assert (found.pairs, found.held_out, found.sizes) == (PAIRS - 1, 1, {"64x64": PAIRS})
    with Image.open(found.contact_sheet) as sheet:
        assert sheet.size == (2 * 192, 8 * 192)
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: flux-1-dev-non-commercial\n---"
    )
    assert "no commercial use" in license_of(tmp_path)


@pytest.mark.parametrize("whole", [False, True])
def test_inspecting_names_a_cut_file_with_its_line(
    images: Images, tmp_path: Path, whole: bool
) -> None:
    shutil.copytree(images.data, tmp_path / "data")
    with Image.open(tmp_path / "data" / "002-after.png") as picture:
        picture.save(tmp_path / "data" / "cut.jpg")
    content = (tmp_path / "data" / "cut.jpg").read_bytes()
    (tmp_path / "data" / "cut.jpg").write_bytes(content[: len(content) * 3 // 4])
    path = str(tmp_path / "data" / "pairs.jsonl")
    rows = Path(path).read_text()
    Path(path).write_text(rows.replace("002-after.png", "cut.jpg"))
    with pytest.raises(BadInput, match=r"line 3: cut.jpg is cut or damaged"):
        inspect_pairs(load_config(images.config(tmp_path, data__path=path)), whole)
    allowed = images.config(tmp_path, data__path=path, data__max_bad_rows=1)
    assert sum(inspect_pairs(load_config(allowed), whole).sizes.values()) == PAIRS - 1


def machine(folder: Path, host_gib: float) -> PlannedMachine:
    rates = {"gpu_matmul": 1.5e14, "adamw": 1.5e9, "h2d_pinned": 2.4e10, "d2h_pinned": 2.4e10}
    gpus = [{"name": "card", "memory_total_bytes": 24 * GIB}]
    told = {"machine": {"memory_total_bytes": host_gib * GIB, "gpus": gpus}, "rates": rates}
    (folder / "machine.json").write_text(json.dumps(told))
    return read_machine_file(folder / "machine.json")


def real_size(images: Images, folder: Path) -> Path:
    """A pipeline whose transformer has the real shape, in a file of nothing but a header."""
    from diffusers import FluxTransformer2DModel

    made = folder / "kontext"
    shutil.copytree(images.pipeline, made)
    shutil.rmtree(made / "transformer")
    (made / "transformer").mkdir()
    (made / "transformer" / "config.json").write_text(json.dumps(KONTEXT))
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel.from_config(KONTEXT)
    header: dict[str, Any] = {}
    end = 0
    for name, parameter in model.named_parameters():
        start, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": [*parameter.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (made / "transformer" / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return made


def test_the_real_model_is_planned_as_lora_and_refused_as_full_with_the_cure(
    images: Images, tmp_path: Path
) -> None:
    path = str(real_size(images, tmp_path))
    large = {"model__path": path, "image__size": 1024, "image__caption_tokens": 512}
    lora = load_config(images.config(tmp_path, **large, train__batch_rows=1))
    plan = preview(lora, machine(tmp_path, 64))
    assert plan.model.parameters - plan.method.trained_parameters == 11_901_408_320
    assert plan.model.blocks == 57
    assert plan.sequence_length == 512 + 2 * 4096
    assert plan.device_bytes is not None and plan.device_bytes < 24 * GIB
    full = load_config(images.config(tmp_path, **large, train__batch_rows=1, method__name="full"))
    with pytest.raises(DoesNotFit, match=r"method\.name=lora") as refused:
        preview(full, machine(tmp_path, 64))
    assert refused.value.exit_code == 3
