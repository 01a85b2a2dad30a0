"""The live changes of a run: its facts, its engine and this machine's rates put together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from fluxtrain.hardware.gpu import Gpus
from fluxtrain.hardware.machine import read_machine
from fluxtrain.plan.cost import Rates
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.live import Ground, Use
from fluxtrain.plan.placement import RunPlacement
from fluxtrain.stream.resettle import resettle
from fluxtrain.train.adviser import Setup
from fluxtrain.train.announce import Announcer
from fluxtrain.train.config import RunConfig
from fluxtrain.train.live import LiveChanges
from fluxtrain.train.placing import eager

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine


def live_changes(
    config: RunConfig,
    facts: ModelFacts,
    placement: RunPlacement,
    engine: Engine,
    announcer: Announcer,
    rates: Rates | str,
) -> LiveChanges:
    """What may change of a run that is placed and wrapped; `rates` as the plan has them."""
    has_gpu = engine.device.torch_device.type == "cuda"
    ground = Ground(
        facts=facts,
        layout=Layout(
            offload=placement.offload,
            device_groups=placement.device_groups,
            resident_blocks=placement.resident_blocks,
            kept_blocks=placement.kept_blocks,
            batch_rows=placement.batch_rows,
            chunk_rows=engine.chunk_rows,
            accumulates=config.train.accumulation > 1,
            eager=eager(config, facts),
            boundaries=placement.boundaries,
        ),
        has_gpu=has_gpu,
        budget_bytes=placement.budget_bytes,
    )
    setup = Setup(
        ground=ground,
        passes=config.train.accumulation,
        clips=config.train.max_grad_norm is not None or facts.scales_its_loss,
        rates=None if isinstance(rates, str) else rates,
    )
    return LiveChanges(
        setup,
        announcer,
        partial(resettle, engine),
        chunk_rows=lambda: engine.chunk_rows,
        use=partial(_use, engine.device.torch_device),
    )


def _use(device: torch.device) -> Use:
    no_gpus = Gpus(gpus=(), driver=None, reason="not asked")
    return Use(
        device_peak_bytes=(
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        ),
        host_available_bytes=read_machine(gpus=no_gpus).memory_available_bytes,
    )
