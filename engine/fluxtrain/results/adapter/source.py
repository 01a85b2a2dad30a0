"""Reads an adapter, and checks its files before anything large is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fluxtrain.config.schema import RunConfig
from fluxtrain.errors import BadInput
from fluxtrain.files.opening import refuse_foreign
from fluxtrain.methods.trained_on import TrainedOn, trained_on
from fluxtrain.models.model_files import safetensors_header
from fluxtrain.results.adapter.refusals import CONFIG, read_adapter_config

WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """An adapter in peft's format, and the run that trained it where that is known."""

    folder: Path
    config: Any  # peft's, of the adapter's own type
    trained_on: TrainedOn | None  # None: another program has trained it
    run: RunConfig | None

    @property
    def weights(self) -> Path:
        """Return the file of its tensors."""
        return self.folder / WEIGHTS


def read_adapter(folder: Path, run: RunConfig | None = None) -> AdapterSource:
    """Check the adapter in a folder, of a `run` where that is known.

    Raises BadInput where files are missing or damaged.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise _incomplete(folder, name)
    refuse_foreign(folder)
    tensors = safetensors_header(folder / WEIGHTS)
    return AdapterSource(
        folder=folder,
        config=read_adapter_config(folder, tensors),
        trained_on=trained_on(_checked_metadata(folder / WEIGHTS)),
        run=run,
    )


def _incomplete(folder: Path, name: str) -> BadInput:
    if name == WEIGHTS and (folder / _PICKLED).is_file():
        return BadInput(
            f"{folder / _PICKLED} is a pickle, which could run any code: load it with peft where "
            "you trust it, and save it again with save_pretrained"
        )
    return BadInput(f"{folder} lacks {name}: copy or download the adapter again")


def _checked_metadata(path: Path) -> Mapping[str, str] | None:
    """Return the file's metadata; raise BadInput for tensors that are not finite."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not _is_finite(tensor):
                    raise BadInput(
                        f"{path}: {name} holds NaN or infinity: its training diverged; use an "
                        "earlier one"
                    )
            found: Mapping[str, str] | None = file.metadata()
            return found
    except SafetensorError as error:
        raise BadInput(f"{path} is damaged ({error}): copy or download it again") from error


def _is_finite(tensor: Tensor) -> bool:
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch compares no 8 bits
    return bool(torch.isfinite(wide).all())
