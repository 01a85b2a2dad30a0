"""Writes an adapter as a folder of its own, in peft's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluxtrain.exporting.adapter_config import CONFIG
from fluxtrain.exporting.source import WEIGHTS, AdapterSource
from fluxtrain.models.saving.beside import OF_TOKENIZERS, copy_beside, files_beside

_CARRIED = (*OF_TOKENIZERS, "generation_config")


def adapter_bytes(source: AdapterSource, dtype: torch.dtype | None) -> int:
    """Count the bytes of the adapter's tensors in a dtype (None: as they are)."""
    return sum(tensor.nbytes for tensor in _tensors(source, dtype)[0].values())


def write_adapter(
    source: AdapterSource, base: str, dtype: torch.dtype | None, tokenizer: Path | None, to: Path
) -> None:
    """Write weights, configuration and tokenizer to the folder `to`.

    base: name or folder of the base, as the configuration will say. tokenizer: a folder to take the
    tokenizer from where the adapter's own has none.
    """
    tensors, metadata = _tensors(source, dtype)
    save_file(tensors, to / WEIGHTS, metadata=metadata)
    told: dict[str, Any] = json.loads((source.folder / CONFIG).read_text(encoding="utf-8"))
    told["base_model_name_or_path"] = base
    text = json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (to / CONFIG).write_text(text, encoding="utf-8")
    for folder in (source.folder, *([tokenizer] if tokenizer else [])):
        if _copy_tokenizer(folder, to):
            return


def _tensors(
    source: AdapterSource, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(source.weights, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata() or {"format": "pt"})
    if dtype is not None:
        found = {n: t.to(dtype) if t.is_floating_point() else t for n, t in found.items()}
    return found, metadata


def _copy_tokenizer(folder: Path, to: Path) -> int:
    paths = [
        path
        for path in files_beside(folder)
        if path.relative_to(folder).as_posix().startswith(_CARRIED)
    ]
    for path in paths:
        copy_beside(path, folder, to)
    return len(paths)
