"""Progress, ETA with its spread, loss and rates: the first panel to look at."""

from __future__ import annotations

import time

from fluxtrain.events.events import StepFinished
from fluxtrain.units import UNKNOWN, count_text, duration_text, loss_text, number_text, power_text
from fluxtui.panels.panel import Panel, pair, time_left_s, whole_text
from fluxtui.plots.bars import gauge
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit, spread, width_of

ETA_PARTS = 2  # the word and the time
WEEK_S = 6 * 86400.0  # a weekday tells which day it is
LONGEST_ETA_S = 1e10  # three hundred years: a larger estimate tells nothing
GAUGE_ROLES = {"failed": "bad", "dead": "bad", "finished": "good", "paused": "warn", "cut": "warn"}


def body(view: View, width: int, height: int) -> list[Line]:
    """Return two lines: the progress of the run, and its loss and rates."""
    return [_where(view, width), _how(view, width)][:height]


def heading(view: View, width: int) -> Line:
    """Say if the rates are of a step that ended long ago."""
    step = view.state.step
    if step is None or view.fresh(step) is not None:
        return ()
    return ((f"last step {whole_text(view.age_s(step))} ago", "warn"),)


def _where(view: View, width: int) -> Line:
    state = view.state
    total = state.step.total_steps if state.step else state.hello.total_steps if state.hello else 0
    done = state.step.step if state.step else state.hello.first_step if state.hello else 0
    share = done / total if total > 0 else None
    left: Line = (
        ("step ", "dim"),
        (f"{done}", "strong") if state.hello else (UNKNOWN, "dim"),
        (f"/{total}" if total else "/-", "dim"),
        ("  ", "text"),
    )
    middle: Line = (
        ("  ", "text"),
        (f"{share * 100:5.1f}%", "strong") if share is not None else (f"{UNKNOWN:>6}", "dim"),
        ("   ", "text"),
    )
    right = fitting_eta(view, width - 8 - width_of(left) - width_of(middle))
    room = max(8, width - width_of(left) - width_of(middle) - width_of(right))
    role = GAUGE_ROLES.get(view.status.kind, "accent")
    return spread((*left, *gauge(share, room, role), *middle), right, width)


def eta(view: View) -> Line:
    """Return the time left with its spread and the clock time of the end; after the end the time
    that the run took."""
    state, status = view.state, view.status
    if state.done is not None:
        return (("took ", "dim"), (duration_text(state.done.seconds), "strong"))
    step = view.fresh(state.step)
    if step is None or step.eta_s is None or status.kind != "running":
        return (("ETA ", "dim"), (UNKNOWN, "dim"))
    left_s = time_left_s(step.eta_s, view.age_s(step) or 0.0, step.total_steps - step.step)
    spread_text = f" ± {whole_text(step.eta_spread_s)}" if step.eta_spread_s is not None else ""
    clock = clock_text(view.clock_s + left_s, view.clock_s)
    return (
        ("ETA ", "dim"),
        (whole_text(left_s), "strong"),
        (spread_text, "dim"),
        (f"  at {clock}" if clock else "", "dim"),
    )


def clock_text(at_s: float, now_s: float) -> str:
    """Return a future clock time, with its day unless it is today; "" for never."""
    if not now_s <= at_s < now_s + LONGEST_ETA_S:
        return ""
    at, now = time.localtime(at_s), time.localtime(now_s)
    if at[:3] == now[:3]:
        return time.strftime("%H:%M", at)
    return time.strftime("%a %H:%M" if at_s - now_s < WEEK_S else "%d %b %Y", at)


def fitting_eta(view: View, room: int) -> Line:
    """Return the time left; without room drop the clock time, then the spread."""
    parts = eta(view)
    while width_of(parts) > room and len(parts) > ETA_PARTS:
        parts = parts[:-1]
    return parts


def _how(view: View, width: int) -> Line:
    state = view.state
    step = state.step
    rates = view.fresh(step)
    parts: list[Line] = [
        pair("loss", loss_text(step.loss) if step else UNKNOWN),
        pair("ema", loss_text(state.loss.smooth), "smooth"),
        _measured(count_text(rates.tokens_per_s if rates else None), "tok/s"),
        _measured(duration_text(rates.step_s if rates else None), "a step"),
    ]
    if state.evaluation is not None:
        found = state.evaluation
        evaluated = (*pair("eval", loss_text(found.loss), "evaluation"), _at(found.step))
        is_best = state.best is not None and state.best[0] == found.step
        parts.insert(2, (*evaluated, (" best", "good")) if is_best else evaluated)
        if state.best is not None and not is_best:
            step_of_best, lowest = state.best
            best = pair("best eval", loss_text(lowest), "evaluation")
            parts.insert(3, (*best, _at(step_of_best)))
    parts += [
        pair("p95", duration_text(slow_step_s(list(state.steps)))),
        pair("norm", number_text(step.grad_norm if step else None, 3)),
        pair("lr", power_text(step.learning_rate if step else None)),
        pair("epoch", f"{step.epoch:.2f}" if step else UNKNOWN),
    ]
    return dropped_to_fit(parts, width, gap="   " if width > 100 else "  ")


def _measured(value: str, unit: str) -> Line:
    return ((value, "dim" if value == UNKNOWN else "strong"), (f" {unit}", "dim"))


def _at(step: int) -> tuple[str, str]:
    return (f" @{step}", "dim")


def slow_step_s(steps: list[StepFinished]) -> float | None:
    """Return the 95th percentile of recent step times; None while there are too few."""
    if len(steps) < 20:
        return None
    times = sorted(step.step_s for step in steps)
    return times[min(len(times) - 1, int(len(times) * 0.95))]


PANEL = Panel(
    "progress", "Progress", body, heading, about="steps, ETA with its spread, loss and rates"
)
