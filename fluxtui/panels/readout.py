"""The values at the step under the crosshair, of this run and of the compared one."""

from __future__ import annotations

from bisect import bisect_right

from fluxtrain.units import UNKNOWN, count_text, loss_text, number_text, power_text
from fluxtui.panels.chart import place_of
from fluxtui.panels.loss import OTHER
from fluxtui.panels.panel import Panel, key_of, pair
from fluxtui.state.history import Bucket, Curve
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import ComparedRun, View
from fluxtui.widgets.spans import Line, dropped_to_fit


def heading(view: View, width: int) -> Line:
    """Say how to move the crosshair."""
    arrows = f"{key_of(view, 'crosshair_back')} {key_of(view, 'crosshair_on')}"
    hint = f"{arrows} put a crosshair"
    if view.chart.crosshair is not None:
        hint = f"{arrows} move  {key_of(view, 'crosshair_off')} hides"
    return dropped_to_fit([((hint, "dim"),)], width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw a line for this run, and one for the other with the difference."""
    state = view.state
    step = view.chart.crosshair
    if step is None:
        step = state.step.step if state.step else None
    if step is None:
        nothing: list[Line] = [((" no step so far", "dim"),)]
        return nothing[:height]
    lines = [_values(state, step, width, ())]
    other = view.compared
    if other is not None:
        there = _same_place(view, step)
        ours, theirs = _bucket_at(state.loss, step), _bucket_at(other.state.loss, there)
        if theirs is None:
            lines.append(_missing(other, step, width))
        else:
            gap = _difference(ours, theirs, other.name)
            lines.append(_values(other.state, there, width, gap, OTHER))
    return lines[:height]


def _values(state: FoldedRun, step: int, width: int, first: Line, role: str = "strong") -> Line:
    """Return all known values of one step; "-" for a value that was not measured there."""
    loss = _bucket_at(state.loss, step)
    norm = _bucket_at(state.grad_norm, step)
    rate = _bucket_at(state.learning_rate, step)
    evaluated = [pair_ for pair_ in state.evaluations if pair_[0] <= step]
    parts: list[Line] = [
        ((" step ", "dim"), (str(step), role), *_spread(loss)),
        pair("train", loss_text(loss.mean if loss else None)),
        pair("ema", loss_text(loss.smooth if loss else None), "smooth"),
        _evaluation(evaluated[-1] if evaluated else None),
        pair("norm", number_text(norm.mean if norm else None, 3)),
        pair("lr", power_text(rate.mean if rate else None)),
        pair("tokens", count_text(place_of(state, True)(step)) if loss else UNKNOWN),
    ]
    if first:
        parts.insert(2, first)
    return dropped_to_fit(parts, width)


def _spread(bucket: Bucket | None) -> Line:
    """Name the steps that the values are the mean of, if more than one."""
    if bucket is None or bucket.count == 1:
        return ()
    return ((f" mean of {bucket.first}-{bucket.last}", "dim"),)


def _evaluation(found: tuple[int, float] | None) -> Line:
    if found is None:
        return pair("eval", UNKNOWN)
    return (*pair("eval", loss_text(found[1]), "evaluation"), (f" @{found[0]}", "dim"))


def _missing(other: ComparedRun, step: int, width: int) -> Line:
    """Say that the other run never reached this place."""
    buckets = other.state.loss.buckets
    last = f"; its last is {buckets[-1].last}" if buckets else ""
    return dropped_to_fit(
        [((f" {other.name}", OTHER), (f" did not reach step {step}{last}", "dim"))], width
    )


def _difference(ours: Bucket | None, theirs: Bucket, name: str) -> Line:
    """Return how much higher this run's loss is than the other's at this place."""
    if ours is None:
        return ()
    gap = ours.mean - theirs.mean
    role = "good" if gap < 0 else "warn" if gap > 0 else "dim"
    return ((f"ours {gap:+.4f}", role), (f" against {name}", "dim"))


def _same_place(view: View, step: int) -> int:
    """Return the other run's step at this place of the x axis: the same step, or token count."""
    other = view.compared
    if not view.chart.by_tokens or other is None:
        return step
    wanted, place = place_of(view.state, True)(step), place_of(other.state, True)
    buckets = other.state.loss.buckets
    return min((b.last for b in buckets), key=lambda at: abs(place(at) - wanted), default=step)


def _bucket_at(curve: Curve, step: int) -> Bucket | None:
    """Return the bucket that holds the step; None outside of the curve and in its gaps."""
    buckets = curve.buckets
    at = bisect_right(buckets, step, key=lambda bucket: bucket.first) - 1
    return buckets[at] if at >= 0 and step <= buckets[at].last else None


PANEL = Panel(
    "readout", "At the crosshair", body, heading, about="loss, norm, rate at the crosshair's step"
)
