"""Gradient norm and learning rate by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fluxtui.panels.loss import chart
from fluxtui.panels.panel import Panel, number_text, pair, power_text
from fluxtui.state.history import Curve
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.spans import Line

Write = Callable[[float | None], str]


def _curve_panel(panel_id: str, title: str, about: str, write: Write) -> Panel:
    def curve_of(view: View) -> Curve:
        curve: Curve = getattr(view.state, panel_id)
        return curve

    def heading(view: View, width: int) -> Line:
        buckets = curve_of(view).buckets
        return pair("now", write(buckets[-1].mean if buckets else None))

    def body(view: View, width: int, height: int) -> list[Line]:
        settings = ChartSettings(smooth=False, zoom=view.chart.zoom)
        return chart(curve_of(view), [], settings, width, height)

    return Panel(panel_id, title, body, heading, about)


GRAD_NORM = _curve_panel(
    "grad_norm", "Gradient norm", "norm of all gradients by step", partial(number_text, digits=3)
)
LEARNING_RATE = _curve_panel(
    "learning_rate", "Learning rate", "what the schedule gave each step", power_text
)
