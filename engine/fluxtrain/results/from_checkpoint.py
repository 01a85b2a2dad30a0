"""Finds a run's checkpoint and loads what it holds: the weights of a model, or an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fluxtrain.config.schema import RunConfig
from fluxtrain.core.optimizer.state_shards import weights_of_shard
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.data.rendering.named import use_template
from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.cache import Damaged
from fluxtrain.files.temporary import temporary_folder
from fluxtrain.methods.method import method_of
from fluxtrain.models.copies import Copied
from fluxtrain.models.loading import LoadedModel, ModelSource, load_empty, load_model
from fluxtrain.train.checkpoint.checkpoint import (
    Checkpoint,
    list_checkpoints,
    read_checkpoint,
    step_folder,
)
from fluxtrain.train.checkpoint.newest import newest_resumable

if TYPE_CHECKING:  # peft is imported where there are adapters
    from fluxtrain.results.adapter.chosen_base import UseRequest
    from fluxtrain.results.adapter.source import AdapterSource


@dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """A checkpoint and the configuration of its run."""

    files: Checkpoint
    run: RunConfig

    @property
    def is_whole(self) -> bool:
        """Return whether it holds a whole model; else it holds an adapter."""
        return self.run.method.name == "full"

    def load(
        self, request: UseRequest, fits: Callable[[PreTrainedModel, Copied], None] | None = None
    ) -> LoadedModel:
        """Load the model with its trained weights, which stay mapped from the checkpoint's files.
        The base of an adapter is left without its weights.

        `fits` is that of `load_model`. Raises BadInput where the base is missing or another one.
        """
        run, weights = self.run, self._weights()
        stored = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        source = ModelSource(
            path=request.base or run.model.path,
            revision=None if request.base else run.model.revision,
            trust_remote_code=request.trust_remote_code,
            dtype=request.torch_name if self.is_whole and request.dtype != "auto" else stored,
            seed=run.train.seed,
        )
        try:
            loaded = load_model(source, fits) if self.is_whole else load_empty(source)
        except BadInput as error:
            raise BadInput(
                f"the base of {self.files.path} cannot be used: {error}; name its folder with "
                "--base"
            ) from error
        use_template(loaded.tokenizer, run.data.chat_template)
        settings = run.model.model_copy(update={"path": source.path})
        method_of(run).prepare(loaded.model, run.model_copy(update={"model": settings}))
        self._put_in(loaded.model, weights, source.path)
        content = self.files.trainer_state()
        for name, value in content.get("generation", {}).items():
            setattr(loaded.model.generation_config, name, value)
        return replace(loaded, base_key=content["fingerprint"].get("model.weights", ""))

    def save(self, request: UseRequest, folder: Path) -> LoadedModel:
        """Write the model or the adapter as the run saves it at its end; return the loaded one."""
        loaded = self.load(request)
        method_of(self.run).save(loaded, self.run.method, folder)
        return loaded

    @contextmanager
    def adapter(self, request: UseRequest) -> Iterator[AdapterSource]:
        """Write the adapter to a temporary folder, and read it from that."""
        from fluxtrain.results.adapter.source import read_adapter  # peft

        with temporary_folder("adapter", "the checkpoint's adapter") as made:
            self.save(request, folder := made / self.files.path.name)
            yield read_adapter(folder, self.run)

    def _weights(self) -> dict[str, Tensor]:
        """Return the trained weights by the names of their parameters, mapped from their files."""
        found: dict[str, Tensor] = {}
        for shard, tensors in self.files.load_shards():
            found |= weights_of_shard(shard, tensors)
        return found

    def _put_in(self, model: PreTrainedModel, weights: dict[str, Tensor], base: str) -> None:
        """Give trained parameters their weights, tied ones and those on the meta device too."""
        loose = {f"loose.{place}": name for place, (name, _) in enumerate(take_apart(model).loose)}
        parameters = dict(model.named_parameters())
        for key, weight in weights.items():
            name = loose.get(key, key)
            parameter = parameters.get(name)
            if parameter is None or parameter.shape != weight.shape:
                problem = "lacks" if parameter is None else "has in another shape"
                raise BadInput(
                    f"{base} is not the model that {self.files.path} was trained from: it "
                    f"{problem} {name}; name the right one with --base"
                )
            made = nn.Parameter(weight.to(parameter.dtype), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, made)


def find_checkpoint(run_dir: RunDir, run: RunConfig, step: int | None) -> RunCheckpoint | None:
    """Find the checkpoint of a step, or the newest whole one; None: the run has none.

    Raises BadInput where there is none of that step, or it is damaged.
    """
    if step is None:
        newest = newest_resumable(run_dir.checkpoints, lambda _: None)
        return None if newest is None else RunCheckpoint(files=newest, run=run)
    path = step_folder(run_dir.checkpoints, step)
    if not path.is_dir():
        there = [one.name.removeprefix("step-") for one in list_checkpoints(run_dir.checkpoints)]
        steps = ", ".join(str(int(digits)) for digits in reversed(there))
        raise BadInput(
            f"{run_dir.path} has no checkpoint of step {step} (it has {steps or 'none'}): name "
            "one of these with --step, or leave it out"
        )
    try:
        return RunCheckpoint(files=read_checkpoint(path), run=run)
    except Damaged as damage:
        raise Damaged(f"{damage}: name another --step, or leave it out") from None
