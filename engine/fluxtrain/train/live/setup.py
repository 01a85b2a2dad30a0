"""The live changes of a run: its facts, its engine and this machine's rates put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fluxtrain.config.schema import RunConfig
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.trace.lanes import StepLanes
from fluxtrain.machine.machine import available_bytes
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import Rates
from fluxtrain.train.live.adviser import Setup
from fluxtrain.train.live.apply_placement import apply_placement
from fluxtrain.train.live.changes import LiveChanges
from fluxtrain.train.live.edit import MemoryInUse
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import LiveSettings
from fluxtrain.train.placing.prediction import Promise

if TYPE_CHECKING:
    from fluxtrain.core.wrap.engine import Engine


def live_changes(
    config: RunConfig,
    facts: ModelFacts,
    placement: Placement,
    engine: Engine,
    announcer: Announcer,
    rates: Rates | str,
    lanes: Callable[[], Sequence[StepLanes]] = tuple,
    run_times: float = 1.0,
    *,
    spill_folder: str | Path,
) -> LiveChanges:
    """Return the object that changes a placed and wrapped run. `rates` and `run_times` are the
    plan's, `lanes` those of the last steps; optimizer states that leave the host live in
    `spill_folder`."""
    if not placement.spill_folder:
        engine.spill.folder = Path(spill_folder)
    has_gpu = engine.device.torch_device.type == "cuda"
    layout = replace(placement.layout, chunk_rows=engine.chunk_rows)
    run = LiveRun(facts, replace(placement, layout=layout), has_gpu)
    setup = Setup(
        run=run,
        passes=config.train.accumulation,
        clips=config.train.max_grad_norm is not None or facts.scales_its_loss,
        rates=None if isinstance(rates, str) else rates,
        lanes=lanes,
        run_times=run_times,
    )
    return LiveChanges(
        setup,
        announcer,
        partial(apply_placement, engine),
        chunk_rows=lambda: engine.chunk_rows,
        memory=partial(_memory, [card.device.torch_device for card in engine.cards]),
        promise_of=partial(promise_of, setup),
    )


def promise_of(setup: Setup, run: LiveRun, settings: LiveSettings) -> Promise:
    """Predict the memory and seconds of the run with `settings`."""
    placement = run.placement_with(settings)
    promise = Promise(
        device_bytes=placement.need.shown_device_bytes(has_gpu=run.has_gpu),
        host_bytes=placement.host_bytes,
    )
    if setup.rates is None or run.cards > 1:  # the rates are those of one card
        return promise
    took = run.step(settings, setup.rates, clips=setup.clips, passes=setup.passes)
    return replace(
        promise,
        step_s=took.step_s * setup.run_times,
        tokens_per_s=took.tokens_per_s / setup.run_times,
        binds=took.binds,
    )


def _memory(devices: Sequence[torch.device]) -> MemoryInUse:
    on_gpus = all(device.type == "cuda" for device in devices)
    return MemoryInUse(
        device_peak_bytes=tuple(map(torch.cuda.max_memory_allocated, devices)) if on_gpus else None,
        host_available_bytes=available_bytes(),
    )
