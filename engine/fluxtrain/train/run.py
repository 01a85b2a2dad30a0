"""One run from its configuration to its model: load, plan, train, evaluate, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from fluxtrain.data.batches import Batch, BatchSource, fullest, in_order
from fluxtrain.hardware.machine import Machine, read_machine
from fluxtrain.methods.export import save_model
from fluxtrain.methods.kernels import choose_kernels
from fluxtrain.methods.sampling import sample_text
from fluxtrain.optim import schedule
from fluxtrain.optim.outside import outside_optimizer
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.group_placement import alike
from fluxtrain.plan.guard import DiskRoom
from fluxtrain.plan.prediction import compared, steady_step_s
from fluxtrain.stream.engine import engine_of
from fluxtrain.stream.outside import OutsideOptimizer
from fluxtrain.telemetry.events import (
    ChoiceMade,
    Hello,
    PlanChecked,
    Planned,
    SampleGenerated,
)
from fluxtrain.train import keeping
from fluxtrain.train.cadence import Cadence
from fluxtrain.train.checkpoint import Checkpoint, read_checkpoint, remove_unfinished
from fluxtrain.train.choices import choose_course
from fluxtrain.train.config import RunConfig
from fluxtrain.train.constants import Constants, measured_constants
from fluxtrain.train.device_budget import hold_to_budget
from fluxtrain.train.fingerprint import fingerprint
from fluxtrain.train.forecast import forecast_of
from fluxtrain.train.guarding import (
    copied_now,
    disk_room,
    page_locks_of,
    refuse_before_loading,
    refuse_what_does_not_fit,
)
from fluxtrain.train.ingredients import DEMO, Ingredients, load_ingredients
from fluxtrain.train.keeping import CheckpointKeeper, newest_valid, trainer_content
from fluxtrain.train.live_setup import live_changes
from fluxtrain.train.loop import LoopSettings, TrainingLoop
from fluxtrain.train.parameter_groups import parameter_groups
from fluxtrain.train.peaks import host_peak_bytes, measured_peaks
from fluxtrain.train.placing import (
    as_it_is_now,
    capacity_of,
    card_capability,
    choose_device,
    decide,
    dtype_choice,
    loaded_bytes,
    model_facts_for,
    optimizer_in_backward,
    wrapped,
)
from fluxtrain.train.randomness import seed_everything
from fluxtrain.train.recovery import Target
from fluxtrain.train.run_files import (
    first_hello,
    full_hello,
    write_plan_file,
    write_run_file,
)
from fluxtrain.train.session import Session

EVALUATION_SHARE = 0.1  # of the time, at most, goes into evaluations that nobody set


def train(
    config: RunConfig,
    target: Target,
    *,
    live_fd: int | None = None,
    json: bool = False,
    kind: type[Run] | None = None,
    opened: Callable[[Path], None] = lambda _: None,
) -> None:
    """Train as `config` says in the directory of `target`; returns when the model is exported.

    `kind` is another run, such as one that keeps nothing. `opened` is called with the run directory
    once that is this process's own.

    Raises:
        FluxTrainError: with the exit code; the run directory holds the record of it.
    """
    made = kind or Run
    machine = read_machine()
    limit = machine.memory_total_bytes
    with Session(target.run_dir, live_fd=live_fd, json=json, host_limit_bytes=limit) as session:
        opened(target.run_dir.path)
        session.announcer.emit(hello := first_hello(config, target.run_dir, machine.line()))
        session.listen()
        session.announcer.phase("loading")
        if not (configured := target.resumes and target.run_dir.run.exists()):
            write_run_file(target.run_dir, config, machine)
        session.configured()
        checkpoint = _checkpoint_of(target, session)
        device = choose_device(config)
        seed_everything(config.train.seed)
        fits = partial(refuse_before_loading, config, machine, device.value, made.files(session))
        tell = partial(session.announcer.phase, "loading")
        ingredients = load_ingredients(config, fits, card_capability(device.value), tell)
        run = made(config, ingredients, session, checkpoint, machine, device)
        run.announce(hello)
        if configured:  # only now: a resume that is refused changes nothing of the run
            write_run_file(target.run_dir, config, machine)
        session.begin_training()
        run.loop.run()
        session.signals.deferred = False
        run.finish()


class Run:
    """A run that is loaded, wrapped and, after a resume, restored."""

    @staticmethod
    def files(session: Session) -> DiskRoom:
        """Where the run writes, for the guard."""
        return disk_room(session.run_dir.path)

    def __init__(
        self,
        config: RunConfig,
        ingredients: Ingredients,
        session: Session,
        checkpoint: Checkpoint | None,
        machine: Machine,
        device: ChoiceMade,
    ) -> None:
        self._config = config
        self._ingredients = ingredients
        self._session = session
        rows = _known_rows(config, checkpoint)
        data = None if rows is None else self._batches(rows)  # refuses a batch beyond the data
        model = ingredients.loaded.model
        kernels = choose_kernels(config.model.kernels, model, device.value)
        self._place(machine, device.value, rows)
        self.batch_rows = self.placement.batch_rows
        self.data = data or self._batches(self.batch_rows)
        liger = ChoiceMade(name="model.kernels", value=kernels.value, because=kernels.because)
        dtype = dtype_choice(ingredients.loaded.precision)
        self._choices = (device, dtype, liger, *self.placement.choices)
        self.course = choose_course(
            config.train,
            steps_per_epoch=self.data.steps_per_epoch,
            fresh_weights=config.model.path == DEMO,
        )
        self.model, self.engine = wrapped(config, model, device.value, self.placement, self._facts)
        self._choices += page_locks_of(self.engine, self._constants.per_s)
        self.keeper = self.make_keeper()
        session.gauges.watch(self.engine, self.keeper)
        session.timeline.watch(self.engine.device.recorder)
        optimizer = _optimizer(config, self.model, self.course.learning_rate)
        if isinstance(optimizer, OutsideOptimizer):
            self.keeper.outside = optimizer
        if checkpoint is not None:
            session.state = self.keeper.restore(checkpoint, self.engine, self.data)
            session.announcer.at_step(session.state.step)
        rates = self._constants.rates(has_gpu=self._capacity.has_gpu)
        changes = live_changes(
            config, self._facts, self.placement, self.engine, session.announcer, rates
        )
        session.requests.changes_go_to(changes.ask)
        self._changes = changes
        self.loop = TrainingLoop(
            model=self.model,
            optimizer=optimizer,
            data=self.data,
            held_out=self.held_out,
            settings=self._loop_settings(),
            keeper=self.keeper,
            announcer=session.announcer,
            requests=session.requests,
            changes=changes,
            state=session.state,
        )

    def _place(self, machine: Machine, device: str, rows: int | None) -> None:
        """Decide where the bytes go, from what a block and the machine are measured to do."""
        config, loaded = self._config, self._ingredients.loaded
        facts = model_facts_for(config, loaded.model, loaded.config)
        self._constants = self._measured(facts, machine, device, rows)
        self._facts = self._constants.applied(facts)
        to_come = self._constants.still_to_come_bytes
        # libraries and data are there by now; pages of the model's files count as available
        copied = copied_now(loaded)
        machine = as_it_is_now(machine, copied.weights_bytes - to_come)
        rows_there = len(self._ingredients.data.trained)
        self.placement = decide(
            config,
            self._facts,
            machine,
            device,
            batch_rows=rows,
            data_rows=max(1, rows_there // config.train.accumulation),
            loaded_bytes=loaded_bytes(loaded.model) - to_come,
            constants=self._constants,
        )
        self.placement = replace(self.placement, reached_bytes=host_peak_bytes())
        capacity = self._capacity = capacity_of(machine, device)
        left, files = capacity.host_available_bytes, self.files(self._session)
        refuse_what_does_not_fit(config, facts, self.placement, copied, left, files)

    def _measured(
        self, facts: ModelFacts, machine: Machine, device: str, rows: int | None
    ) -> Constants:
        """The constants of the plan; a block is tried now unless that was done before."""
        if device == "cuda":
            hold_to_budget(self._config.placement.budget_gib)
        self._session.announcer.phase("loading", "trying one block")
        model, data = self._ingredients.loaded.model, self._ingredients.data.trained

        def batch_of(count: int) -> Batch:
            return next(iter(in_order(data, count)))

        where, kind = (machine, device, rows), optimizer_in_backward(self._config, facts)
        return measured_constants(facts, *where, model, batch_of, fullest(data), eager=kind)

    def make_keeper(self) -> CheckpointKeeper:
        """What writes this run's checkpoints."""
        config, session = self._config, self._session
        cadence = Cadence(
            every=config.train.checkpoint_every,
            total_steps=self.course.total_steps,
            share=keeping.SHARE,
            period_s=keeping.PERIOD_S,
        )
        return CheckpointKeeper(
            session.run_dir.checkpoints,
            cadence,
            config.train.keep_checkpoints,
            session.announcer,
            fingerprint(config, self.model, self.batch_rows),
        )

    def announce(self, hello: Hello) -> None:
        """Tell what the model turned out to be, and the plan with its reasons."""
        session, loaded = self._session, self._ingredients.loaded
        session.announcer.emit(
            full_hello(
                hello,
                self.engine,
                model=loaded.name,
                dtype=loaded.precision.dtype,
                total_steps=self.course.total_steps,
                first_step=session.state.step,
            )
        )
        plan = self.placement
        forecast = forecast_of(self._config, self._facts, plan, self._capacity, self._constants)
        time = forecast.time(self.course.total_steps)
        told = time["predicted"] or {}
        planned = Planned(
            offload=plan.offload,
            batch_rows=plan.batch_rows,
            chunk_rows=self.engine.chunk_rows,
            accumulation=self._config.train.accumulation,
            sequence_length=self._config.data.sequence_length,
            **vars(plan.totals),
            placement=alike(plan.groups),
            slots=plan.slots,
            device_bytes=plan.need.shown_device_bytes(has_gpu=self._capacity.has_gpu),
            device_budget_bytes=plan.budget_bytes,
            host_bytes=plan.host_bytes,
            choices=(*self._choices, *self.course.choices),
            step_s=told.get("seconds_per_step"),
            tokens_per_s=told.get("tokens_per_s"),
            eta_s=told.get("eta_s"),
            disk_bytes=forecast.disk_bytes,
            binds=told.get("binds", ""),
            constants=time["predicted_because"],
        )
        write_plan_file(session.run_dir, planned, plan, told.get("parts_s", {}), self._constants)
        session.announcer.emit(planned)
        self._planned = planned

    def finish(self) -> None:
        """Show what the model says now, and leave it where any program can load it."""
        session, loaded = self._session, self._ingredients.loaded
        session.announcer.phase("saving", "the trained model")
        save_model(loaded.model, loaded.tokenizer, session.run_dir.model)
        session.model_path = str(session.run_dir.model)
        if self._ingredients.prompt:
            text = sample_text(loaded.model, loaded.tokenizer, self._ingredients.prompt)
            session.announcer.emit(
                SampleGenerated(
                    step=session.state.step,
                    prompt=self._ingredients.prompt,
                    text=text.removeprefix(self._ingredients.prompt),
                )
            )
        self.measure()

    def measure(self) -> None:
        """Put what was predicted beside what was measured: journal, console and result.json.

        After a change of the running training that is the prediction for what it was changed to,
        and the steps since.
        """
        session, changes = self._session, self._changes
        plan = changes.promise or self._planned
        peaks = measured_peaks(self.engine)
        steps_s = self.loop.steps_s[-changes.steps_since :] if changes.steps_since else []
        rows = compared(
            {
                "device_peak_bytes": plan.device_bytes,
                "host_peak_bytes": plan.host_bytes,
                "step_s": plan.step_s,
            },
            {**peaks, "step_s": steady_step_s(steps_s)},
        )
        session.announcer.emit(PlanChecked(rows=rows))
        session.measured = {
            "predicted_device_peak_bytes": plan.device_bytes,
            "measured_device_peak_bytes": session.gauges.memory().device_peak_bytes,
            "predicted_host_peak_bytes": plan.host_bytes,
            "measured_host_peak_bytes": peaks["host_peak_bytes"],
            "device_reserved_peak_bytes": peaks["device_reserved_peak_bytes"],
            "plan": msgspec.to_builtins(rows),
        }

    def _batches(self, rows: int) -> BatchSource:
        config = self._config
        return BatchSource(
            self._ingredients.data.trained, rows, config.train.accumulation, config.data.seed
        )

    def held_out(self) -> Iterable[Batch]:
        """The batches of an evaluation."""
        return in_order(self._ingredients.data.held_out, self.batch_rows)

    def _loop_settings(self) -> LoopSettings:
        course, name = self.course, self._config.train.schedule

        def rate(step: int) -> float:
            factor = schedule.factor(
                name, step, warmup_steps=course.warmup_steps, total_steps=course.total_steps
            )
            return course.learning_rate * factor

        return LoopSettings(
            total_steps=course.total_steps,
            max_grad_norm=self._config.train.max_grad_norm,
            evaluations=Cadence(
                every=self._config.train.evaluate_every,
                total_steps=course.total_steps,
                share=EVALUATION_SHARE,
                last_step=self._session.state.step,
            ),
            learning_rate_at=rate,
        )


def _checkpoint_of(target: Target, session: Session) -> Checkpoint | None:
    """The checkpoint to go on from; None starts at the first step."""
    if not target.resumes:
        return None
    remove_unfinished(target.run_dir.checkpoints)
    if target.checkpoint is not None:
        return read_checkpoint(target.checkpoint)
    found = newest_valid(target.run_dir.checkpoints, session.announcer.warn)
    if found is None:
        session.announcer.warn("no checkpoint was written yet: the run starts at its first step")
    return found


def _known_rows(config: RunConfig, checkpoint: Checkpoint | None) -> int | None:
    """Rows of a backward pass: as set, or as at the run's start; None is to be chosen."""
    if config.train.batch_rows != "auto":
        return config.train.batch_rows
    if checkpoint is None:
        return None
    return int(trainer_content(checkpoint)["fingerprint"]["batch_rows"])


def _optimizer(
    config: RunConfig, model: nn.Module, rate: float
) -> torch.optim.Optimizer | OutsideOptimizer:
    settings = config.train
    decay, exempt = settings.weight_decay, settings.no_decay
    groups = parameter_groups(model, learning_rate=rate, weight_decay=decay, no_decay=exempt)
    options: Any = {"lr": rate, "betas": settings.betas, "eps": settings.eps}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, **options)
    make = partial(outside_optimizer, settings.optimizer, **options)
    return OutsideOptimizer(engine_of(model), groups, make)
