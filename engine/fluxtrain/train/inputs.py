"""Load the inputs of a run: the model with its tokenizer, and the packed rows of its data.

What the plan found free on a GPU may be taken by another program while the weights are loaded. Then
all is loaded once more, from the files, and planned for what is free: the first weights may be half
on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from fluxtrain.config.schema import RunConfig
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.events import ChoiceMade
from fluxtrain.machine.failures import first_line
from fluxtrain.methods.method import method_of
from fluxtrain.methods.objective import Task
from fluxtrain.methods.text_task import Tell, TextTask, Waits, told_of_untrained_tokens
from fluxtrain.models.beside import CONFIG
from fluxtrain.models.copies import Copied
from fluxtrain.models.generation import stop_at
from fluxtrain.models.loading import LoadedModel
from fluxtrain.models.precision import Capability
from fluxtrain.plan.guard import DiskCapacity
from fluxtrain.train.checkpoint.randomness import seed_everything
from fluxtrain.train.placing.placing import RanOutLoading, card_capability
from fluxtrain.train.placing.preflight import refuse_before_loading
from fluxtrain.train.session import Session

Opened = TypeVar("Opened")
DEMO = "demo"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything read from files before training starts."""

    loaded: LoadedModel
    task: Task[Any]
    choices: tuple[ChoiceMade, ...] = ()  # what was chosen before anything was read


def load_inputs(
    config: RunConfig,
    fits: Callable[[PreTrainedModel, Copied], None] | None = None,
    capability: Capability | None = None,
    tell: Tell | None = None,
    waits: Waits | None = None,
    processes: int = 1,
) -> Inputs:
    """Read the model, and make the task of its method.

    `fits` is called before the weights are read. `capability` is the compute capability of the
    card, None without one; `tell` and `waits` are those of `Method.task`. A step has the batches of
    all `processes`.

    Raises:
        DoesNotFit: from `fits`.
        BadInput: the files need a repair, which the message names.
    """
    method = method_of(config)
    loaded = method.load(config, fits, capability, tell, waits)
    passes = {"accumulation": config.train.accumulation * processes}
    every = config.model_copy(update={"train": config.train.model_copy(update=passes)})
    return Inputs(loaded=loaded, task=method.task(every, loaded, tell, waits))


def told_of(inputs: Inputs, whole: bool) -> list[str]:
    """Return notes for a person before training, a sentence each.

    Makes generation stop at the ends that are trained on. `whole`: the model itself is saved at
    the end, not an adapter.
    """
    loaded, task = inputs.loaded, inputs.task
    told = [*task.notes("trained"), *told_of_folder(loaded, whole)]
    if not whole and isinstance(task, TextTask):
        told += told_of_untrained_tokens(loaded, task.data.trained)
    stopping = stop_at(loaded.model, loaded.tokenizer, task.ends, whole)
    return [*told, stopping] if stopping else told


def told_of_folder(loaded: LoadedModel, whole: bool) -> list[str]:
    """Return notes for a person on changes of a model's folder by training or saving."""
    told = []
    if loaded.beside.untied:
        told.append(
            f"config.json of {loaded.name} says embedding and head are one matrix "
            "(tie_word_embeddings), and its files hold two that differ: they are used as two"
            f"{', and saved with tie_word_embeddings = false' if whole else ''}; if they should "
            "be one, remove the head from the files"
        )
    if whole and loaded.lost:
        more = f" and {len(loaded.lost) - 1:,} more" if len(loaded.lost) > 1 else ""
        told.append(
            f"the saved model will lack {loaded.lost[0]}{more} of the files of {loaded.name}: "
            f"{type(loaded.model).__name__}, which is trained, does not use them; copy them from "
            "the original where they are needed, or train adapters (method.name=lora) and merge "
            "them, which keeps all"
        )
    kind = (loaded.beside.json(CONFIG) or {}).get("model_type")
    if not whole and kind is not None and kind != loaded.config.model_type:
        told.append(
            f"the adapter is of {type(loaded.model).__name__}, the text model of {loaded.name} "
            f"({kind}): programs that load the whole model know its layers by other "
            "names, so use `fluxtrain export --merge` for these"
        )
    return told


def ready_inputs(
    config: RunConfig,
    session: Session,
    disk: DiskCapacity,
    machine: Machine,
    device: ChoiceMade,
    chosen: tuple[ChoiceMade, ...],
) -> Inputs:
    """Load the inputs of a run, announced and prepared for its method."""
    seed_everything(config.train.seed)
    ranks = session.ranks
    fits = partial(refuse_before_loading, config, machine, device.value, disk, ranks)
    tell, waits = partial(session.announcer.phase, "loading"), session.disk.until_written
    capability = card_capability(device.value)
    inputs = load_inputs(config, fits, capability, tell, waits, ranks.world)
    for line in told_of(inputs, whole=config.method.name == "full"):
        session.announcer.warn(line)
    method_of(config).try_saving(inputs.loaded, session.run_dir.path)
    targets = method_of(config).prepare(inputs.loaded.model, config)
    return replace(inputs, choices=(*chosen, *targets))


def opened_once_more(opens: Callable[[], Opened], warn: Callable[[str], None]) -> Opened:
    """Return the model that `opens` loads; try once more, with a note, when device memory ran out
    while the weights were loaded.

    Raises RanOutLoading when that happens the second time too.
    """
    try:
        return opens()
    except RanOutLoading as error:
        first = first_line(error)
        error.with_traceback(None)  # its frames hold the model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warn(
        f"device memory ran out while the model was loaded ({first}): it is loaded again, planned "
        "for what is free now"
    )
    return opens()
