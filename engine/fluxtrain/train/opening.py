"""Loads a model and makes the run of it; once more where the GPU's memory ran out meanwhile.

What the plan found free may have been taken by another program while the weights were loaded. The
second time the plan is made for what is free then, from the files again: the first one's weights
may be half on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from fluxtrain.checkpoint.checkpoint import Checkpoint
from fluxtrain.checkpoint.randomness import seed_everything
from fluxtrain.client.machine import Machine
from fluxtrain.config.schema import RunConfig
from fluxtrain.methods.method import method_of
from fluxtrain.planning.placing import RanOutLoading, card_capability
from fluxtrain.planning.preflight import refuse_before_loading
from fluxtrain.telemetry.events import ChoiceMade
from fluxtrain.train.inputs import load_inputs, told_of
from fluxtrain.train.session import Session

if TYPE_CHECKING:
    from fluxtrain.train.run import Run


def open_run(opens: Callable[[], Run], warn: Callable[[str], None]) -> Run:
    """Return the run that `opens` loads a model for; once more, and say so, when device memory ran
    out while the weights were loaded.

    Raises RanOutLoading when that happens the second time too.
    """
    try:
        return opens()
    except RanOutLoading as error:
        first = str(error).strip().splitlines()[0]
        error.with_traceback(None)  # its frames hold the model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warn(
        f"device memory ran out while the model was loaded ({first}): it is loaded again, planned "
        "for what is free now"
    )
    return opens()


def load_run(
    made: type[Run],
    config: RunConfig,
    session: Session,
    checkpoint: Checkpoint | None,
    machine: Machine,
    device: ChoiceMade,
    chosen: tuple[ChoiceMade, ...],
) -> Run:
    """Load the model and the data, and make the run of them. Raises RanOutLoading."""
    seed_everything(config.train.seed)
    fits = partial(refuse_before_loading, config, machine, device.value, made.files(session))
    tell, waits = partial(session.announcer.phase, "loading"), session.disk.until_written
    inputs = load_inputs(config, fits, card_capability(device.value), tell, waits)
    inputs = replace(inputs, choices=chosen)
    for line in told_of(inputs, whole=config.method.name == "full"):
        session.announcer.warn(line)
    method_of(config).try_saving(inputs.loaded)
    method_of(config).prepare(inputs.loaded.model, config)
    return made(config, inputs, session, checkpoint, machine, device)
