"""Runs with `parallel.mode: fsdp`: a model sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed, nn

from fluxtrain.config.schema import RunConfig
from fluxtrain.events.events import ChoiceMade, StepFinished
from fluxtrain.measure.measured_constants import Constants
from fluxtrain.methods.engine import ENGINE
from fluxtrain.methods.method import method_of
from fluxtrain.methods.optimizer import Optimizer, parameter_groups
from fluxtrain.models.copies import Copied
from fluxtrain.models.kernels import choose_kernels
from fluxtrain.parallel.auto import choose, measured_link
from fluxtrain.parallel.compress.registry import method_named
from fluxtrain.parallel.engine import ShardedAdamW, ShardedEngine, gathered_on_first
from fluxtrain.parallel.profile import WARM_STEPS, Communication, StepProfiler, profiled
from fluxtrain.parallel.results import append, record
from fluxtrain.parallel.sharding import compress, shard
from fluxtrain.train import final_model
from fluxtrain.train.checkpoint.writer import CheckpointWriter
from fluxtrain.train.placing.placing import capacity_of, model_facts_for, within_host
from fluxtrain.train.placing.preflight import refuse_what_does_not_fit
from fluxtrain.train.placing.sharded import (
    NOT_TIMED,
    plan_sharded,
    refuse_settings,
    sharding_of,
)
from fluxtrain.train.run import Run
from fluxtrain.train.run_plan import RunPlan, calibrated
from fluxtrain.train.samples import Samples, SamplesTogether

if TYPE_CHECKING:
    from fluxtrain.events.answers.machine import Machine
    from fluxtrain.train.inputs import Inputs
    from fluxtrain.train.live.changes import LiveChanges
    from fluxtrain.train.session import Session


class ShardedRun(Run):
    """One rank's run; the first keeps the records."""

    engine: ShardedEngine

    def __init__(self, config: RunConfig, inputs: Inputs, session: Session, *rest: Any) -> None:
        refuse_settings(config)
        self.profiler: StepProfiler | None = None
        if (steps := config.comm.profile_steps) and session.ranks.is_first:
            folder = session.run_dir.path / "profiler"
            self.profiler = StepProfiler(folder, steps, gpu=torch.cuda.is_available())
        super().__init__(config, inputs, session, *rest)
        for line in config.fsdp.without_effect():
            self._session.announcer.warn(line)

    def _planned_for(self, machine: Machine, device: str, rows: int | None) -> RunPlan:
        """Plan one rank: a shard of all is on its card; on a GPU a block is timed."""
        config, task, ranks = self._config, self._inputs.task, self._session.ranks
        facts = model_facts_for(config, self._inputs.loaded.model)
        measured = Constants(per_s={}, source=NOT_TIMED)
        if device == "cuda":
            self._session.announcer.phase("loading", "timing one block")
            timed = machine, device, rows
            measured = calibrated(config, facts, self._inputs.loaded, task, timed)
            facts = measured.applied(facts)
        data_rows = task.rows("trained") // (config.train.accumulation * ranks.world)
        sharding = sharding_of(config, ranks.world, ranks.local_world)
        plan = partial(plan_sharded, config, facts, machine, device, sharding)
        placement, constants = plan(rows, max(1, data_rows), measured)
        least = -ranks.most([-placement.batch_rows])[0]
        if least < placement.batch_rows:
            placement, constants = plan(least, max(1, data_rows), measured)
            placement = replace(placement, choices=tuple(map(_least_rows, placement.choices)))
        capacity = within_host(capacity_of(machine, device), config)
        copied, disk = Copied(), self.files(self._session)
        available = capacity.host_available_bytes
        refuse_what_does_not_fit(config, facts, placement, copied, available, disk)
        return RunPlan(
            config=config, facts=facts, placement=placement, capacity=capacity,
            constants=constants, samples=task.sample_fit(),
        )  # fmt: skip

    def _placed(self, device: str) -> tuple[nn.Module, Any]:
        """Shard the model."""
        config, model = self._config, self._inputs.loaded.model
        where = torch.device(device)
        if device == "cuda":
            where = torch.device("cuda", torch.cuda.current_device())
        if not distributed.is_initialized():  # this process is alone
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            store: Any = getattr(distributed, "HashStore")()  # noqa: B009 - not exported
            distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        choose_kernels(config.model.kernels, model, device, with_loss=True)
        frozen = method_of(config).frozen_storage(config.method)
        how: dict[str, Any] = {"frozen": frozen, "seed": config.train.seed}
        engine = shard(model, where, config.fsdp, config.comm, self._plan.placement, **how)
        engine.chunk_rows = self._plan.placement.layout.chunk_rows
        model.__dict__[ENGINE] = engine
        if config.comm.compress == "auto":
            self._compress_where_faster(engine)
        return model, engine

    def _compress_where_faster(self, engine: ShardedEngine) -> None:
        """Measure a pass and the link, and compress where that pays."""
        objective, rows = self._inputs.task.objective, self._plan.placement.batch_rows
        batch = self._inputs.task.typical(rows)
        gpu = engine.device.torch_device.type == "cuda"

        def one_pass() -> None:
            objective.loss(engine.model, batch, objective.count(batch)).backward()
            engine.forget_gradients()

        one_pass()
        exposed = profiled(one_pass, gpu=gpu).exposed_share
        share = self._session.ranks.gather(exposed)
        group = distributed.group.WORLD
        assert group is not None
        count = max(sum(p.numel() for p in part.parameters.values()) for part in engine.parts)
        raw_s, ours_s = measured_link(count, group, engine.device.torch_device)
        choice = choose(raw_s, ours_s, max(share))
        self._session.announcer.warn(f"comm.compress=auto is {choice.value}: {choice.because}")
        if choice.value != "none":
            compress(engine, method_named(choice.value), self._config.train.seed)

    def _optimizer(self) -> Optimizer:
        settings, rate = self._config.train, self.schedule.learning_rate
        decay = {"weight_decay": settings.weight_decay, "no_decay": settings.no_decay}
        groups = parameter_groups(self.model, learning_rate=rate, **decay)  # type: ignore[arg-type]
        fused = self.engine.device.torch_device.type == "cuda" and not self.engine.offloads
        options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
        return ShardedAdamW(self.engine, groups, lr=rate, fused=fused or None, **options)

    def _samples_of(self, *rest: Any, **options: Any) -> Samples:
        return SamplesTogether(self._session.ranks, *rest, **options)

    def _live_changes(self) -> LiveChanges:
        changes: Any = NoChanges(self._step_took)
        self._session.requests.changes_go_to(changes.ask)
        return changes  # type: ignore[no-any-return]

    def _step_took(self, finished: StepFinished) -> None:
        if self.profiler is not None:
            self._tell(self.profiler.step_done())
        for exchange in self.engine.exchanges:
            exchange.measures_error = finished.step % 100 == 1  # of one exchange

    def _tell(self, found: Communication | None) -> None:
        if found is not None:
            self._session.announcer.warn(f"communication of {found.steps} steps:\n{found.table()}")

    def make_checkpoint_writer(self, optimizer: Optimizer) -> CheckpointWriter:
        """Make a writer whose shards all ranks gather together."""
        writer = super().make_checkpoint_writer(optimizer)
        writer.together = self._session.ranks
        return writer

    def train(self) -> None:
        """Make all steps, then gather the weights to save on rank 0."""
        super().train()
        self._end_profile()
        session, wanted = self._session, self._config.train.final_model
        session.model_step = final_model.choose_final_weights(
            wanted, session.state, self.checkpoints, self.engine, session.announcer.warn,
            session.ranks,
        )  # fmt: skip
        self._report()
        gathered_on_first(self.engine)

    def _end_profile(self) -> None:
        """Tell what fewer steps than asked took, or that there were none."""
        if self.profiler is None or self.profiler.found is not None:
            return
        self._tell(self.profiler.end())
        if self.profiler.found is None:
            self._session.announcer.warn(
                f"no step was profiled: --profile begins after {WARM_STEPS} steps of a start, and "
                "this one made no more"
            )

    def finish(self) -> None:
        """Save the trained model."""
        self._session.announcer.phase("saving", "the trained model")
        save = partial(self._method.save, self._inputs.loaded, self._config.method)
        final_model.save_model(self._session, save)
        self.measure()

    def _report(self) -> None:
        """Add the run's line to its results."""
        session, config = self._session, self._config
        line = record(
            config,
            session.run_dir,
            self.batch_rows,
            session.ranks.world,
            self.engine.exchanges,
            self.profiler.found if self.profiler else None,
            self.engine.device.torch_device,
        )
        if session.ranks.is_first:
            append(session.run_dir.path, line)


def _least_rows(choice: ChoiceMade) -> ChoiceMade:
    """Say of automatic rows why they are fewer than this rank has room for."""
    because = "no more fit the rank with the least free memory"
    is_rows = choice.name == "train.batch_rows"
    return msgspec.structs.replace(choice, because=because) if is_rows else choice


class NoChanges:
    """In place of live changes: nothing of a sharded model can be placed anew while it trains."""

    waiting = False
    promise = None
    steps_since = 0

    def __init__(self, step_took: Callable[[StepFinished], object]) -> None:
        """`step_took` is called after each step."""
        self.step_took = step_took

    def ask(self, command: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        """Refuse a change."""
        return False, "a sharded model (parallel.mode=fsdp) cannot be placed anew while it trains"

    def make_room(self, *_: object, **__: object) -> None:
        """Give up nothing: the step failed on this rank alone."""

    def carry_out(self, *_: object) -> None:
        """Do nothing, as all below."""

    keep_room = disturbed = finish = carry_out
