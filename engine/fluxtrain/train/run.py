"""The life of a run: load, calibrate, plan, wrap, resume, train, save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import fluxtrain
from fluxtrain.config.cadence import Cadence
from fluxtrain.config.choices import choose_schedule, factor
from fluxtrain.config.schema import RunConfig
from fluxtrain.core.ranks.join import ALONE, Ranks, gpus_of_rank, losses_told, uuids_of_nccl
from fluxtrain.core.wrap.equal_ranks import collect_weights
from fluxtrain.core.wrap.target import of_first
from fluxtrain.errors import BadInput, Diverged, Interrupted, is_panic
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.events import ChoiceMade, Hello, PlanChecked, SampleGenerated
from fluxtrain.events.run_folder import own_files
from fluxtrain.files.cache import Damaged
from fluxtrain.machine.failures import first_line
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.peaks import measured_peaks
from fluxtrain.methods.method import method_of, usual_rate
from fluxtrain.methods.objective import BoundTask, Sampler, Task
from fluxtrain.methods.optimizer import Optimizer, make_optimizer
from fluxtrain.models.beside import set_of_training
from fluxtrain.models.generation import sample_text
from fluxtrain.models.kernels import choose_kernels
from fluxtrain.plan.guard import DiskCapacity
from fluxtrain.train import final_model
from fluxtrain.train.checkpoint import writer as checkpoint_writer
from fluxtrain.train.checkpoint.checkpoint import Checkpoint, read_checkpoint, remove_unfinished
from fluxtrain.train.checkpoint.newest import (
    batch_rows_of,
    fingerprint,
    model_digest,
    newest_resumable,
    with_cure,
)
from fluxtrain.train.checkpoint.randomness import fix_threads
from fluxtrain.train.checkpoint.recovery import Target
from fluxtrain.train.checkpoint.writer import CheckpointWriter
from fluxtrain.train.evaluate import EarlyStopping
from fluxtrain.train.inputs import Inputs, opened_once_more, ready_inputs
from fluxtrain.train.live.changes import LiveChanges
from fluxtrain.train.live.setup import live_changes
from fluxtrain.train.loop import LoopSettings, TrainingLoop
from fluxtrain.train.observe.tracking import refuse_missing_trackers
from fluxtrain.train.placing.placing import choose_device, dtype_choice, wrapped
from fluxtrain.train.placing.prediction import compared, steady_step_s
from fluxtrain.train.placing.preflight import disk_room, page_locks_of
from fluxtrain.train.placing.row_length import with_row_length
from fluxtrain.train.run_files import first_hello, full_hello, write_run_file
from fluxtrain.train.run_plan import RunPlan, parts_of, plan_run
from fluxtrain.train.samples import Samples, TrainedModel, prompts_of
from fluxtrain.train.session import Session

SAME = "start every process with the same FluxTrain, configuration and files"
EVALUATION_SHARE = 0.1  # of the time, at most, for evaluations whose interval is automatic


def train(
    config: RunConfig,
    target: Target,
    *,
    live_fd: int | None = None,
    json: bool = False,
    kind: type[Run] | None = None,
    opened: Callable[[Path], None] = lambda _: None,
    disk_wait_s: float = 0.0,
    ranks: Ranks = ALONE,
) -> None:
    """Train as `config` says in the directory of `target`; return when the model is exported.

    `kind` is another class of run, such as one that writes no checkpoint. `opened` is called with
    the run directory once this process holds its lock. A full disk is waited for `disk_wait_s`.
    Each of several `ranks` calls this, with a directory of its own.

    Raises:
        FluxTrainError: with the exit code; the run directory holds the record of it.
    """
    made = kind or Run
    fix_threads()
    machine = share_of(read_machine(), ranks.local_world, parts_of(config, ranks))
    limit = machine.memory_total_bytes
    open_session = partial(Session, target.run_dir, host_limit_bytes=limit, ranks=ranks)
    with (
        open_session(live_fd=live_fd, json=json, disk_wait_s=disk_wait_s) as session,
        losses_told(ranks),
    ):
        session.trusts_code = config.model.trust_remote_code
        opened(target.run_dir.path)
        session.announcer.emit(hello := first_hello(config, target.run_dir, machine.line()))
        session.listen()
        session.announcer.phase("loading")
        prompts_of(config.samples)  # what is missing is said before anything is loaded
        refuse_missing_trackers(config.trackers)
        config, chosen = with_row_length(config)
        asked = config
        if not (configured := target.resumes and target.run_dir.run.exists()):
            write_run_file(target.run_dir, config, machine)
        session.configured()
        checkpoint = ranks.of_first(_checkpoint_of(target, session) if ranks.is_first else None)
        config = of_rank(config, ranks)
        device = choose_device(config)
        if device.value == "cuda" and ranks.world > 1:
            ranks.refuse_shared_gpu(uuids_of_nccl(gpus_of(config)))
        ready = partial(ready_inputs, config, session, made.files(session), machine, device, chosen)
        run = opened_once_more(
            lambda: made(config, ready(), session, checkpoint, machine, device),
            session.announcer.warn,
        )
        run.announce(hello)
        session.stop_together()
        if configured:  # only now: a refused resume changes nothing of the run
            write_run_file(target.run_dir, asked, machine)
        session.begin_training()
        if ranks.is_first:
            session.track(config)
        with session.naming_the_way_on():
            run.train()
            collect_weights(run.engine)
            ranks.end_training()
            session.signals.deferred = False
            run.finish()


class Run:
    """A run whose model is loaded, wrapped and, on a resume, restored."""

    keeps_checkpoints = True
    checkpoint_writer: type[CheckpointWriter] = CheckpointWriter
    _samples_of: Callable[..., Samples] = Samples

    @staticmethod
    def files(session: Session) -> DiskCapacity:
        """Describe the disk that the run writes to, for the check before it starts."""
        return disk_room(session.run_dir.path)

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        session: Session,
        checkpoint: Checkpoint | None,
        machine: Machine,
        device: ChoiceMade,
    ) -> None:
        self._config, self._inputs, self._session = config, inputs, session
        self._method = method_of(config)
        task = inputs.task
        ranks = session.ranks
        rows = rows_of_rank(_known_rows(config, checkpoint), ranks.world)
        final_model.refuse_without_evaluations(config.train, task.rows("held_out"))
        bound = None if rows is None else self._bind(rows)  # refuses a batch beyond the data
        ranks.refuse_others(_facts(config, task), SAME)
        model, wished = inputs.loaded.model, config.model.kernels
        kernels = choose_kernels(wished, model, device.value)
        self._plan = _plan_of_first(self._planned_for(machine, device.value, rows), config, ranks)
        rows = ranks.of_first(self._plan.placement.batch_rows)
        self.batch_rows = rows * ranks.world  # of all of them
        self._task = bound or self._bind(rows)
        self.schedule = choose_schedule(
            config.train,
            steps_per_epoch=self._task.data.steps_per_epoch,
            usual_rate=usual_rate(config),
        )
        for line in self.schedule.told:
            session.announcer.warn(line)
        self._digest = model_digest(inputs.loaded.model)
        self.model, self.engine = self._placed(device.value)
        self._snapshot = self._plan.snapshot(keeps=self.keeps_checkpoints)
        self._choices = (
            device,
            dtype_choice(inputs.loaded.precision),
            ChoiceMade(name="model.kernels", value=kernels.value, because=kernels.because),
            *task.choices,
            *inputs.choices,
            *of_all_ranks(self._plan.placement.choices, rows, ranks.world),
            *page_locks_of(self.engine, self._plan.constants.per_s),
            *self.schedule.choices,
            self._snapshot.choice(config.train.checkpoint_every),
        )
        optimizer = self._optimizer()
        self.checkpoints = self.make_checkpoint_writer(optimizer)
        self.checkpoints.follow(session.holding, self.engine.shard_bytes())
        session.holding.look()
        session.gauges.watch(self.engine, self.checkpoints)
        session.timeline.watch(self.engine.device.recorder)
        if checkpoint is not None:
            session.state = self.checkpoints.resume(checkpoint, self.engine, self._task.data)
            session.announcer.at_step(session.state.step)
        held_out = task.fingerprint("held_out")
        final_model.tell_of_other_data(session.state, held_out, session.announcer.warn)
        self._changes = self._live_changes()
        self.loop = self._training_loop(optimizer)

    def _placed(self, device: str) -> tuple[nn.Module, Any]:
        """Put the model where the plan says; return it with its engine."""
        say, ranks, plan = self._session.announcer.warn, self._session.ranks, self._plan
        return wrapped(
            self._config, self._inputs.loaded, device, plan.placement, plan.facts, say, ranks
        )

    def _optimizer(self) -> Optimizer:
        return make_optimizer(self._config.train, self.model, self.schedule.learning_rate)

    def _planned_for(self, machine: Machine, device: str, rows: int | None) -> RunPlan:
        """Plan the run for a device with `rows` a micro-batch; None: the plan chooses."""
        self._session.announcer.phase("loading", "timing one block")
        return plan_run(
            self._config,
            self._inputs.loaded,
            self._inputs.task,
            machine=machine,
            device=device,
            batch_rows=rows,
            disk=self.files(self._session),
            ranks=self._session.ranks,
        )

    def _live_changes(self) -> LiveChanges:
        """Let the control socket change the plan while the run trains."""
        plan, session = self._plan, self._session
        changes = live_changes(
            self._config,
            plan.facts,
            plan.placement,
            self.engine,
            session.announcer,
            plan.constants.rates(has_gpu=plan.capacity.has_gpu),
            lambda: list(session.timeline.recent),
            plan.constants.run_times,
            spill_folder=self._config.placement.spill_folder or session.run_dir.path,
        )
        shared = self.engine.exchange.shares is not None
        moves_states = self._config.placement.disk != "off" and not shared
        ask = _refuse_change if self.engine.in_lockstep else changes.ask
        session.requests.changes_go_to(ask, moves_states=moves_states)
        return changes

    def _training_loop(self, optimizer: Optimizer) -> TrainingLoop[Any]:
        session = self._session
        return TrainingLoop(
            model=self.model,
            optimizer=optimizer,
            task=self._task,
            settings=self._loop_settings(),
            checkpoints=self.checkpoints,
            announcer=session.announcer,
            requests=session.requests,
            changes=self._changes,
            state=session.state,
            ranks=session.ranks,
        )

    def make_checkpoint_writer(self, optimizer: Optimizer) -> CheckpointWriter:
        """Make the writer of this run's checkpoints."""
        config, session, rate = self._config, self._session, self.schedule.learning_rate
        chunk_rows = config.placement.chunk_rows
        cadence = Cadence(
            every=config.train.checkpoint_every,
            total_steps=self.schedule.total_steps,
            share=checkpoint_writer.SHARE,
            period_s=checkpoint_writer.PERIOD_S,
        )
        writer = self.checkpoint_writer(
            session.run_dir.checkpoints,
            cadence,
            config.train.checkpoints_kept,
            session.announcer,
            fingerprint(config, self._digest, self.batch_rows, rate, self._inputs.loaded.base_key),
            optimizer,
            needs_best=config.train.final_model == "best",
            disk=session.disk,
            budget_bytes=self._snapshot.budget_bytes,
            chunk_rows=None if chunk_rows == "auto" else chunk_rows,
        )
        if self.engine.exchange.shares is not None:
            writer.together, writer.budget_bytes = session.ranks, 0
        writer.generation = set_of_training(self._inputs.loaded.model)
        return writer

    def announce(self, hello: Hello) -> None:
        """Emit the facts of the loaded model, and the plan with its reasons."""
        session, loaded = self._session, self._inputs.loaded
        session.holding.look()
        steps = self.schedule.total_steps
        session.announcer.emit(
            full_hello(
                hello,
                self.engine,
                model=loaded.name,
                dtype=loaded.precision.dtype,
                total_steps=steps,
                first_step=session.state.step,
            )
        )
        copies = self._snapshot.budget_bytes
        planned = self._plan.write(session.run_dir, self.engine, steps, self._choices, copies)
        self._planned = msgspec.structs.replace(planned, batch_rows=self.batch_rows)
        session.announcer.emit(self._planned)

    def train(self) -> None:
        """Make all steps. Raises as `TrainingLoop.run`; for Diverged with the way on."""
        try:
            self.loop.run()
        except Diverged as error:
            if not self.keeps_checkpoints:
                raise
            raise Diverged(f"{error}; {self._after_divergence()}") from error
        finally:
            self._tell_of_bad_reads()

    def _tell_of_bad_reads(self) -> None:
        """Name what lives on disk and was read wrong, and right the second time."""
        files = [file for group in self.engine.groups for _, file in group.memory.files]
        bad = {str(file.path): len(file.mended) for file in files if file.mended}
        if self.engine.spill.mended:
            bad[f"optimizer states in {self.engine.spill.folder}"] = self.engine.spill.mended
        if bad:
            named = ", ".join(f"{path} ({count} times)" for path, count in bad.items())
            self._session.announcer.warn(
                f"what lives on disk was read wrong, and right when it was read again: "
                f"{named}. No step used wrong ones; have the disk and the memory checked"
            )

    def _after_divergence(self) -> str:
        """Say how to go on with a lower rate, from the last checkpoint if a step after it was
        finite."""
        state, last = self._session.state, self.checkpoints.last
        last_finite = state.step - max(0, state.skipped_in_a_row - 1)  # the last is not counted
        if last is not None and last.step >= last_finite:
            return (
                "no step after that checkpoint was finite, so its weights may be at fault: "
                "resume from an earlier one, or start a new run in another --run-dir"
            )
        lower = f"--set train.learning_rate={self.schedule.learning_rate / 10:.3g}"
        return f"to go on with a lower rate: {self._session.resume_command} {lower}"

    def finish(self) -> None:
        """Save the trained model, and show a sample of it."""
        session, loaded = self._session, self._inputs.loaded
        wanted = self._config.train.final_model
        session.announcer.phase("saving", "the trained model")
        self.engine.free_gradients()  # some models are saved from copies of their weights
        session.model_step = final_model.choose_final_weights(
            wanted, session.state, self.checkpoints, self.engine, session.announcer.warn
        )
        save = partial(self._method.save, loaded, self._config.method)
        final_model.save_model(session, save)
        if (prompt := self._inputs.task.prompt) and prompt.text:
            self._show_sample(prompt.text, session.model_step)
        self.measure()

    def _show_sample(self, prompt: str, step: int) -> None:
        """Show what the model makes of a prompt. It is saved: what goes wrong is a warning."""
        loaded = self._inputs.loaded
        try:
            text = sample_text(loaded.model, loaded.tokenizer, prompt)
        except BaseException as error:  # models bring code and settings of their own
            fails = isinstance(error, Exception) and not isinstance(error, Interrupted)
            if not fails and not is_panic(error):
                raise
            words = f"the model is saved, and no sample of it is shown: {first_line(error)}"
            self._session.announcer.warn(words)
            return
        self._session.announcer.emit(
            SampleGenerated(step=step, prompt=prompt, text=text.removeprefix(prompt))
        )

    def measure(self) -> None:
        """Report predicted and measured values to journal, console and result.json.

        After a live change, the prediction for the new settings and the steps since then count.
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
        median_s = rows[-1].measured
        if changes.promise is None and self._planned.step_s and median_s:
            self._plan.constants.note_run(median_s / self._planned.step_s)
        session.measured = {
            "predicted_device_peak_bytes": plan.device_bytes,
            "measured_device_peak_bytes": session.gauges.memory().device_peak_bytes,
            "predicted_host_peak_bytes": plan.host_bytes,
            "measured_host_peak_bytes": peaks["host_peak_bytes"],
            "device_reserved_peak_bytes": peaks["device_reserved_peak_bytes"],
            "plan": msgspec.to_builtins(rows),
        }

    def _bind(self, rows: int) -> BoundTask[Any]:
        """Bind the task to `rows` rows a batch. Raises BadInput where the data has too few."""
        task: Task[Any] = self._inputs.task
        return task.bound(rows)

    def _loop_settings(self) -> LoopSettings:
        schedule, name = self.schedule, self._config.train.schedule
        per_s = self._plan.constants.per_s

        def rate(step: int) -> float:
            warmup, total = schedule.warmup_steps, schedule.total_steps
            share = factor(name, step, warmup_steps=warmup, total_steps=total)
            return schedule.learning_rate * share

        return LoopSettings(
            total_steps=schedule.total_steps,
            max_grad_norm=self._config.train.max_grad_norm,
            evaluations=Cadence(
                every=self._config.train.evaluate_every,
                total_steps=schedule.total_steps,
                share=EVALUATION_SHARE,
                last_step=self._session.state.step,
            ),
            learning_rate_at=rate,
            early_stopping=EarlyStopping.of(self._config.train),
            keeps_best=self._config.train.final_model == "best",
            samples=self._samples(),
            seed=self._config.train.seed,
            disk_rates=(per_s.get("disk_read"), per_s.get("disk_write")),
        )

    def _samples(self) -> Sampler | None:
        """Return what makes the run's samples; None: it has no prompts."""
        session, sampler = self._session, self._inputs.task.sampler
        if sampler is not None:
            device = self.engine.device.torch_device
            return sampler(self.model, device, session.announcer, session.run_dir.path)
        settings = self._config.samples
        prompts = prompts_of(settings)
        if not prompts:
            return None
        model = TrainedModel(loaded=self._inputs.loaded, device=self.engine.device.torch_device)
        prompt = self._inputs.task.prompt
        talks = prompt is not None and prompt.talks
        return self._samples_of(settings, prompts, model, self._session.announcer, talks=talks)


def _checkpoint_of(target: Target, session: Session) -> Checkpoint | None:
    """Find the checkpoint to resume from; None: start at the first step."""
    if not target.resumes:
        return None
    remove_unfinished(target.run_dir.checkpoints)
    own_files.remove_unfinished_models(target.run_dir)
    if target.checkpoint is not None:
        try:
            return replace(read_checkpoint(target.checkpoint), named=True)
        except Damaged as damage:
            raise with_cure(damage) from None
    found = newest_resumable(target.run_dir.checkpoints, session.announcer.warn)
    if found is None:
        session.announcer.warn("no checkpoint was written yet: the run starts at its first step")
    return found


def of_rank(config: RunConfig, ranks: Ranks) -> RunConfig:
    """Return the configuration of one of several ranks, with the numbers of its own cards.

    Raises BadInput for settings that several ranks cannot have.
    """
    if ranks.world == 1:
        return config
    cards = config.parallel.cards
    if isinstance(cards, tuple):
        raise BadInput(
            f"parallel.cards is {list(cards)}, and each of {ranks.world} processes has cards of "
            f"its own: set parallel.cards={len(cards)} (CUDA_VISIBLE_DEVICES says which there are)"
        )
    if config.parallel.params == "shard" and config.samples.prompts:
        raise BadInput(
            "samples.prompts are answered by rank 0 alone, which has a part of the weights: leave "
            "them out, or set parallel.params=full"
        )
    if config.parallel.gradients == "cpu_reduce" and ranks.local_world < ranks.world:
        raise BadInput(
            "parallel.gradients is cpu_reduce, and processes of several machines share no memory: "
            "set parallel.gradients=gpu_reduce"
        )
    own: Any = 1 if cards == "auto" else cards
    if torch.cuda.is_available() and config.placement.device != "cpu":
        own = tuple(gpus_of_rank(ranks.local_rank, own))
    return config.model_copy(update={"parallel": replace(config.parallel, cards=own)})


def gpus_of(config: RunConfig) -> list[torch.device]:
    """Return the GPUs that the configuration of a rank lists."""
    listed = config.parallel.cards
    return [torch.device("cuda", one) for one in listed] if isinstance(listed, tuple) else []


def rows_of_rank(rows: int | None, world: int) -> int | None:
    """Return one rank's rows of a micro-batch of all ranks; None where the plan chooses.

    Raises BadInput where they cannot be shared evenly.
    """
    if rows is not None and rows % world:
        near = -(-rows // world) * world
        raise BadInput(
            f"train.batch_rows is {rows}, and {world} processes share a batch evenly: set "
            f"train.batch_rows={near} for a new run, or resume with a number of processes that "
            f"divides {rows}"
        )
    return None if rows is None else rows // world


def of_all_ranks(choices: Sequence[ChoiceMade], rows: int, world: int) -> Iterator[ChoiceMade]:
    """Yield the choices of a rank's plan, with the rows of all ranks."""
    if world > 1:
        because = f"{rows} rows of each micro-batch are computed by each"
        yield ChoiceMade(name="parallel.processes", value=str(world), because=because)
    for one in choices:
        is_rows = one.name == "train.batch_rows"
        yield msgspec.structs.replace(one, value=str(rows * world)) if is_rows else one


def _plan_of_first(plan: RunPlan, config: RunConfig, ranks: Ranks) -> RunPlan:
    """Return the plan of rank 0 on this rank's cards, since ranks share weights, which they
    gather or update in one order."""
    if ranks.world == 1 or config.is_sharded:
        return plan
    return replace(plan, placement=of_first(plan.placement, ranks))


def _refuse_change(command: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
    return False, "processes share the weights (parallel.params=shard): nothing can be moved"


def share_of(machine: Machine, local_ranks: int, parts: int = 1) -> Machine:
    """Return the machine with the free memory that one of its ranks may take, as if it held all of
    the `parts` that weights and states are in."""
    free = machine.memory_available_bytes
    share = None if free is None else free // local_ranks * parts
    return msgspec.structs.replace(machine, memory_available_bytes=share)


def _facts(config: RunConfig, task: Task[Any]) -> dict[str, Any]:
    """Return what must be the same in every process of a run."""
    facts = {"FluxTrain": fluxtrain.__version__, "torch": torch.__version__}
    for section, settings in config.model_dump(mode="json").items():
        for name, value in settings.items() if section not in ("placement", "trackers") else ():
            facts[f"{section}.{name}"] = value
    for own in ("model.path", "data.path", "data.token_cache", "parallel.cards"):
        facts.pop(own, None)
    return facts | {"the training data": task.fingerprint("trained")}


def _known_rows(config: RunConfig, checkpoint: Checkpoint | None) -> int | None:
    """Return the rows of a micro-batch as set or as in the checkpoint; None: the plan chooses."""
    if config.train.batch_rows != "auto":
        return config.train.batch_rows
    return None if checkpoint is None else batch_rows_of(checkpoint)
