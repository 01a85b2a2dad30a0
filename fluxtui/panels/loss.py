"""The loss by step: the spread of the raw values, their moving average, the evaluations."""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.units import loss_text
from fluxtui.panels.chart import Trace, chart, place_of, step_at
from fluxtui.panels.panel import Panel, pair
from fluxtui.state.history import Bucket
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.spans import Line, dropped_to_fit

OTHER = "optimizer"  # the colour of the compared run, whose lines are dashed


def heading(view: View, width: int) -> Line:
    """Return the newest values, and the legend of the lines."""
    loss = view.state.loss
    newest = view.state.step.loss if view.state.step else None
    parts: list[Line] = [(("⡇", "train"), *pair(" train", loss_text(newest)))]
    if view.chart.smooth:
        parts.append((("⠒", "smooth"), *pair(" ema", loss_text(loss.smooth))))
    if view.state.evaluation:
        parts.append((("×", "evaluation"), *pair(" eval", loss_text(view.state.evaluation.loss))))
    if view.compared is not None:
        parts.append((("╌", OTHER), (f" {view.compared.name}", "text")))
        parts.append((("+", OTHER), (" its eval", "text")))
    if view.chart.log_scale:
        parts.append((("log", "warn"),))
    if view.chart.by_tokens:
        parts.append((("by tokens", "warn"),))
    if view.chart.zoom < 1.0:
        where = "last" if view.chart.crosshair is None else "around the crosshair"
        parts.append(((f"{where} {view.chart.zoom * 100:.0f}%", "warn"),))
    return dropped_to_fit(parts, width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw a chart with axes; say so while there is no data."""
    return chart(traces(view), view.chart, width, height)


def traces(view: View) -> list[Trace]:
    """Return this run's trace, then the compared run's."""
    smooth = view.chart.smooth
    drawn = [
        Trace(
            buckets=view.state.loss.buckets,
            role="train" if smooth else "smooth",
            smooth_role="smooth" if smooth else "",
            marks=list(view.state.evaluations),
            place=place_of(view.state, view.chart.by_tokens),
        )
    ]
    if view.compared is not None:
        drawn.append(other_trace(view.compared.state, view.chart))
    return drawn


def other_trace(state: FoldedRun, settings: ChartSettings) -> Trace:
    """Return the compared run: with smoothing its moving average alone, and its evaluations."""
    buckets = state.loss.buckets
    if settings.smooth:
        buckets = tuple(smoothed(bucket) for bucket in buckets)
    return Trace(
        buckets=buckets,
        role=OTHER,
        marks=list(state.evaluations),
        mark_role=OTHER,
        mark="+",
        place=place_of(state, settings.by_tokens),
        dashed=True,
    )


def smoothed(bucket: Bucket) -> Bucket:
    """Replace a bucket's value by the moving average at its end."""
    value = bucket.smooth
    return Bucket(bucket.first, bucket.last, 1, value, value, value, value)


def pick(view: View, width: int, height: int, x: int, y: int) -> ChartSettings | None:
    """Put the crosshair under the pointer."""
    step = step_at(traces(view)[0], view.chart, x, width)
    return None if step is None else replace(view.chart, crosshair=step)


PANEL = Panel(
    "loss",
    "Loss",
    body,
    heading,
    about="loss by step with evaluations; the full chart is 4",
    pick=pick,
    shows=lambda view: (
        view.state.loss, view.state.step, view.state.evaluation, view.state.evaluations,
        view.chart, view.compared,
    ),
)  # fmt: skip
