"""Describes a model folder for people.

Reads through the trainer's own check of model files (standard library only: config.json and the
headers of the safetensors shards), so the wizard accepts and refuses exactly what the trainer
does, and the number of parameters is exact.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput
from fluxtrain.files.atomic import read_json
from fluxtrain.models.model_files import (
    ModelFiles,
    check_model_folder,
    is_pipeline,
    safetensors_header,
)
from fluxtrain.models.pipeline_files import check_pipeline, stated_license
from fluxtrain.units import bytes_text, count_text
from fluxtui.home import expanded, home_folder
from fluxtui.words import counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model as its folder describes it; None where the folder does not say."""

    architecture: str
    parameters: int | None
    dtype: str | None
    weight_bytes: int
    blocks: int | None
    hidden: int | None
    context: int | None
    license: str | None
    warnings: tuple[str, ...] = ()

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return name and value of every fact that the folder tells."""
        width = f" of width {self.hidden:,}" if self.hidden else ""
        weights = ", ".join(filter(None, (self.dtype, bytes_text(self.weight_bytes))))
        rows = (
            ("architecture", self.architecture),
            ("parameters", count_text(self.parameters) if self.parameters else "not known"),
            ("blocks", f"{self.blocks}{width}" if self.blocks else ""),
            ("weights", weights),
            ("context", counted(self.context, "token") if self.context else ""),
            ("license", self.license or "not stated"),
        )
        return tuple((name, value) for name, value in rows if value)


def read_model_folder(folder: str, trust_remote_code: bool = False) -> ModelDescription:
    """Describe a folder in the Hugging Face format without loading it.

    Raises:
        BadInput: whatever the trainer would refuse in its files.
    """
    if not folder.strip():
        raise BadInput("type the path of a folder that holds config.json and *.safetensors")
    path = Path(expanded(folder))
    try:
        if not path.exists():
            raise BadInput(f"{path} does not exist")
        if is_pipeline(str(path)):
            return _pipeline_facts(path)
        return _facts(path, check_model_folder(path, trust_remote_code))
    except OSError as error:
        raise BadInput(f"{error.filename or path} cannot be read: {error.strerror}") from None


def cached_hub_folder(hub_id: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the newest local snapshot of a hub model, if there is one."""
    home = Path(environment.get("HF_HOME") or home_folder(environment) / ".cache/huggingface")
    cache = Path(expanded(environment.get("HF_HUB_CACHE") or str(home / "hub")))
    snapshots = cache / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    folders = [path for path in snapshots.glob("*") if (path / "config.json").exists()]
    return max(folders, key=lambda path: path.stat().st_mtime, default=None)


def _facts(folder: Path, files: ModelFiles) -> ModelDescription:
    config = files.config
    inner = config.get("text_config")  # vision-language models keep the language part there
    shape = {**config, **inner} if isinstance(inner, dict) else config
    architectures = config.get("architectures") or [config["model_type"]]
    return ModelDescription(
        architecture=str(architectures[0]),
        parameters=files.parameters,
        dtype=files.dtype,
        weight_bytes=files.weight_bytes,
        blocks=_first_int(shape, "num_hidden_layers", "n_layer", "num_layers"),
        hidden=_first_int(shape, "hidden_size", "n_embd", "d_model"),
        context=_first_int(shape, "max_position_embeddings", "n_positions", "n_ctx"),
        license=str(config.get("license") or "") or stated_license(folder),
        warnings=_warnings(files),
    )


def _pipeline_facts(folder: Path) -> ModelDescription:
    """Describe the transformer of an image pipeline, the part that is trained."""
    pipeline = check_pipeline(folder)
    shape = read_json(folder / "transformer" / "config.json", follow=True) or {}
    tensors = [t for file in pipeline.weights for t in safetensors_header(file).values()]
    blocks = [shape.get(key) for key in ("num_layers", "num_single_layers")]
    heads, size = shape.get("num_attention_heads"), shape.get("attention_head_dim")
    dtypes = Counter(str(tensor["dtype"]) for tensor in tensors)
    return ModelDescription(
        architecture=f"{shape.get('_class_name', 'a transformer')}, learns from pairs of images",
        parameters=sum(prod(tensor["shape"]) for tensor in tensors),
        dtype=dtypes.most_common(1)[0][0] if dtypes else None,
        weight_bytes=sum(file.stat().st_size for file in pipeline.weights),
        blocks=sum(count for count in blocks if isinstance(count, int)) or None,
        hidden=heads * size if isinstance(heads, int) and isinstance(size, int) else None,
        context=None,
        license=stated_license(folder),
    )


def _warnings(files: ModelFiles) -> tuple[str, ...]:
    warnings = []
    if files.dtype == "float16":
        warnings.append(
            "fp16 weights are trained as bfloat16, on a card without it as fp16 with a loss scale"
        )
    if files.pickled:
        warnings.append("pickled weights: only tensors are accepted when they are loaded")
    return tuple(warnings)


def _first_int(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
