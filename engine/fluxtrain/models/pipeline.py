"""Reads the folder of an image pipeline as diffusers saves it, one part at a time.

The transformer's weights are mapped from their files, as those of language models are.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from fluxtrain.errors import BadInput, Disagrees
from fluxtrain.files.atomic import read_json
from fluxtrain.models.copies import Copied
from fluxtrain.models.demo_pipeline import demo_folder
from fluxtrain.models.export import save_folder
from fluxtrain.models.loading import EmptyModel, ModelSource, check_finite
from fluxtrain.models.model_files import IMAGE_DEMO, safetensors_header
from fluxtrain.models.pipeline_files import PipelineFolder, check_pipeline
from fluxtrain.models.precision import choose_dtype
from fluxtrain.models.quiet import quiet_diffusers
from fluxtrain.models.tensor_files import OF_TORCH, save_tensors

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def open_pipeline(path: str) -> PipelineFolder:
    """Check the parts of a pipeline; that of the demo is made. Raises BadInput."""
    if path == IMAGE_DEMO:
        _diffusers()
        return PipelineFolder(demo_folder() / "pipeline")
    found = check_pipeline(Path(path).expanduser())
    _diffusers()
    return found


def _diffusers() -> None:
    try:
        with quiet_diffusers():
            from diffusers import FluxKontextPipeline  # noqa: F401 - its imports write warnings
    except ImportError as error:
        raise BadInput(
            "training on images needs diffusers and Pillow: pip install 'fluxtrain[image]'"
        ) from error


def open_transformer(pipeline: PipelineFolder, source: ModelSource) -> EmptyModel:
    """Make the transformer without its weights, in the dtype of its training.

    Raises BadInput for files that are missing, damaged, or of another shape than their
    configuration.
    """
    folder = pipeline.folder / "transformer"
    headers = {file: safetensors_header(file) for file in pipeline.weights}
    stored = Counter(t["dtype"] for header in headers.values() for t in header.values())
    usual = _DTYPES.get(stored.most_common(1)[0][0], "other")
    precision = choose_dtype(source.dtype, usual, source.capability)
    with quiet_diffusers():
        model = _on_meta(folder).to(getattr(torch, precision.dtype))
    _check_shapes(folder, model, headers)
    converts = precision.dtype != usual
    copied = Copied(weights_bytes=sum(p.nbytes for p in model.parameters()) * converts)
    return EmptyModel(model=model, precision=precision, copied=copied, files=None)


def load_transformer(
    pipeline: PipelineFolder, empty: EmptyModel, *, packed_elements: int | None = None
) -> Any:
    """Load the transformer that `empty` describes on the CPU, its weights mapped from their files.

    Matrices of `packed_elements` and more are not read now. Raises BadInput for weights that are
    not finite.
    """
    folder = pipeline.folder / "transformer"
    model = _on_meta(folder)
    dtype = getattr(torch, empty.precision.dtype)
    tensors = {n: t.to(dtype) for file in pipeline.weights for n, t in load_file(file).items()}
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(True)
    check_finite(model, str(folder), packed_elements)
    return model.train()


def _on_meta(folder: Path) -> Any:
    settings = read_json(folder / "config.json", follow=True)
    if settings is None:
        raise BadInput(f"{folder / 'config.json'} is missing or no JSON: download it again")
    with quiet_diffusers(), torch.device("meta"):
        from diffusers import FluxTransformer2DModel

        try:
            return FluxTransformer2DModel.from_config(settings).train()
        except (TypeError, ValueError) as error:
            raise BadInput(f"{folder / 'config.json'} makes no FLUX model: {error}") from error


def _check_shapes(folder: Path, model: nn.Module, headers: dict[Path, dict[str, Any]]) -> None:
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    stored = {name: tuple(t["shape"]) for header in headers.values() for name, t in header.items()}
    wrong = [name for name in {**wanted, **stored} if wanted.get(name) != stored.get(name)]
    if wrong:
        name = wrong[0]
        raise BadInput(
            f"{folder}: {name} is {stored.get(name, 'missing')} in its files and "
            f"{wanted.get(name, 'unknown')} by its config.json, and {len(wrong) - 1} more differ: "
            "download the folder again"
        )


def save_compared(tensors: dict[str, torch.Tensor], path: Path, **metadata: str) -> None:
    """Write a file, read it again and compare. Raises Disagrees where they differ."""
    save_tensors(tensors, path, {**OF_TORCH, **metadata})
    again = load_file(path)
    for name, tensor in tensors.items():
        if not torch.equal(again[name], tensor):
            raise Disagrees(f"{path.name}: {name} is not what was written: check the disk")


def save_transformer(model: Any, pipeline: PipelineFolder, folder: Path) -> int:
    """Write `folder`/transformer, its tensors in files like those of `pipeline`, one file at a
    time; each is read again and compared. Returns the bytes written.

    Raises NoSpace, BadInput, or Disagrees where a file is not what was written.
    """
    state: dict[str, torch.Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    source = pipeline.folder / "transformer"

    def write(made: Path) -> None:
        (made / source.name).mkdir()
        for path in source.glob("*.json"):
            shutil.copyfile(path, made / source.name / path.name)
        for path in pipeline.weights:
            tensors = {n: state[n].cpu().contiguous() for n in safetensors_header(path)}
            save_compared(tensors, made / source.name / path.name)

    return save_folder(write, sum(tensor.nbytes for tensor in state.values()), folder)
