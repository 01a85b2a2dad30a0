"""Check that a run fits before anything is written: host memory, disk, page locks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from fluxtrain.config.schema import RunConfig
from fluxtrain.core.memory.mapped import cool, copied_bytes
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.events import ChoiceMade
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.machine.disk import read_disk
from fluxtrain.measure.measured_constants import Constants
from fluxtrain.methods.method import method_of
from fluxtrain.models.copies import Copied
from fluxtrain.models.loading import LoadedModel
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import (
    Layout,
    by_tier,
    rows_of_table,
    spill_bytes,
    weights_on_host_bytes,
)
from fluxtrain.plan.guard import (
    EVERY_CHECKPOINT,
    DiskCapacity,
    HostNeed,
    disk_need,
    loading_bytes,
    parameters_of,
    refuse_disk,
    refuse_host,
    refuse_spill,
)
from fluxtrain.plan.placement import Placement
from fluxtrain.train.placing.placing import adapters_as_cure, decide, model_facts_for
from fluxtrain.train.placing.sharded import NOT_TIMED, plan_sharded, sharding_of
from fluxtrain.units import bytes_text, duration_text, rate_text

if TYPE_CHECKING:
    from fluxtrain.core.wrap.engine import Engine

CROSSINGS = 1.5  # of a byte a step: weights are uploaded twice, gradients downloaded once


def refuse_what_does_not_fit(
    config: RunConfig,
    facts: ModelFacts,
    placement: Placement,
    copied: Copied,
    available_bytes: int | None,
    disk: DiskCapacity,
) -> None:
    """Refuse a placed run that host memory or the disk cannot hold.

    `available_bytes` is the free host memory if nothing of the model were loaded.

    Raises:
        DoesNotFit: says what the run needs and what there is.
    """
    steps = config.train.steps or 0
    files = disk_need(
        facts,
        model_bytes=method_of(config).saved_bytes(facts),
        kept=config.train.checkpoints_kept,
        written=checkpoints_written(config, steps),
        steps=steps,
    )
    need = HostNeed(
        lasting_bytes=placement.need.host_bytes,
        loading_bytes=loading_bytes(
            facts,
            placement.layout,
            copied_bytes=copied.weights_bytes,
            sources_bytes=copied.sources_bytes,
        ),
        saving_bytes=placement.saving_bytes + copied.merged_bytes,
        parameters=parameters_of(facts),
    )
    with adapters_as_cure(config):
        scratch_bytes = spill_bytes(facts, placement.layout)
        if scratch_bytes and _on_one_disk(placement.spill_folder, disk.path):
            files = replace(files, spill_bytes=scratch_bytes)
        elif scratch_bytes:
            free_bytes = read_disk(Path(placement.spill_folder)).free_bytes
            refuse_spill(scratch_bytes, placement.spill_folder, free_bytes)
        refuse_disk(files, disk)
        refuse_host(need, available_bytes, files, disk)


def _on_one_disk(one: str, other: str) -> bool:
    """Return whether two folders, made or not, are on one file system."""

    def device_of(folder: str) -> int:
        path = Path(folder).absolute()
        return next(p for p in (path, *path.parents) if p.exists()).stat().st_dev

    return one == other or device_of(one) == device_of(other)


def refuse_before_loading(
    config: RunConfig,
    machine: Machine,
    device: str,
    disk: DiskCapacity,
    ranks: Ranks,
    empty: PreTrainedModel,
    copied: Copied,
) -> None:
    """Refuse, from a model without its weights, a run that does not fit with one row a step; of a
    sharded model what one of `ranks` needs.

    The rows that the configuration asks for are checked when the data is known. Raises DoesNotFit.
    """
    method_of(config).prepare(empty, config)
    facts = model_facts_for(config, empty)
    if config.is_sharded:
        sharding = sharding_of(config, ranks.world, ranks.local_world)
        untimed = Constants(per_s={}, source=NOT_TIMED)
        placement, _ = plan_sharded(config, facts, machine, device, sharding, 1, 1, untimed)
    else:
        how: dict[str, Any] = {"batch_rows": 1, "data_rows": 1, "runs_in": disk.path}
        placement = decide(config, facts, machine, device, **how)
    left = machine.memory_available_bytes
    refuse_what_does_not_fit(config, facts, placement, copied, left, disk)


def copied_now(loaded: LoadedModel) -> Copied:
    """Measure the weights that are copies in host memory; mapped pages count as available."""
    cool(loaded.model)
    return Copied(weights_bytes=copied_bytes(loaded.model), merged_bytes=loaded.merged_bytes)


def page_locks_planned(
    facts: ModelFacts, placement: Placement, device: str, per_s: Mapping[str, float | None]
) -> tuple[ChoiceMade, ...]:
    """Predict what a run on a GPU will page-lock, from the rates of the probe."""
    if device != "cuda":
        return ()
    wanted = wanted_bytes(facts, replace(placement.layout, passes=1))
    return (page_lock_choice(wanted, refused_before(wanted, per_s), per_s),)


def page_locks_of(engine: Engine, per_s: Mapping[str, float | None]) -> tuple[ChoiceMade, ...]:
    """Report the page-locked bytes of a wrapped model, weights and gradients."""
    if not engine.device.pins:
        return ()
    wanted = refused = 0
    for group in engine.groups:
        if not group.is_on("device"):
            size = group.memory.weight_bytes.get("host", 0) + sum(
                segment.size_bytes for segment in group.trained
            )
            wanted += size
            refused += 0 if group.memory.pinned_bytes else size
    return (page_lock_choice(wanted, refused, per_s),)


def disk_room(folder: Path) -> DiskCapacity:
    """Read the free space for a run directory, made or not, and the size of the run's
    files in it."""
    disk, run = read_disk(folder), RunDir(folder)
    return DiskCapacity(
        path=disk.path,
        free_bytes=disk.free_bytes,
        held_bytes=_size_bytes(run.checkpoints) + _size_bytes(run.model),
        in_memory=disk.in_memory is True,
        kind=disk.file_system,
    )


def checkpoints_written(config: RunConfig, steps: int) -> int:
    """Count the checkpoints that a run of `steps` steps writes at most by its schedule."""
    every = config.train.checkpoint_every
    any_step = config.train.final_model == "best" or every == "auto"
    if every == "end" and not any_step:
        return 1
    if not steps:
        return EVERY_CHECKPOINT
    return steps if any_step or isinstance(every, str) else -(-steps // every)


def _size_bytes(folder: Path) -> int:
    """Add up the sizes of all files below a folder; 0 where it is missing."""
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
    )


def wanted_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Return the bytes to lock: weights on the host, their arriving gradients (also sums of
    several passes), and buffers of an embedding's rows."""
    on_host = by_tier(facts, layout)["host"]
    by_rows = rows_of_table(facts, layout, on_host)
    passing = by_rows.host_bytes(layout.passes) if by_rows is not None else 0
    gradients = on_host.gradient_bytes(accumulates=layout.accumulates)
    return weights_on_host_bytes(facts, layout) + gradients + passing


def page_lock_choice(wanted: int, refused: int, per_s: Mapping[str, float | None]) -> ChoiceMade:
    """Return how much is locked, with the cost of the bytes that the system refuses."""
    fast, slow = per_s.get("h2d_pinned"), per_s.get("h2d_pageable")
    if not refused:
        because = f"copies reach {rate_text(fast)} then" if fast else "copies are fastest then"
        return ChoiceMade(name="page-locked memory", value=bytes_text(wanted), because=because)
    cost = "more slowly"
    if slow and fast:
        extra_s = CROSSINGS * refused * max(0.0, 1 / slow - 1 / fast)
        cost = (
            f"at about {rate_text(slow)} instead of {rate_text(fast)}, up to "
            f"{duration_text(extra_s)} more a step"
        )
    elif slow:
        cost = f"at about {rate_text(slow)}"
    return ChoiceMade(
        name="page-locked memory",
        value=bytes_text(wanted - refused),
        because=f"the system refuses {bytes_text(refused)} more, which pass through page-locked "
        f"buffers {cost}: raise `ulimit -l`",
    )


def refused_before(wanted: int, per_s: Mapping[str, float | None]) -> int:
    """Return the bytes certain to be refused: all, where the probe could copy but not lock."""
    copies = per_s.get("h2d_pageable") is not None
    return wanted if copies and "pin" in per_s and per_s["pin"] is None else 0
