"""The training loop: the sentence that describes a run, and what happens between two steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fluxtrain.data.batches import Batch, BatchSource
from fluxtrain.errors import Diverged, DoesNotFit, Interrupted
from fluxtrain.stream.engine import engine_of
from fluxtrain.telemetry.events import EvaluationFinished, RunPhase, StepFinished
from fluxtrain.train.announce import Announcer
from fluxtrain.train.cadence import Cadence
from fluxtrain.train.evaluate import evaluate
from fluxtrain.train.keeping import CheckpointKeeper
from fluxtrain.train.live import LiveChanges
from fluxtrain.train.progress import Progress
from fluxtrain.train.randomness import random_state, restore_random_state
from fluxtrain.train.requests import Requests
from fluxtrain.train.run_state import RunState
from fluxtrain.train.step_clock import StepClock


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The numbers of the loop, all of them resolved."""

    total_steps: int
    max_grad_norm: float | None
    evaluations: Cadence
    learning_rate_at: Callable[[int], float]  # of step 0, 1, ...


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What forward and backward gave: loss in nats a token, norm before clipping, tokens seen."""

    loss: float
    norm: float
    tokens: int


class TrainingLoop:
    """Runs steps until the last, a stop, a divergence or an error that the user must act on."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: BatchSource,
        held_out: Callable[[], Iterable[Batch]],
        settings: LoopSettings,
        keeper: CheckpointKeeper,
        announcer: Announcer,
        requests: Requests,
        changes: LiveChanges,
        state: RunState,
    ) -> None:
        self._model = model
        self._engine = engine_of(model)
        self._device = self._engine.device.torch_device
        self._recorder = self._engine.device.recorder
        self._optimizer = optimizer
        self._data = data
        self._held_out = held_out
        self._settings = settings
        self._evaluations = settings.evaluations
        self._keeper = keeper
        self._announcer = announcer
        self._requests = requests
        self._changes = changes
        self._progress = Progress()
        self.state = state
        self.steps_s: list[float] = []  # of this process

    def run(self) -> None:
        """Train to the last step; its checkpoint and evaluation are done when this returns.

        Raises:
            Interrupted: a stop was asked for; the checkpoint is written.
            Diverged: before the update that would have spread it.
            NoSpace: a checkpoint or the journal could not be written.
            DoesNotFit: memory ran out with one row at a time.
        """
        self._model.train()
        self._announcer.phase("training")
        if self.state.step > 0 and self._evaluations.is_due(self.state.step):
            self.evaluate()  # a stop cut it short before the checkpoint that this run resumed from
        while self.state.step < self._settings.total_steps:
            started_s = time.perf_counter()
            self._attend_requests()
            self._recorder.begin_step(self.state.step + 1)
            self._step()
            self._between_steps()
            self._progress.step_took(time.perf_counter() - started_s)
        self._changes.finish(self.state.step)
        self._engine.flush()
        self._recorder.end_step()
        self._stop_if_asked()

    def evaluate(self) -> None:
        """Evaluate the model as it is, unless this step was evaluated before."""
        if self.state.evaluated_step == self.state.step:
            return
        started_s = time.perf_counter()
        self._changes.disturbed()
        self._announcer.phase("evaluating")
        # the loss in chunks, or logits would not fit
        with self._engine.evaluating(), self._recorder.as_one("evaluation"):
            result = evaluate(self._model, self._held_out(), self._stopping)
        self._engine.take_stalls()  # they are not the next step's
        if result is not None:
            self.state.evaluated(result.loss)
            self._announcer.emit(
                EvaluationFinished(
                    step=self.state.step,
                    loss=result.loss,
                    tokens=result.tokens,
                    seconds=result.seconds,
                )
            )
        self._evaluations.done(self.state.step, time.perf_counter() - started_s)
        self._announcer.phase("training")

    def _step(self) -> None:
        """One optimizer step; its forward and backward again when device memory runs out."""
        random, cursor = random_state(), self._data.state_dict()
        while True:
            started_s = time.perf_counter()
            clock = StepClock(self._device, self._recorder)
            try:
                computed = self._compute(clock)
                break
            except torch.OutOfMemoryError as error:
                if self._engine.partly_updated:
                    raise DoesNotFit(self._out_of_memory(error)) from error
                # nothing was changed yet: weights move only after the norm is known
                self._optimizer.zero_grad()
                self._halve_chunk(error, time.perf_counter() - started_s)
                self._data.load_state_dict(cursor)
                restore_random_state(random)
        rate = self._set_learning_rate()
        self._refuse_divergence(computed)
        self._optimizer.step()  # in the background; the next forward waits block by block
        self._optimizer.zero_grad()
        clock.ends("optimizer")
        self._report(clock, computed, rate)

    def _compute(self, clock: StepClock) -> Computed:
        """Forward and backward over the whole step; the norm waits for the last gradient."""
        batches = self._data.next_step()
        clock.ends("data")
        losses = []
        for batch in batches:
            loss = self._model(**batch.inputs()).loss
            clock.ends("forward")
            if self._settings.max_grad_norm is None and len(batches) == 1:
                self._begin_eager_step(loss)
            loss.backward()
            losses.append(loss.detach())
            clock.ends("backward")
        norm = self._engine.clip_grad_norm(self._settings.max_grad_norm)
        computed = Computed(
            # each part is divided by the tokens of the whole step already
            loss=math.fsum(float(loss) for loss in losses),
            norm=norm.value(),
            tokens=sum(batch.tokens for batch in batches),
        )
        clock.ends("backward")
        return computed

    def _begin_eager_step(self, loss: torch.Tensor) -> None:
        """Without clipping nothing has to wait for the norm: groups are updated as their gradients
        arrive. What can be refused is refused before."""
        self._set_learning_rate()
        if not math.isfinite(float(loss.detach())):
            raise Diverged(self._divergence(float(loss.detach()), math.nan))
        self._engine.begin_eager_step(self._optimizer)

    def _report(self, clock: StepClock, computed: Computed, rate: float) -> None:
        stalls = self._engine.take_stalls()
        step_s, phases = clock.finish()
        self.steps_s.append(step_s)
        self.state.step_done(computed.loss, computed.tokens, step_s)
        eta_s, spread_s = self._progress.eta(self._settings.total_steps - self.state.step)
        finished = StepFinished(
            step=self.state.step,
            total_steps=self._settings.total_steps,
            epoch=self._data.epoch,
            loss=computed.loss,
            learning_rate=rate,
            grad_norm=computed.norm,
            tokens=computed.tokens,
            total_tokens=self.state.total_tokens,
            step_s=step_s,
            tokens_per_s=computed.tokens / step_s,
            phases_s=phases,
            stalls_s=stalls,
            eta_s=eta_s,
            eta_spread_s=spread_s,
        )
        self._announcer.emit(finished)
        self._changes.step_took(finished)

    def _between_steps(self) -> None:
        if self._evaluations.is_due(self.state.step):
            self.evaluate()
        if self._keeper.is_due(self.state.step):
            self._checkpoint()

    def _checkpoint(self, then: RunPhase = "training") -> None:
        self._changes.disturbed()
        self._announcer.phase("saving")
        self._engine.flush()
        self._keeper.write(self.state, self._engine, self._data)
        self._announcer.phase(then)

    def _attend_requests(self) -> None:
        if self._requests.paused:
            self._wait_while_paused()
        self._stop_if_asked()
        if self._requests.take_checkpoint():
            self._checkpoint()
        self._changes.carry_out(self.state.step)

    def _wait_while_paused(self) -> None:
        self._engine.flush()
        self._recorder.end_step()
        self._changes.disturbed()
        self._announcer.phase("paused", f"after step {self.state.step}")
        while self._requests.paused:
            if self._requests.take_checkpoint():
                self._checkpoint(then="paused")
            self._changes.carry_out(self.state.step)
            self._requests.wait_for_change()
        self._announcer.phase("training")

    def _stopping(self) -> bool:
        return self._requests.stop_code is not None

    def _stop_if_asked(self) -> None:
        code = self._requests.stop_code
        if code is None:
            return
        self._announcer.phase("stopping", "a checkpoint is written first")
        self._engine.flush()
        if self.state.step > 0:
            self._keeper.write(self.state, self._engine, self._data)
        raise Interrupted(f"stopped after step {self.state.step}: {self._keeper.last_text()}", code)

    def _set_learning_rate(self) -> float:
        rate = self._settings.learning_rate_at(self.state.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _refuse_divergence(self, computed: Computed) -> None:
        if not (math.isfinite(computed.loss) and math.isfinite(computed.norm)):
            raise Diverged(self._divergence(computed.loss, computed.norm))

    def _divergence(self, loss: float, norm: float) -> str:
        applied = "was applied in part" if self._engine.partly_updated else "was not applied"
        rate = self._optimizer.param_groups[0]["lr"]
        return (
            f"the loss is {loss:g} and the gradient norm {norm:g} at step {self.state.step + 1} "
            f"(learning rate {rate:.3g}): this update {applied}; "
            f"{self._keeper.last_text()}; lower train.learning_rate, lengthen train.warmup_steps, "
            "or look for broken rows in the data"
        )

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        return (
            f"device memory ran out at step {self.state.step + 1} with chunks of "
            f"{self._engine.chunk_rows} rows ({str(error).splitlines()[0]}): set a smaller "
            "placement.chunk_rows, shorten data.sequence_length, set placement.offload=max, or "
            f"close other programs; {self._keeper.last_text()}"
        )

    def _halve_chunk(self, error: torch.OutOfMemoryError, lost_s: float) -> None:
        rows = self._engine.chunk_rows
        if rows <= 1:
            raise DoesNotFit(self._out_of_memory(error)) from error
        self._engine.chunk_rows = rows // 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._announcer.warn(
            f"device memory ran out at step {self.state.step + 1}: the step is done again with "
            f"chunks of {rows // 2} rows instead of {rows}"
        )
        self._changes.ran_out(self.state.step, rows, lost_s)
