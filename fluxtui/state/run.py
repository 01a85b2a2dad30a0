"""`FoldedRun`: everything known about a run, folded from its events one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import field
from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtrain.events.events import setting_name
from fluxtrain.events.printable import quoted
from fluxtrain.events.run_folder.states import state_of_exit
from fluxtrain.units import bytes_text, duration_text, loss_text, speed_text
from fluxtui.state.changes import Changes, with_advice, without_advice
from fluxtui.state.freshness import SteadyClock
from fluxtui.state.history import Curve, History, spaced
from fluxtui.state.samples import Rounds, until, with_sample
from fluxtui.words import counted

Level = Literal["debug", "info", "warning", "error"]
LOG_LIMIT = 2000
MOVES_LIMIT = 512
RATES_LIMIT = 1200
STEPS_LIMIT = 256
LATEST_WALL_S = 1e11  # the year 5138: a clock beyond it is broken


@dataclass(frozen=True, slots=True)
class LogLine:
    """One entry of the log, in words."""

    wall_s: float
    level: Level
    kind: str  # log, phase, checkpoint, evaluation, advice, change, command, sample, failed, done
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """A measured value at a wall clock time."""

    wall_s: float
    value: float


def _curve() -> Curve:
    return Curve()


class FoldedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run as its events tell it. `after` gives the next state and changes nothing."""

    hello: ev.Hello | None = None
    planned: ev.Planned | None = None
    checked: ev.PlanChecked | None = None  # the plan against what was measured, at the end
    phase: ev.PhaseChanged | None = None
    step: ev.StepFinished | None = None
    memory: ev.MemorySampled | None = None
    traffic: ev.TrafficSampled | None = None
    residency: ev.ResidencySampled | None = None
    made: ev.MovesMade | None = None
    heartbeat: ev.Heartbeat | None = None
    evaluation: ev.EvaluationFinished | None = None
    checkpoint: ev.CheckpointWritten | None = None
    sample: ev.SampleGenerated | None = None
    samples: Rounds = ()
    failed: ev.Failed | None = None
    done: ev.Done | None = None
    answer: ev.CommandAnswered | None = None
    loss: Curve = field(default_factory=_curve)
    grad_norm: Curve = field(default_factory=_curve)
    learning_rate: Curve = field(default_factory=_curve)
    tokens: Curve = field(default_factory=_curve)  # trained by the end of a step
    evaluations: History[tuple[int, float]] = field(default_factory=lambda: History(1024))
    steps: History[ev.StepFinished] = field(default_factory=lambda: History(STEPS_LIMIT))
    memories: History[ev.MemorySampled] = field(default_factory=lambda: History(RATES_LIMIT))
    traffics: History[ev.TrafficSampled] = field(default_factory=lambda: History(RATES_LIMIT))
    move_counts: History[Point] = field(default_factory=lambda: History(RATES_LIMIT))
    moves: History[ev.Move] = field(default_factory=lambda: History(MOVES_LIMIT))
    moves_told: int = 0  # of this process; it makes more moves than it tells
    log: History[LogLine] = field(default_factory=lambda: History(LOG_LIMIT))
    advice: tuple[ev.AdviceGiven, ...] = ()
    advised: bool = False  # by the newest process; it may have taken all of it back
    changes: Changes = field(default_factory=Changes)
    processes: int = 0  # how many trainers wrote to this journal: more than one after a resume
    seen: int = 0
    dropped: int = 0
    last_wall_s: float | None = None
    started_wall_s: float | None = None  # of the newest process
    clock: SteadyClock = SteadyClock()  # of the newest process: all times are by it
    set_by_s: float = 0.0  # how much the wall clock was set since that process began

    def after(self, event: ev.AnyEvent) -> FoldedRun:
        """Return the state after `event`."""
        if not abs(event.wall_s) < LATEST_WALL_S:
            event = replace(event, wall_s=self.last_wall_s or 0.0)
        clock = self.clock.after(event)
        told_s, before = event.wall_s, self
        if (steady_s := clock.time_of(event)) != told_s:
            event = replace(event, wall_s=steady_s)
        if clock is not self.clock or told_s - steady_s != self.set_by_s:
            before = replace(self, clock=clock, set_by_s=told_s - steady_s)
        fold = _FOLDS.get(type(event))
        state = fold(before, event) if fold else before
        return replace(
            state, seen=self.seen + 1, dropped=max(self.dropped, event.dropped)
            if not isinstance(event, ev.Hello) else event.dropped,
            last_wall_s=max(self.last_wall_s or 0.0, event.wall_s),
        )  # fmt: skip

    def after_all(self, batch: Iterable[ev.AnyEvent]) -> FoldedRun:
        """Return the state after each event of `batch` in turn."""
        state = self
        for event in batch:
            state = state.after(event)
        return state

    @property
    def best(self) -> tuple[int, float] | None:
        """Return the step of the lowest evaluation loss, and the loss; never of the
        training loss."""
        told = self.evaluation
        if told is not None and told.best_step is not None and told.best_loss is not None:
            return told.best_step, told.best_loss
        known = [pair for pair in self.evaluations if math.isfinite(pair[1])]  # of older runs
        return min(known, key=lambda pair: pair[1], default=None)

    @property
    def makes_images(self) -> bool:
        """Return whether the run trains on pairs of images, and not on text."""
        sampled = self.sample is not None and bool(self.sample.path)
        return sampled or (self.evaluation is not None and self.evaluation.unit == "pairs")

    @property
    def moves_are_a_sample(self) -> bool:
        """Return whether the trainer made more moves than it reported."""
        return self.made is not None and self.made.total > self.moves_told

    @property
    def moves_per_minute(self) -> float | None:
        """Return the moves a minute, from the trainer's totals over the last minute of samples."""
        points = list(self.move_counts)
        if len(points) < 2:
            return None
        last = points[-1]
        first = next(p for p in points if 0.0 <= last.wall_s - p.wall_s <= 60.0)
        spent = last.wall_s - first.wall_s
        return (last.value - first.value) / spent * 60.0 if spent > 0 else None


def _logged(state: FoldedRun, event: ev.Event, level: Level, kind: str, text: str) -> FoldedRun:
    wall_s = event.wall_s + state.set_by_s  # as the clock on the wall told it
    return replace(state, log=state.log.appended(LogLine(wall_s, level, kind, text)))


def _rewound(state: FoldedRun, step: int) -> FoldedRun:
    """Drop everything after `step`: a resumed process repeats those steps."""
    evaluations: History[tuple[int, float]] = History(state.evaluations.limit)
    for pair in state.evaluations:
        evaluations = evaluations.appended(pair) if pair[0] <= step else evaluations
    steps: History[ev.StepFinished] = History(state.steps.limit)
    for old in state.steps:
        steps = steps.appended(old) if old.step <= step else steps
    evaluation = state.evaluation
    return replace(
        state,
        step=steps.newest,
        steps=steps,
        loss=state.loss.until(step),
        grad_norm=state.grad_norm.until(step),
        learning_rate=state.learning_rate.until(step),
        tokens=state.tokens.until(step),
        evaluations=evaluations,
        samples=until(state.samples, step),
        evaluation=evaluation if evaluation and evaluation.step <= step else None,
    )


def _after_hello(state: FoldedRun, event: ev.Hello) -> FoldedRun:
    """Begin new samples for a new process.

    A process sends a second hello once it has read model and checkpoint.
    """
    known = state.hello
    if event.first_step:
        state = _rewound(state, event.first_step)
    if known is not None and (known.pid, known.pid_start_s) == (event.pid, event.pid_start_s):
        state = replace(state, hello=event)
        if event.first_step == known.first_step:
            return state
        return _logged(state, event, "info", "phase", f"goes on after step {event.first_step}")
    state = replace(
        state,
        hello=event,
        processes=state.processes + 1,
        started_wall_s=event.wall_s,
        planned=None,
        checked=None,
        phase=None,
        memory=None,
        traffic=None,
        residency=None,
        made=None,
        advice=(),
        advised=False,
        changes=Changes(),
        heartbeat=None,
        failed=None,
        done=None,
        move_counts=History(RATES_LIMIT),
        moves_told=0,
    )
    text = f"{event.model} on {event.device}, process {event.pid}"
    how = f"going on after step {event.first_step}" if event.first_step else "started"
    return _logged(state, event, "info", "phase", f"{how}: {text}")


def _after_planned(state: FoldedRun, event: ev.Planned) -> FoldedRun:
    text = (
        f"planned: offload {event.offload}, batch of {counted(event.batch_rows, 'row')} "
        f"in chunks of {event.chunk_rows}"
    )
    choices = tuple(replace(one, name=setting_name(one.name)) for one in event.choices)
    planned = replace(event, choices=choices)
    return _logged(replace(state, planned=planned), event, "info", "phase", text)


def _after_phase(state: FoldedRun, event: ev.PhaseChanged) -> FoldedRun:
    text = f"{event.phase}: {event.detail}" if event.detail else event.phase
    return _logged(replace(state, phase=event), event, "info", "phase", text)


def _after_step(state: FoldedRun, event: ev.StepFinished) -> FoldedRun:
    newest = state.steps.newest
    if newest is not None and newest.step >= event.step:
        state = _rewound(state, event.step - 1)
    grad_norm = state.grad_norm
    if event.grad_norm is not None:
        grad_norm = grad_norm.with_value(event.step, event.grad_norm)
    return replace(
        state,
        step=event,
        steps=state.steps.appended(event),
        loss=state.loss.with_value(event.step, event.loss),
        learning_rate=state.learning_rate.with_value(event.step, event.learning_rate),
        tokens=state.tokens.with_value(event.step, float(event.total_tokens)),
        grad_norm=grad_norm,
    )


def _after_memory(state: FoldedRun, event: ev.MemorySampled) -> FoldedRun:
    return replace(state, memory=event, memories=spaced(state.memories, event))


def _after_traffic(state: FoldedRun, event: ev.TrafficSampled) -> FoldedRun:
    return replace(state, traffic=event, traffics=spaced(state.traffics, event))


def _after_moves(state: FoldedRun, event: ev.MovesMade) -> FoldedRun:
    moves = state.moves
    for move in event.moves:
        moves = moves.appended(move)
    counts = state.move_counts.appended(Point(event.wall_s, float(event.total)))
    told = state.moves_told + len(event.moves)
    return replace(state, made=event, moves=moves, move_counts=counts, moves_told=told)


def _after_evaluation(state: FoldedRun, event: ev.EvaluationFinished) -> FoldedRun:
    points = state.evaluations.appended((event.step, event.loss))
    best = ", the best so far" if event.best_step == event.step else ""
    took = duration_text(event.seconds)
    text = f"step {event.step}: held-out loss {loss_text(event.loss)} in {took}{best}"
    state = replace(state, evaluation=event, evaluations=points)
    return _logged(state, event, "info", "evaluation", text)


def _after_early_stop(state: FoldedRun, event: ev.StoppedEarly) -> FoldedRun:
    text = f"stopped early after step {event.step}: {event.stale} evaluations did not improve"
    if event.best_loss is not None:
        text += f"; the best was {loss_text(event.best_loss)} at step {event.best_step}"
    return _logged(state, event, "info", "evaluation", text)


def _after_checkpoint(state: FoldedRun, event: ev.CheckpointWritten) -> FoldedRun:
    text = (
        f"step {event.step}: checkpoint of {bytes_text(event.bytes)} "
        f"in {duration_text(event.seconds)}"
    )
    if event.held_s is not None:
        text += f", {duration_text(event.held_s)} of them held up"
    return _logged(replace(state, checkpoint=event), event, "info", "checkpoint", text)


def _after_sample(state: FoldedRun, event: ev.SampleGenerated) -> FoldedRun:
    text = f"step {event.step}: {quoted(event.prompt)} -> {quoted(event.text)}"
    state = replace(state, sample=event, samples=with_sample(state.samples, event))
    return _logged(state, event, "info", "sample", text)


def _after_advice(state: FoldedRun, event: ev.AdviceGiven) -> FoldedRun:
    state = replace(state, advice=with_advice(state.advice, event), advised=True)
    return _logged(state, event, "info", "advice", event.text)


def _after_withdrawn(state: FoldedRun, event: ev.AdviceWithdrawn) -> FoldedRun:
    return replace(state, advice=without_advice(state.advice, event.id))


def _as_changed(planned: ev.Planned | None, change: ev.ChangeApplied) -> ev.Planned | None:
    """Update the plan with the present prediction; older runs do not report one."""
    if planned is None or change.device_bytes is None:
        return planned
    return replace(
        planned,
        device_bytes=change.device_bytes,
        host_bytes=change.host_bytes,
        step_s=change.step_s,
        tokens_per_s=change.tokens_per_s,
        binds=change.binds,
    )


def _after_change(state: FoldedRun, event: ev.ChangeApplied) -> FoldedRun:
    reason = {"advice": "as advised", "undo": "undone", "wrong": "undone, it gave too little",
              "memory": "device memory ran out",
              "room": "the memory is there again",
              "host": "host memory is short"}.get(event.why, "as asked")  # fmt: skip
    where = "" if event.card is None else f" on card {event.card}"
    change = f"{event.name} {event.before} -> {event.after}{where}"
    text = f"after step {event.step}: {change}, {reason}"
    planned = _as_changed(state.planned, event)
    state = replace(state, planned=planned, changes=state.changes.made(event))
    return _logged(state, event, "info", "change", text)


def _after_refusal(state: FoldedRun, event: ev.ChangeRefused) -> FoldedRun:
    text = f"after step {event.step}: {event.name}={event.value} was not made: {event.because}"
    state = replace(state, changes=state.changes.not_made(event))
    return _logged(state, event, "warning", "change", text)


def _after_measured(state: FoldedRun, event: ev.ChangeMeasured) -> FoldedRun:
    found = event.measured_gain
    gain = "too few steps to tell" if found is None else speed_text(found)
    promised = "" if event.predicted_gain is None else f", {event.predicted_gain:+.1%} predicted"
    text = f"{event.name} {event.before} -> {event.after}: {gain}{promised}"
    state = replace(state, changes=state.changes.verdict(event))
    return _logged(state, event, "warning" if event.verdict == "wrong" else "info", "change", text)


def _after_log(state: FoldedRun, event: ev.LogWritten) -> FoldedRun:
    return _logged(state, event, event.level, "log", event.text)


def _after_command(state: FoldedRun, event: ev.CommandAnswered) -> FoldedRun:
    level: Level = "info" if event.ok else "warning"
    text = f"{event.command}: {event.message}"
    state = replace(state, answer=event, changes=state.changes.answered(event))
    return _logged(state, event, level, "command", text)


def _after_failed(state: FoldedRun, event: ev.Failed) -> FoldedRun:
    text = f"{event.kind}: {event.message}"
    return _logged(replace(state, failed=event), event, "error", "failed", text)


def _after_done(state: FoldedRun, event: ev.Done) -> FoldedRun:
    ended = state_of_exit(event.exit_code)
    text = f"{ended} after step {event.step} in {duration_text(event.seconds)}"
    level: Level = "info" if ended in ("finished", "stopped") else "warning"
    return _logged(replace(state, done=event), event, level, "done", text)


_FOLDS: dict[type[Any], Callable[[FoldedRun, Any], FoldedRun]] = {
    ev.Hello: _after_hello,
    ev.Planned: _after_planned,
    ev.PhaseChanged: _after_phase,
    ev.StepFinished: _after_step,
    ev.MemorySampled: _after_memory,
    ev.TrafficSampled: _after_traffic,
    ev.ResidencySampled: lambda state, event: replace(state, residency=event),
    ev.MovesMade: _after_moves,
    ev.Heartbeat: lambda state, event: replace(state, heartbeat=event),
    ev.EvaluationFinished: _after_evaluation,
    ev.CheckpointWritten: _after_checkpoint,
    ev.SampleGenerated: _after_sample,
    ev.AdviceGiven: _after_advice,
    ev.AdviceWithdrawn: _after_withdrawn,
    ev.ChangeApplied: _after_change,
    ev.ChangeRefused: _after_refusal,
    ev.ChangeMeasured: _after_measured,
    ev.MeasuringChange: lambda state, event: replace(state, changes=state.changes.measuring(event)),
    ev.LogWritten: _after_log,
    ev.CommandAnswered: _after_command,
    ev.PlanChecked: lambda state, event: replace(state, checked=event),
    ev.StoppedEarly: _after_early_stop,
    ev.Failed: _after_failed,
    ev.Done: _after_done,
}
