"""The live changes of a run: its facts, its engine and this machine's rates put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from fluxtrain.config.schema import RunConfig
from fluxtrain.hardware.gpu import Gpus
from fluxtrain.hardware.machine import read_machine
from fluxtrain.live.adviser import Setup
from fluxtrain.live.changes import LiveChanges
from fluxtrain.live.resettle import resettle
from fluxtrain.live.settings import LiveContext, LiveSettings, Use
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.step import cost
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.planning.prediction import Promise
from fluxtrain.reporting.announce import Announcer
from fluxtrain.trace.lanes import StepLanes

if TYPE_CHECKING:
    from fluxtrain.wrapping.engine import Engine


def live_changes(
    config: RunConfig,
    facts: ModelFacts,
    placement: Placement,
    engine: Engine,
    announcer: Announcer,
    rates: Rates | str,
    lanes: Callable[[], Sequence[StepLanes]] = tuple,
) -> LiveChanges:
    """What may change of a run that is placed and wrapped; `rates` as the plan has them, `lanes`
    those of the last steps."""
    has_gpu = engine.device.torch_device.type == "cuda"
    layout = replace(placement.layout, chunk_rows=engine.chunk_rows)
    placement = replace(placement, layout=layout)
    context = LiveContext(facts=facts, placement=placement, has_gpu=has_gpu)
    setup = Setup(
        context=context,
        passes=config.train.accumulation,
        clips=config.train.max_grad_norm is not None or facts.scales_its_loss,
        rates=None if isinstance(rates, str) else rates,
        lanes=lanes,
    )
    return LiveChanges(
        setup,
        announcer,
        partial(resettle, engine),
        chunk_rows=lambda: engine.chunk_rows,
        use=partial(_use, engine.device.torch_device),
        promise_of=partial(promise_of, setup),
    )


def promise_of(setup: Setup, context: LiveContext, settings: LiveSettings) -> Promise:
    """Predict what the run of `context` takes with `settings`."""
    placement = context.placement_with(settings)
    promise = Promise(
        device_bytes=placement.need.shown_device_bytes(has_gpu=context.has_gpu),
        host_bytes=placement.host_bytes,
    )
    if setup.rates is None or context.several_cards:  # `cost` knows one
        return promise
    clips = setup.clips or setup.passes > 1
    took = cost(context.facts, placement.layout, setup.rates, clips=clips, passes=setup.passes)
    return replace(promise, step_s=took.step_s, tokens_per_s=took.tokens_per_s, binds=took.binds)


def _use(device: torch.device) -> Use:
    no_gpus = Gpus(gpus=(), driver=None, reason="not asked")
    return Use(
        device_peak_bytes=(
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        ),
        host_available_bytes=read_machine(gpus=no_gpus).memory_available_bytes,
    )
