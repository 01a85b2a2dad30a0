"""Finds the adapter that a user means, and checks its files before anything large is read."""

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
from fluxtrain.events.run_folder.run_dir import RunDir, find_run
from fluxtrain.files.opening import refuse_foreign
from fluxtrain.methods.trained_on import TrainedOn, trained_on
from fluxtrain.models.model_files import safetensors_header
from fluxtrain.results.export.refusals import CONFIG, read_adapter_config
from fluxtrain.train.checkpoint.recovery import stored_config

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
        """The file of its tensors."""
        return self.folder / WEIGHTS


def find_adapter(named: str) -> AdapterSource:
    """Find and check the adapter of a run (its id, its folder, `last`) or in a folder.

    Raises BadInput where there is none, or its files are damaged.
    """
    folder, run = _located(named)
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


def _located(named: str) -> tuple[Path, RunConfig | None]:
    """Return the folder of an adapter, and the configuration of its run."""
    path = Path(named).expanduser()
    if (path / CONFIG).is_file():
        parent = RunDir(path.absolute().parent)
        is_of_run = parent.run.is_file() and parent.model == path.absolute()
        return path, stored_config(parent) if is_of_run else None
    if (path / "config.json").is_file():
        raise BadInput(
            f"{path} holds a complete model and no adapter ({CONFIG}): it is ready for use as it is"
        )
    if path.is_dir() and not RunDir(path).run.is_file():
        raise BadInput(
            f"{path} holds no adapter ({CONFIG}) and is no run: name a run, or the folder that "
            "peft's save_pretrained wrote"
        )
    run_dir = RunDir(find_run(named))
    config = stored_config(run_dir)
    full = config.method.name == "full"
    if not (run_dir.model / ("config.json" if full else CONFIG)).is_file():
        state = run_dir.summary().state
        raise BadInput(
            f"{run_dir.path} has saved no {'model' if full else 'adapter'} yet (it is {state}): a "
            "run saves it after its last step; go on with `fluxtrain train --resume "
            f"{run_dir.path}`"
        )
    if full:
        raise BadInput(
            f"{run_dir.path} has trained all weights, so there is no adapter: {run_dir.model} is "
            "the complete model"
        )
    return run_dir.model, config


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
