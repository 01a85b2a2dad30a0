"""Prints a run's events: plain lines for people, or the events themselves for programs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import singledispatch

from fluxtrain.events.events import (
    AdviceGiven,
    ChangeApplied,
    ChangeMeasured,
    ChangeRefused,
    CheckpointWritten,
    Done,
    EvaluationFinished,
    Event,
    Hello,
    LogWritten,
    PhaseChanged,
    PlanChecked,
    Planned,
    SampleGenerated,
    StepFinished,
    StoppedEarly,
)
from fluxtrain.events.frames import encode_frame
from fluxtrain.events.printable import printable_lines, quoted
from fluxtrain.events.run_folder.states import state_of_exit
from fluxtrain.events.typed import typed_line
from fluxtrain.units import (
    bytes_text,
    count_text,
    duration_text,
    loss_text,
    number_text,
    power_text,
    predicted_text,
    speed_text,
)

STEP_LINES_PERIOD_S = 2.0


class PlainConsole:
    """Prints a line an event; for fast steps, one line every two seconds."""

    def __init__(
        self,
        write: Callable[[str], None],
        period_s: float = STEP_LINES_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._period_s = period_s
        self._clock = clock
        self._due_s = clock()

    def __call__(self, event: Event) -> None:
        """Show `event` if it is worth a line."""
        if isinstance(event, StepFinished) and not self._step_is_due(event):
            return
        text = line(event)
        if text:
            self._write(text)

    def _step_is_due(self, event: StepFinished) -> bool:
        now = self._clock()
        if now < self._due_s and 1 < event.step < event.total_steps and not event.left_out:
            return False
        self._due_s = now + self._period_s
        return True


class JsonConsole:
    """Prints every lifecycle event as one line of NDJSON."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def __call__(self, event: Event) -> None:
        """Write `event`."""
        self._write(encode_frame(event).decode("utf-8").rstrip("\n"))


def line(event: Event) -> str | None:
    """Return `event` as text that a terminal can show; None if it is not for the console."""
    text = _text(event)
    return None if text is None else printable_lines(text)


@singledispatch
def _text(_event: Event) -> str | None:
    return None


def to_standard_output(text: str) -> None:
    """Print and flush. A reader that went away, or a full disk behind it, does not end a run."""
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:
        logging.getLogger(__name__).debug("standard output is gone: %s", error)
        sys.stdout = sys.__stderr__ or sys.stdout


@_text.register
def _hello(event: Hello) -> str | None:
    if not event.parameters:
        return f"fluxtrain {event.version}: {event.model}, method {event.method}, {event.machine}"
    again = f", going on after step {event.first_step}" if event.first_step else ""
    return (
        f"{event.model}: {count_text(event.parameters)} parameters in {event.blocks} blocks, "
        f"{event.dtype} on {event.device}, {event.total_steps} steps{again}"
    )


@_text.register
def _planned(event: Planned) -> str:
    lines = [
        f"plan: offload {event.offload}, {event.batch_rows} x {event.accumulation} rows of "
        f"{event.sequence_length} tokens a step, chunks of {event.chunk_rows}; device memory "
        f"{bytes_text(event.device_bytes)}, host memory {bytes_text(event.host_bytes)}"
    ]
    if event.step_s is not None:
        rate = f"{count_text(event.tokens_per_s)} tokens/s, " * (event.timing == "measured")
        lines.append(
            f"  predicted: {predicted_text(event.step_s, event.timing)} a step, {rate}"
            f"{predicted_text(event.eta_s, event.timing)} in all, "
            f"bound by {event.binds}; from {event.constants}"
        )
    lines += [f"  {c.name} = {c.value}: {c.because}" for c in event.choices]
    return "\n".join(lines)


@_text.register
def _plan_checked(event: PlanChecked) -> str | None:
    known = [row for row in event.rows if row.error is not None]
    parts = [
        f"{_QUANTITIES.get(row.quantity, row.quantity)} {_amount(row.quantity, row.predicted)} and "
        f"{_amount(row.quantity, row.measured)} ({row.error:+.1%})"
        for row in known
    ]
    return f"predicted and measured: {'; '.join(parts)}" if parts else None


def _amount(quantity: str, value: float | None) -> str:
    return bytes_text(value) if quantity.endswith("_bytes") else duration_text(value)


_QUANTITIES = {
    "device_peak_bytes": "device memory",
    "host_peak_bytes": "host memory",
    "step_s": "a step",
}


@_text.register
def _step(event: StepFinished) -> str:
    if event.left_out and event.loss_scale is None:
        told = f"step {event.step}/{event.total_steps}  loss {loss_text(event.loss)}"
        return f"{told}  skipped: its gradients are not finite"
    if event.left_out:
        return (
            f"step {event.step}/{event.total_steps}  loss {loss_text(event.loss)}  left out: "
            f"gradients overflowed at loss scale {event.loss_scale:,.0f}, which is halved"
        )
    left = f", {duration_text(event.eta_s)} left" if event.eta_s else ""
    norm = number_text(event.grad_norm, 3)
    rate = f"{count_text(event.tokens_per_s)} tokens/s  " if event.tokens else ""
    return (
        f"step {event.step}/{event.total_steps}  loss {loss_text(event.loss)}  lr "
        f"{power_text(event.learning_rate)}  norm {norm}  {rate}"
        f"{duration_text(event.step_s)} a step{left}"
    )


@_text.register
def _evaluation(event: EvaluationFinished) -> str:
    further = "".join(f", {n} {v:.4g}" for n, v in event.metrics.items() if n != "loss")
    return (
        f"evaluation at step {event.step}: loss {loss_text(event.loss)}{further} over "
        f"{count_text(event.count)} {event.unit} in {duration_text(event.seconds)}"
        f"{_beside_the_best(event)}"
    )


def _beside_the_best(event: EvaluationFinished) -> str:
    """Compare an evaluation with the best one; "" for the first."""
    if event.best_step is None or event.best_loss is None:
        return ""
    if event.best_step == event.step:
        text = ", the best so far"
    else:
        text = f"; the best is {event.best_loss:.4f} at step {event.best_step}"
    if event.patience is not None and event.stale:
        text += f"; {event.stale} of {event.patience} evaluations without an improvement"
    return text


@_text.register
def _stopped_early(event: StoppedEarly) -> str:
    than = f" by more than {event.threshold:g}" if event.threshold else ""
    best = "" if event.best_loss is None else (
        f"; the best was {event.best_loss:.4f} at step {event.best_step}"
    )  # fmt: skip
    return (
        f"stopped early after step {event.step} of {event.total_steps}: {event.stale} evaluations "
        f"did not improve{than}{best}"
    )


@_text.register
def _checkpoint(event: CheckpointWritten) -> str:
    size, spent = bytes_text(event.bytes), duration_text(event.seconds)
    held = "" if event.held_s is None else f", {duration_text(event.held_s)} of them held up"
    return f"checkpoint of step {event.step}: {event.path} ({size} in {spent}{held})"


@_text.register
def _sample(event: SampleGenerated) -> str:
    words = f"{quoted(event.prompt)} -> {quoted(event.text)}"
    if event.seconds is None:
        return f"sample: {words}"
    took = f" in {duration_text(event.seconds)}" if event.number == event.count else ""
    return f"sample {event.number} of {event.count} at step {event.step}{took}: {words}"


@_text.register
def _advice(event: AdviceGiven) -> str:
    gain = f" ({event.gain})" if event.gain else ""
    return f"advice: {event.text}: {event.how}{gain}"


@_text.register
def _changed(event: ChangeApplied) -> str:
    reasons = {
        "asked": "as asked", "advice": "as advised", "undo": "undone",
        "wrong": "undone: it gave less than half of what was promised",
        "memory": "device memory ran out",
        "room": "the memory is there again",
        "host": "host memory is short",
    }  # fmt: skip
    where = "" if event.card is None else f" on card {event.card}"
    return (
        f"after step {event.step}: {event.name} {event.before} -> {event.after}{where} "
        f"({reasons[event.why]})"
    )


@_text.register
def _change_refused(event: ChangeRefused) -> str:
    return f"after step {event.step}: {event.name}={event.value} was not made: {event.because}"


@_text.register
def _change_measured(event: ChangeMeasured) -> str:
    change = f"{event.name} {event.before} -> {event.after}"
    if event.measured_gain is None:
        return f"{change}: too few steady steps to measure it"
    promised = "" if event.predicted_gain is None else f", {event.predicted_gain:+.1%} predicted"
    found = speed_text(event.measured_gain)
    return (
        f"{change}: {found}{promised} ({duration_text(event.before_s)} -> "
        f"{duration_text(event.after_s)} a step, medians of {event.steps_before} and "
        f"{event.steps_after})"
    )


@_text.register
def _log(event: LogWritten) -> str:
    return f"{event.level}: {event.text}"


@_text.register
def _phase(event: PhaseChanged) -> str | None:
    quiet = event.phase in ("training", "evaluating", "saving", "failed", "finished")
    return None if quiet else f"{event.phase}{f': {event.detail}' if event.detail else ''}"


@_text.register
def _done(event: Done) -> str:
    loss = loss_text(event.loss)
    held_out = loss_text(event.evaluation_loss)
    ended = state_of_exit(event.exit_code)
    when = f"after step {event.step}" if event.step else "before the first step"
    text = (
        f"{ended} {when} in {duration_text(event.seconds)}: loss {loss}, evaluation loss {held_out}"
    )
    if event.model_path:
        text += f"\nmodel: {event.model_path}{_whose_weights(event)}"
    if event.resume_with:
        text += f"\nto go on: {typed_line(event.resume_with)}"
    return text


def _whose_weights(event: Done) -> str:
    """Say which step the saved model is of, where it is not plain that it is the best one."""
    if event.model_step is None or event.best_step is None or event.best_loss is None:
        return ""
    best = f"evaluation, {event.best_loss:.4f}"
    if event.model_step == event.best_step:
        last = "the last, and " if event.model_step == event.step else ""
        return f" (step {event.model_step}, {last}the best {best})"
    return (
        f" (step {event.model_step}, the last; the best {best}, was at step {event.best_step}: "
        "train.final_model=best saves that one)"
    )
