"""Gradient norm and learning rate by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fluxtrain.units import number_text, power_text
from fluxtui.panels.chart import Trace, chart, place_of
from fluxtui.panels.loss import OTHER
from fluxtui.panels.panel import Panel, pair
from fluxtui.state.history import Curve
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line

Write = Callable[[float | None], str]


def _curve_panel(panel_id: str, title: str, about: str, write: Write) -> Panel:
    def curve_of(state: FoldedRun) -> Curve:
        curve: Curve = getattr(state, panel_id)
        return curve

    def trace(view: View, state: FoldedRun, role: str) -> Trace:
        place = place_of(state, view.chart.by_tokens)
        return Trace(buckets=curve_of(state).buckets, role=role, place=place)

    def heading(view: View, width: int) -> Line:
        buckets = curve_of(view.state).buckets
        return pair("now", write(buckets[-1].mean if buckets else None))

    def body(view: View, width: int, height: int) -> list[Line]:
        drawn = [trace(view, view.state, "smooth")]
        if view.compared is not None:
            drawn.append(replace(trace(view, view.compared.state, OTHER), dashed=True))
        return chart(drawn, replace(view.chart, log_scale=False), width, height)

    def shows(view: View) -> tuple[object, ...]:
        return curve_of(view.state), view.chart, view.compared

    return Panel(panel_id, title, body, heading, about, shows=shows)


GRAD_NORM = _curve_panel(
    "grad_norm", "Gradient norm", "norm of all gradients by step", partial(number_text, digits=3)
)
LEARNING_RATE = _curve_panel(
    "learning_rate", "Learning rate", "what the schedule gave each step", power_text
)
