"""Run the training loop: the steps, and what happens between two of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import nn

from fluxtrain.config.cadence import Cadence
from fluxtrain.core.ranks.exchange import RanOutElsewhere
from fluxtrain.core.ranks.join import ALONE, Ranks
from fluxtrain.errors import Diverged, DoesNotFit, FluxTrainError, Interrupted
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import RunPhase, StepFinished
from fluxtrain.methods.engine import TrainingEngine, training_engine_of
from fluxtrain.methods.objective import B, BoundTask, Sampler
from fluxtrain.methods.optimizer import Optimizer, set_learning_rate
from fluxtrain.train.checkpoint.randomness import random_state, restore_random_state
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.checkpoint.writer import CheckpointWriter
from fluxtrain.train.evaluate import EarlyStopping, Evaluation, evaluate, evaluation_event
from fluxtrain.train.live.changes import LiveChanges
from fluxtrain.train.live.out_of_memory import gpu_of, out_of_memory
from fluxtrain.train.observe.disk_wait import DiskPace
from fluxtrain.train.observe.rank_steps import RankSteps
from fluxtrain.train.observe.step_clock import RecentSteps, StepClock
from fluxtrain.train.requests import Requests
from fluxtrain.train.step_outcome import Computed, QueuedStep, Refusals


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The settings of the loop, with nothing left automatic."""

    total_steps: int
    max_grad_norm: float | None
    evaluations: Cadence
    learning_rate_at: Callable[[int], float]  # of step 0, 1, ...
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    keeps_best: bool = False  # a checkpoint follows each evaluation that is the best so far
    samples: Sampler | None = None
    seed: int = 0  # of what ranks but the first draw
    disk_rates: tuple[float | None, float | None] = (None, None)  # read and written a second


class TrainingLoop(Generic[B]):
    """Runs steps until the last one, a stop, a divergence or an error that the user must act on."""

    def __init__(
        self,
        *,
        model: nn.Module,
        task: BoundTask[B],
        optimizer: Optimizer,
        settings: LoopSettings,
        checkpoints: CheckpointWriter,
        announcer: Announcer,
        requests: Requests,
        changes: LiveChanges,
        state: RunState,
        ranks: Ranks = ALONE,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._engine: TrainingEngine = training_engine_of(model)
        self._engine.retries_blocks = False  # steps are redone, which keeps the order of sums
        self._engine.exchange.agrees = True
        self._device = self._engine.device.torch_device
        self._recorder = self._engine.device.recorder
        self._optimizer = optimizer
        self._objective = task.objective
        self._data = task.data
        self._held_out = task.held_out
        self._settings = settings
        self._evaluations = settings.evaluations
        self._checkpoints = checkpoints
        self._announcer = announcer
        self._requests = requests
        self._changes = changes
        self._refusals = Refusals(
            model,
            task.objective,
            announcer,
            state,
            checkpoints.last_text,
            settings.total_steps,
        )
        self._progress = RecentSteps()
        self._rank_steps = RankSteps(ranks, self._engine)
        self._pace = DiskPace(self._engine.spill, *settings.disk_rates, announcer.warn)
        self._queued: QueuedStep | None = None  # its numbers are read once the next step is queued
        self._clock_before: StepClock | None = None  # of the step before the queued one
        self.state = state
        self.steps_s: list[float] = []  # of this process

    def run(self) -> None:
        """Train to the last step, or to where evaluations stop to improve, including its
        checkpoint and evaluation.

        Raises:
            Interrupted: a stop was requested; the checkpoint is written.
            Diverged: loss or norm were not finite in several steps; their updates were skipped.
            NoSpace: a checkpoint or the journal could not be written.
            DoesNotFit: device memory ran out, and no setting is left that would take less.
        """
        self._model.train()
        self._announcer.phase("training")
        if self.state.step > 0 and self._evaluations.is_due(self.state.step):
            self.evaluate()  # a stop cut it short before the checkpoint was written
        if self.state.step == 0:
            self._sample(evaluated=True)
        try:
            while self._goes_on():
                self._attend_requests()
                started_s = time.perf_counter()  # a pause is no part of a step
                self._recorder.begin_step(self._step_number + 1)
                self._keep_room()
                self._step()
                self._between_steps()
                self._progress.step_took(time.perf_counter() - started_s)
            self._report_queued()
            self._checkpoints.finish()
        except FluxTrainError:
            self._report_queued()  # the last step that was made, or why it was refused
            raise
        finally:
            self._checkpoints.close()
        self._changes.finish(self.state.step)
        self._engine.flush()
        self._recorder.end_step()
        if self.state.step < self._settings.total_steps:
            stopping = self._settings.early_stopping
            self._announcer.emit(stopping.event(self.state, self._settings.total_steps))
        self._stop_if_asked()

    def _goes_on(self) -> bool:
        more = self._step_number < self._settings.total_steps
        return more and not self._settings.early_stopping.is_reached(self.state)

    @property
    def _step_number(self) -> int:
        """Return the number of steps that are done or queued."""
        return self.state.step if self._queued is None else self._queued.number

    def evaluate(self) -> None:
        """Evaluate the model, unless it was evaluated after this step already."""
        if self.state.evaluated_step == self.state.step:
            return
        started_s = time.perf_counter()
        self._disturbed()
        self._announcer.phase("evaluating")
        with self._engine.evaluating(), self._recorder.as_one("evaluation"):  # in chunks
            result = self._evaluated_until_it_fits()
        self._engine.take_stalls()  # the stalls of the evaluation are not the next step's
        if result is not None:
            stopping = self._settings.early_stopping
            self.state.evaluated(result.loss, stopping.threshold)
            unit, patience = self._objective.unit, stopping.patience
            self._announcer.emit(evaluation_event(result, self.state, unit, patience))
        self._evaluations.done(self.state.step, time.perf_counter() - started_s)
        self._announcer.phase("training")

    def _evaluated_until_it_fits(self) -> Evaluation | None:
        """Evaluate, from the first batch again with less on the device when its memory runs out."""
        while True:
            started_s = time.perf_counter()
            try:
                return evaluate(
                    self._objective, self._model, self._held_out(), self._stopping, self._ranks,
                    in_lockstep=self._engine.in_lockstep, meet=self._engine.exchange.agree,
                )  # fmt: skip
            except (torch.OutOfMemoryError, RanOutElsewhere) as error:
                if not self._can_be_done_again(error):
                    raise self._out_of_memory(error) from error
                self._engine.begin_step_again()  # ranks have different blocks in their slots
                self._engine.free_gradients()  # none is open between steps
                self._make_room(error, time.perf_counter() - started_s, "the evaluation")

    def _step(self) -> None:
        """Queue one optimizer step, then read the numbers of the step before, so that the device
        need not wait while the host reads."""
        queued = self._compute_until_it_fits()
        self._optimizer.step()  # in the background; the next forward waits block by block
        self._forget_gradients()
        queued.clock.ends("optimizer")
        self._report_queued()
        self._queued = queued
        if self._reads_at_once():
            self._report_queued()

    def _forget_gradients(self) -> None:
        self._engine.forget_gradients()
        self._optimizer.zero_grad()  # of parameters outside all groups

    def _reads_at_once(self) -> bool:
        """Return whether a step's numbers are ready at once, as on the CPU."""
        return self._device.type == "cpu"

    def _compute_until_it_fits(self) -> QueuedStep:
        """Run forward and backward, again with smaller chunks when device memory runs out."""
        random, cursor = random_state(), self._data.state_dict()
        while True:
            started_s = time.perf_counter()
            clock = StepClock(self._device, self._recorder)
            try:
                queued = self._compute(clock)
                self._engine.exchange.agree()
                return queued
            except (torch.OutOfMemoryError, RanOutElsewhere) as error:
                if not self._can_be_done_again(error):
                    raise self._out_of_memory(error) from error
                # nothing was changed yet: weights move only after the norm is known
                self._engine.begin_step_again()
                self._forget_gradients()
                self._data.load_state_dict(cursor)
                restore_random_state(random)
                self._make_room(error, time.perf_counter() - started_s, "the step")

    def _can_be_done_again(self, error: Exception) -> bool:
        """Return whether no rank has updated anything in what has ended in `error`."""
        exchange = self._engine.exchange
        if exchange.ranks.world != self._ranks.world:  # FSDP2's: others are in mid-step
            return False
        if not isinstance(error, RanOutElsewhere):
            exchange.agree(ran_out=True)
        return not any(self._ranks.most([self._engine.partly_updated]))

    def _compute(self, clock: StepClock) -> QueuedStep:
        """Run forward and backward for all batches of a step, of which each rank has its share; the
        update waits for the norm."""
        objective, every = self._objective, self._data.next_step()
        step_count = sum(objective.count(batch) for batch in every)
        batches = self._ranks.own(every)
        if not self._ranks.is_first:  # a checkpoint has the generators of the first
            torch.manual_seed(hash((self._settings.seed, self._step_number, self._ranks.rank)))
        clock.ends("data")
        limit = self._settings.max_grad_norm
        scale = self._engine.loss_scale
        in_backward = limit is None and len(batches) == 1 and scale is None
        in_backward = in_backward and self._optimizer.updates_in_backward
        rate = self._settings.learning_rate_at(self._step_number)
        set_learning_rate(self._optimizer, rate)
        losses = []
        for number, batch in enumerate(batches, 1):
            self._engine.exchange.last_pass = number == len(batches)
            loss = objective.loss(self._model, batch, step_count)
            clock.ends("forward")
            if in_backward:
                self._optimizer.begin_in_backward(loss)
            losses.append(loss.detach())
            try:
                (loss if scale is None else scale.of(loss)).backward()
            except Diverged as error:  # an update in the backward pass refused the loss
                seen = f"the loss is {losses[-1]:g} at step {self._step_number + 1}"
                seen += f" (learning rate {rate:.3g}), first in "
                seen += self._refusals.broken_output(batches)
                raise Diverged(self._refusals.divergence(seen, "was not applied")) from error
            del loss  # or its graph would live until the end of the next forward pass
            clock.ends("backward")
        norm = self._engine.clip_grad_norm(limit, losses)
        norm.skips = not in_backward
        clock.ends("backward")
        return QueuedStep(
            number=self._step_number + 1,
            tokens=sum(objective.tokens(batch) for batch in every),
            epoch=self._data.epoch,
            learning_rate=rate,
            in_backward=in_backward,
            norm=norm,
            clock=clock,
            batches=batches,
        )

    def _report_queued(self) -> None:
        """Read and report the numbers of the queued step.

        Raises:
            Diverged: too many in a row are not finite; their updates were skipped.
        """
        queued, self._queued = self._queued, None
        if queued is None:
            return
        computed = queued.read()
        self._report(queued, computed, left_out=self._refusals.leaves_out(queued, computed))

    def _report(self, queued: QueuedStep, computed: Computed, *, left_out: bool) -> None:
        stalls = self._engine.take_stalls()
        step_s, phases = queued.clock.finish(self._clock_before)
        self._clock_before = queued.clock
        self.steps_s.append(step_s)
        self.state.step_done(computed.loss, queued.tokens, step_s)
        if not math.isfinite(computed.loss):  # a warning tells of the step
            self._announcer.at_step(self.state.step)
            return
        eta_s, spread_s = self._progress.eta(self._settings.total_steps - self.state.step)
        finished = StepFinished(
            step=self.state.step,
            total_steps=self._settings.total_steps,
            epoch=queued.epoch,
            loss=computed.loss,
            learning_rate=queued.learning_rate,
            grad_norm=None if left_out else computed.norm,
            tokens=queued.tokens,
            total_tokens=self.state.total_tokens,
            step_s=step_s,
            tokens_per_s=queued.tokens / step_s,
            phases_s=phases,
            stalls_s=stalls,
            eta_s=eta_s,
            eta_spread_s=spread_s,
            loss_scale=computed.loss_scale,
            left_out=left_out,
            ranks=self._rank_steps.rows,
        )
        own = sum(self._objective.tokens(batch) for batch in queued.batches)
        self._rank_steps.step_took(own, step_s, stalls)
        self._announcer.emit(finished)
        self._changes.step_took(finished)
        self._pace.step_done(self._settings.total_steps - self.state.step, eta_s)

    def _between_steps(self) -> None:
        self._checkpoints.poll(self._step_number)
        evaluates = self._evaluations.is_due(self._step_number)
        saves = self._checkpoints.is_due(self._step_number)
        samples = self._samples_are_due(evaluated=evaluates)
        evaluates, saves, samples = map(bool, self._ranks.most([evaluates, saves, samples]))
        if evaluates or saves or samples:
            self._report_queued()
        if evaluates:
            self.evaluate()
        if self._refusals.under_way and self._goes_on():
            saves = False  # the last good checkpoint stays the last one
        if saves or (evaluates and self._evaluation_asks_for_checkpoint()):
            self._checkpoint()
        if samples:
            self._sample(evaluated=evaluates)

    def _samples_are_due(self, *, evaluated: bool) -> bool:
        samples, total = self._settings.samples, self._settings.total_steps
        return samples is not None and samples.is_due(self._step_number, total, evaluated=evaluated)

    def _sample(self, *, evaluated: bool) -> None:
        """Answer the prompts of the run with the weights as they are now."""
        samples = self._settings.samples
        if samples is None or not self._samples_are_due(evaluated=evaluated):
            return
        started_s = time.perf_counter()
        self._disturbed()
        self._announcer.phase("evaluating", "samples")
        self._engine.flush()
        with self._recorder.as_one("samples"):
            samples.write(self.state.step, self._stopping)
        self._engine.take_stalls()
        if evaluated:
            self._evaluations.also_took(time.perf_counter() - started_s)
        self._announcer.phase("training")

    def _evaluation_asks_for_checkpoint(self) -> bool:
        """Return whether the evaluation of this step was the best, or ended the training."""
        is_best = self.state.best_step == self.state.step
        ended = self._settings.early_stopping.is_reached(self.state)
        return ended or (is_best and self._settings.keeps_best)

    def _checkpoint(self, then: RunPhase = "training") -> None:
        self._disturbed()
        self._announcer.phase("saving")
        self._engine.flush()
        background = then == "training" and self._goes_on()
        self._checkpoints.save(self.state, self._engine, self._data, background=background)
        self._announcer.phase(then)

    def _attend_requests(self) -> None:
        self._requests.agree(self._ranks)
        self._rank_steps.share()
        if self._requests.waiting or self._changes.waiting:
            self._report_queued()
        if self._requests.paused:
            self._wait_while_paused()
        self._stop_if_asked()
        if self._requests.take_checkpoint():
            self._checkpoint()
        if self._queued is None:  # or the change came just now, and waits for the next step
            self._changes.carry_out(self.state.step, self._checkpoints.wait_copied)

    def _keep_room(self) -> None:
        """Give up settings where other programs took device memory, before a step runs out of it;
        take them back once there is room again. Let states live on disk where the host's memory
        gets short."""
        if self._ranks.world > 1:  # which gather weights in one order
            return
        still = self._checkpoints.wait_copied
        self._changes.keep_room(self._step_number, self._engine.lacks_bytes(), still)
        lack_bytes = self._requests.take_host_lack()
        if lack_bytes and not self._changes.free_host(self._step_number, lack_bytes, still):
            self._requests.nothing_leaves_host()

    def _wait_while_paused(self) -> None:
        self._engine.flush()
        self._recorder.end_step()
        self._disturbed()
        self._announcer.phase("paused", f"after step {self.state.step}")
        while self._requests.paused:
            if self._requests.take_checkpoint():
                self._checkpoint(then="paused")
            self._checkpoints.wait_copied()
            self._checkpoints.poll(self._step_number)
            self._changes.carry_out(self.state.step, self._checkpoints.wait_copied)
            self._requests.wait_for_change()
            self._requests.agree(self._ranks)
        self._announcer.phase("training")

    def _disturbed(self) -> None:
        """Note that something other than a step happens: the next step is timed separately."""
        self._changes.disturbed()
        self._clock_before = None

    def _stopping(self) -> bool:
        return self._requests.stop_code is not None

    def _stop_if_asked(self) -> None:
        code = self._requests.stop_code
        if code is None:
            return
        self._announcer.phase("stopping", "a checkpoint is written first")
        self._engine.flush()
        if self.state.step > 0:
            self._checkpoints.write(self.state, self._engine, self._data)
        last = self._checkpoints.last_text()
        if self._requests.lack:
            raise DoesNotFit(f"{self._requests.lack}; {last}")
        raise Interrupted(last, code)  # the end of the run tells the step

    def _out_of_memory(self, error: Exception) -> DoesNotFit:
        return out_of_memory(self._engine, self._step_number, error, self._checkpoints.last_text())

    def _make_room(self, error: Exception, lost_s: float, what: str) -> None:
        """Give something up on every rank; raise DoesNotFit where one that ran out has nothing."""
        self._checkpoints.wait_copied()
        step, trains = self._step_number, what == "the step"
        others = any(lack > 0 for lack in self._engine.lacks_bytes())
        elsewhere = isinstance(error, RanOutElsewhere)
        given_up = self._changes.make_room(
            step, lost_s, gpu_of(error), backward=trains, others=others,
            ranks=self._ranks, alike=self._engine.in_lockstep, elsewhere=elsewhere,
        )  # fmt: skip
        if any(self._ranks.most([given_up is None and not elsewhere])):
            self._report_queued()
            if not self._refusals.under_way:
                self._checkpoints.write_last(self.state, self._engine, self._data)
            raise self._out_of_memory(error) from error
        when = f"at step {step + 1}" if trains else f"after step {step}"
        told = str(error) if elsewhere else "device memory ran out"
        self._announcer.warn(f"{told} {when}: {what} is done again with {given_up or 'less there'}")
