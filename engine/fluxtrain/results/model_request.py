"""Finds the model that a user means, before anything large is read and before any hub is asked."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxtrain.config.schema import RunConfig
from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.run_dir import RunDir, find_run
from fluxtrain.models.model_files import is_pipeline
from fluxtrain.plan.states import PACKED_FORMATS, StorageFormat
from fluxtrain.results.adapter.chosen_base import UseRequest, refuse_unknown
from fluxtrain.results.from_checkpoint import RunCheckpoint, find_checkpoint
from fluxtrain.results.naming import is_run, refuse_missing
from fluxtrain.train.checkpoint.recovery import stored_config

if TYPE_CHECKING:
    from fluxtrain.results.adapter.source import AdapterSource

_ADAPTER = "adapter_config.json"
_CARD = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, kw_only=True)
class ModelRequest(UseRequest):
    """Any trained model as the command line names it, and where it computes."""

    cards: str | None = None  # how many GPUs, or their numbers such as 0,2; None: by need
    offload: str = "auto"
    budget_gib: float | None = None
    slots: int = 0  # for adapters that are mounted while it answers
    slot_rank: int = 64

    @property
    def slot_storage(self) -> StorageFormat:
        """How the frozen weights of a base with slots are stored."""
        found: StorageFormat = next((one for one in PACKED_FORMATS if one == self.packed), "plain")
        return found if self.slots else "plain"

    def check_values(self) -> None:
        """Raise BadInput for a value that is not known."""
        refuse_missing(self.named)
        super().check_values()
        refuse_unknown("--offload", self.offload, ("auto", "none", "weights", "max"))
        _ = self.wished_cards
        if self.slots < 0 or self.slot_rank < 1:
            raise BadInput(
                f"--slots is {self.slots} and --slot-rank {self.slot_rank}: use at least 0 and 1"
            )
        if self.budget_gib is not None and not self.budget_gib > 0:
            raise BadInput(f"--budget-gib is {self.budget_gib}: use more than 0, or leave it out")

    @property
    def wished_cards(self) -> int | tuple[int, ...] | None:
        """Return how many GPUs compute, or which; None: as few as hold the model, else all. Raises
        BadInput for neither."""
        if self.cards is None:
            return None
        parts = [part.strip() for part in self.cards.split(",")]
        if not all(map(_CARD.fullmatch, parts)) or parts == ["0"]:
            raise BadInput(
                f"--cards is {self.cards!r}: use how many GPUs, from 1, or their numbers with "
                "commas, such as 0,1; leave it out for as few as hold the model"
            )
        numbers = tuple(map(int, parts))
        return numbers if len(numbers) > 1 else numbers[0]


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model: a folder, a hub id or `demo`, or an adapter; and the run that trained it."""

    path: str
    adapter: AdapterSource | None = None
    run: RunConfig | None = None
    run_dir: Path | None = None
    checkpoint: RunCheckpoint | None = None  # with its trained weights, or its adapter

    @property
    def name(self) -> str:
        """Return the run and the step of its checkpoint, else the folder or the hub id."""
        if self.run_dir is None:
            return self.path
        step = f" at step {self.checkpoint.files.step}" if self.checkpoint is not None else ""
        return f"{self.run_dir.name}{step}"


def find_model(named: str, step: int | None = None) -> FoundModel:
    """Find a model's folder, an adapter, a run's result or a hub id by its name.

    A run that has saved no model has its newest checkpoint; with `step`, that of this step.
    Raises BadInput where a path does not exist, or a run has saved nothing.
    """
    refuse_missing(named)
    path = Path(named).expanduser()
    if is_run(named):
        return _of_run(RunDir(find_run(named)), step)
    if step is not None:
        raise BadInput(f"--step is of a run's checkpoints, and {named} is no run: leave it out")
    refuse_images(named, named)
    if (path / "config.json").is_file():
        return FoundModel(path=str(path), **_run_around(path))
    if (path / _ADAPTER).is_file():
        return _adapter(path, **_run_around(path))
    return FoundModel(path=named)


def refuse_images(model_path: str, named: str) -> None:
    """Raise BadInput where a model makes images, which text commands cannot use."""
    if is_pipeline(model_path):
        raise BadInput(
            f"{named} makes images: `fluxtrain sample RUN --reference FILE --prompt TEXT` uses "
            "its model, and `model/` in the run is what other programs load as it is"
        )


def _of_run(run_dir: RunDir, step: int | None) -> FoundModel:
    config = stored_config(run_dir)
    refuse_images(config.model.path, str(run_dir.path))
    whole = config.method.name == "full"
    if step is None and (run_dir.model / ("config.json" if whole else _ADAPTER)).is_file():
        if not whole:
            return _adapter(run_dir.model, run=config, run_dir=run_dir.path)
        return FoundModel(path=str(run_dir.model), run=config, run_dir=run_dir.path)
    checkpoint = find_checkpoint(run_dir, config, step)
    if checkpoint is None:
        summary = run_dir.summary()
        goes_on = f"go on with `fluxtrain train --resume {shlex.quote(str(run_dir.path))}`"
        if summary.message:  # the same settings end in the same way
            goes_on = f"it ended with: {summary.message}; cure that and {goes_on}"
        raise BadInput(
            f"{run_dir.path} has saved no model and no checkpoint yet (it is {summary.word()}): "
            f"{'wait for its first' if summary.state == 'running' else goes_on}"
        )
    path = str(checkpoint.files.path)
    return FoundModel(path=path, run=config, run_dir=run_dir.path, checkpoint=checkpoint)


def _adapter(folder: Path, run: RunConfig | None = None, run_dir: Path | None = None) -> FoundModel:
    from fluxtrain.results.adapter.source import read_adapter  # peft

    return FoundModel(path=str(folder), adapter=read_adapter(folder, run), run=run, run_dir=run_dir)


def _run_around(folder: Path) -> dict[str, Any]:
    """Return the run whose `model` folder this is, where it is one."""
    parent = RunDir(folder.absolute().parent)
    if not parent.run.is_file() or parent.model != folder.absolute():
        return {}
    return {"run": stored_config(parent), "run_dir": parent.path}
