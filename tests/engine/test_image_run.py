"""Image editing through the trainer: pairs, flow matching, checkpoints, files others load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fluxtrain.config.schema import image_demo_config, load_config
from fluxtrain.errors import BadInput, ReadFailed
from fluxtrain.events import events as ev
from fluxtrain.events.run_folder.removal import contents
from fluxtrain.models.quiet import quiet_diffusers
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.run import Run, train
from tests.engine.images import Images
from tests.engine.runs import losses, of, run, told
from tests.engine.test_disk_run import after

Image = pytest.importorskip("PIL.Image")

LORA = "pytorch_lora_weights.safetensors"


def pipeline_of(images: Images, **parts: Any) -> Any:
    with quiet_diffusers():
        from diffusers import FluxKontextPipeline

        return FluxKontextPipeline.from_pretrained(images.pipeline, local_files_only=True, **parts)


def sample(pipeline: Any, images: Images) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    made: torch.Tensor = pipeline(
        image=Image.open(images.data / "000-before.png"), prompt="invert the colors",
        height=64, width=64, max_area=64 * 64, _auto_resize=False, max_sequence_length=16,
        num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt",
    ).images  # fmt: skip
    return made


def test_an_adapter_is_the_same_in_a_plain_pipeline_with_twice_its_rank_as_alpha(
    images: Images, tmp_path: Path
) -> None:
    found: list[torch.Tensor] = []

    class Sampled(Run):
        def finish(self) -> None:
            super().finish()
            self.model.eval()
            found.append(sample(pipeline_of(images, transformer=self.model), images))

    config = load_config(images.config(tmp_path))
    train(config, locate(None, tmp_path / "run", config), kind=Sampled)
    plain = pipeline_of(images)
    base = sample(plain, images)
    plain.load_lora_weights(tmp_path / "run" / "model" / LORA)
    for parameter in plain.transformer.parameters():
        parameter.data = parameter.data.clone()  # mapped weights are not aligned, which rounds
    assert torch.equal(sample(plain, images), found[0])
    assert not torch.equal(found[0], base)
    evaluation = told(tmp_path / "run", ev.EvaluationFinished)[-1]
    assert evaluation.loss < losses_at_start(tmp_path / "run")


def test_samples_are_pictures_in_the_run_and_change_no_loss(images: Images, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = images.config(tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    without = losses(run(config, tmp_path / "without"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    made = ["image.samples=1", "image.sample_steps=2", "samples.every=3"]
    made += ["trackers.report_to=[tensorboard]"]
    events = run(config, tmp_path / "run", *made)
    found = of(ev.SampleGenerated, events)
    assert losses(events) == without
    assert [sample.step for sample in found] == [0, 3, 6]
    for sample in found:
        with Image.open(tmp_path / "run" / sample.path) as picture:
            assert picture.size == (3 * 64, 64)  # reference, made, target
    assert not contents(tmp_path / "run").others  # deleting the run deletes them
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Images("samples/1")
    assert [(one.step, one.width, one.height) for one in shown] == [
        (step, 3 * 64, 64) for step in (0, 3, 6)
    ]


@pytest.mark.slow
def test_the_demos_held_out_loss_falls_by_a_fifth(tmp_path: Path) -> None:
    config = image_demo_config(["train.evaluate_every=1", "image.sample_steps=2"])
    train(config, locate(None, tmp_path / "run", config))
    found = told(tmp_path / "run", ev.EvaluationFinished)
    assert found[-1].loss < 0.8 * found[0].loss
    assert len(list((tmp_path / "run" / "samples").glob("*.png"))) == 2 * 4


def losses_at_start(run_dir: Path) -> float:
    return float(told(run_dir, ev.StepFinished)[0].loss)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.thinned(1)
def test_a_run_that_was_cut_goes_on_with_the_same_losses(
    images: Images, tmp_path: Path, method: str
) -> None:
    config = images.config(tmp_path, method__name=method, image__caption_dropout=0.4)
    whole = losses(run(config, tmp_path / "whole"))
    run(config, tmp_path / "cut", "train.checkpoint_every=3")
    kept = tmp_path / "cut" / "checkpoints" / "step-00000003"
    events = run(config, tmp_path / "cut", resume=str(kept))
    assert losses(events)[-3:] == whole[3:]
    saved = [
        {p.name: load_file(p) for p in (tmp_path / name / "model").rglob("*.safetensors")}
        for name in ("whole", "cut")
    ]
    assert list(saved[0]) == list(saved[1]) != []
    for name, tensors in saved[0].items():
        assert all(torch.equal(saved[1][name][key], tensor) for key, tensor in tensors.items())


def test_a_mask_that_is_gone_while_it_trains_ends_with_the_way_on(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(images.data, tmp_path / "data")
    mask, pairs = tmp_path / "data" / "mask.png", tmp_path / "data" / "pairs.jsonl"
    Image.new("L", (64, 64), 255).save(mask)
    rows = [json.loads(line) | {"mask": mask.name} for line in pairs.read_text().splitlines()]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    after(4, mask.unlink, monkeypatch)
    config = images.config(tmp_path, data__path=str(pairs), train__checkpoint_every=3)
    with pytest.raises(ReadFailed, match=r"mask\.png cannot be read.*--resume"):
        run(config, tmp_path / "run")


def test_a_run_does_not_go_on_beside_another_vae(images: Images, tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    shutil.copytree(images.pipeline, pipeline)
    config = images.config(tmp_path, model__path=str(pipeline))
    run(config, tmp_path / "run", "train.checkpoint_every=3")
    weights = pipeline / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["encoder.conv_out.bias"] += 1
    save_file(tensors, weights)
    kept = tmp_path / "run" / "checkpoints" / "step-00000003"
    with pytest.raises(BadInput, match="other pairs, sizes, encoders"):
        run(config, tmp_path / "run", resume=str(kept))


def test_a_fully_trained_transformer_is_loaded_by_diffusers(images: Images, tmp_path: Path) -> None:
    run(images.config(tmp_path, method__name="full"), tmp_path / "run")
    with quiet_diffusers():
        from diffusers import FluxTransformer2DModel

        model = FluxTransformer2DModel.from_pretrained(tmp_path / "run" / "model" / "transformer")
    before = load_file(images.pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    after = model.state_dict()
    assert set(before) == set(after)
    assert not torch.equal(after["proj_out.weight"], before["proj_out.weight"])
