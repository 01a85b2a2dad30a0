"""Plan a run: time one block, decide the placement, refuse what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fluxtrain.config.schema import RunConfig
from fluxtrain.core.memory.mapped import resident_bytes
from fluxtrain.core.ranks.join import ALONE, Ranks
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.events import ChoiceMade, Planned, SampleFit
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.measure.measured_constants import Constants, measure_constants
from fluxtrain.measure.peaks import host_peak_bytes
from fluxtrain.methods.engine import TrainingEngine
from fluxtrain.methods.objective import BoundBatch, Task
from fluxtrain.models.loading import LoadedModel
from fluxtrain.plan.facts import Capacity, ModelFacts
from fluxtrain.plan.group_placement import alike
from fluxtrain.plan.guard import DiskCapacity
from fluxtrain.plan.placement import Placement
from fluxtrain.train.placing.cards import hold_to_budget
from fluxtrain.train.placing.forecast import forecast_of
from fluxtrain.train.placing.placing import (
    as_it_is_now,
    capacity_of,
    decide,
    model_facts_for,
    optimizer_in_backward,
    with_disk_rate,
    within_host,
)
from fluxtrain.train.placing.preflight import copied_now, refuse_what_does_not_fit
from fluxtrain.train.placing.snapshot import Snapshot, snapshot_of
from fluxtrain.train.run_files import write_plan_file


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Where the bytes of a run go, and the facts that decided it."""

    config: RunConfig
    facts: ModelFacts
    constants: Constants
    placement: Placement
    capacity: Capacity
    samples: SampleFit  # how many of the data that is trained on fit

    def snapshot(self, *, keeps: bool) -> Snapshot:
        """Choose how checkpoints are written; a run that keeps none needs no copies."""
        available_bytes = self.capacity.host_available_bytes
        found = snapshot_of(self.config, self.facts, self.placement, available_bytes)
        return found if keeps else replace(found, budget_bytes=0)

    def write(
        self,
        run_dir: RunDir,
        engine: TrainingEngine,
        steps: int,
        choices: Sequence[ChoiceMade],
        snapshot_bytes: int,
    ) -> Planned:
        """Write plan.json for a run of `steps` steps; return the event of the plan.

        `snapshot_bytes` of the host hold copies for checkpoints.
        """
        placement = self.placement
        forecast = forecast_of(self.config, self.facts, placement, self.capacity, self.constants)
        time = forecast.time(steps)
        planned = Planned(
            offload=placement.offload,
            batch_rows=placement.batch_rows,
            chunk_rows=engine.chunk_rows,
            accumulation=self.config.train.accumulation,
            sequence_length=self.config.data.row_tokens,
            **vars(placement.totals),
            placement=alike(placement.groups),
            slots=placement.slots,
            device_bytes=placement.need.shown_device_bytes(has_gpu=self.capacity.has_gpu),
            device_budget_bytes=placement.budget_bytes,
            host_bytes=placement.host_bytes + snapshot_bytes,
            choices=tuple(choices),
            step_s=time.step_s if time else None,
            tokens_per_s=time.tokens_per_s if time else None,
            eta_s=time.eta_s if time else None,
            disk_bytes=forecast.disk_bytes,
            binds=time.binds if time else "",
            constants=self.constants.source if self.config.is_sharded else forecast.because,
            timing=self.constants.timing,
            samples=self.samples,
            cards=placement.told_cards,
            left_out=placement.left_out,
        )
        write_plan_file(run_dir, planned, placement, time, self.constants)
        return planned


def parts_of(config: RunConfig, ranks: Ranks) -> int:
    """Return into how many parts the ranks cut the weights and states of blocks."""
    if config.is_sharded:
        return 1
    return ranks.world if config.parallel.params == "shard" else ranks.local_world


def plan_run(
    config: RunConfig,
    loaded: LoadedModel,
    task: Task[Any],
    *,
    machine: Machine,
    device: str,
    batch_rows: int | None,
    disk: DiskCapacity,
    ranks: Ranks = ALONE,
) -> RunPlan:
    """Decide where the bytes go, from measurements of a block and of the machine.

    `batch_rows` rows of `task` make a micro-batch of one of the `ranks`; None: the plan chooses.

    Raises:
        DoesNotFit: host memory, the device or the disk cannot hold the run.
    """
    facts = replace(
        model_facts_for(config, loaded.model),
        processes=ranks.world,
        parts=parts_of(config, ranks),
        adds_on_host=config.parallel.gradients == "cpu_reduce",
    )
    constants = calibrated(
        config, facts, loaded, task, (machine, device, batch_rows), partial(ranks.most, [0])
    )
    measured = constants.applied(facts)
    to_come = constants.still_to_come_bytes
    # libraries and data are in memory by now; pages of the model's files count as available
    copied = copied_now(loaded)
    share = parts_of(config, ranks) / ranks.local_world
    machine = as_it_is_now(machine, copied.weights_bytes - to_come, share)
    constants = with_disk_rate(constants, config, measured, machine, disk.path)
    placement = decide(
        config,
        measured,
        machine,
        device,
        batch_rows=batch_rows,
        data_rows=max(1, task.rows("trained") // (config.train.accumulation * ranks.world)),
        loaded_bytes=resident_bytes(loaded.model) - to_come,
        constants=constants,
        runs_in=disk.path,
    )
    placement = replace(placement, reached_bytes=host_peak_bytes())
    capacity = capacity_of(machine, device)
    refuse_what_does_not_fit(config, facts, placement, copied, capacity.host_available_bytes, disk)
    return RunPlan(
        config=config, facts=measured, constants=constants, placement=placement,
        capacity=within_host(capacity, config),
        samples=task.sample_fit(),
    )  # fmt: skip


def calibrated(
    config: RunConfig,
    facts: ModelFacts,
    loaded: LoadedModel,
    task: Task[Any],
    where: tuple[Machine, str, int | None],
    meet: Callable[[], object] = lambda: None,
) -> Constants:
    """Return the constants of the plan; a block is timed now unless it was timed before. `meet` is
    as for `measure_constants`."""
    if where[1] == "cuda":
        hold_to_budget(config.placement.budget_gib)

    def usual(count: int) -> BoundBatch[Any]:
        return BoundBatch(task.objective, task.typical(count))

    def heavier(count: int) -> BoundBatch[Any] | None:
        batch = task.fullest(count)
        return None if batch is None else BoundBatch(task.objective, batch)

    heavier_of = heavier if task.uneven else None
    kind = optimizer_in_backward(config, facts)
    how: dict[str, Any] = {"in_backward": kind, "steps": config.train.steps, "meet": meet}
    return measure_constants(facts, *where, loaded.model, usual, heavier_of, **how)
