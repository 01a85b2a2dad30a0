"""Screen 4: the loss in full, with the gradient norm and the learning rate below it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fluxtui.panels import PANELS
from fluxtui.panels.loss import chart
from fluxtui.panels.panel import Panel, number_text, pair, power_text
from fluxtui.screens.run_screen import RunScreen
from fluxtui.state.history import Curve
from fluxtui.state.view import ChartSettings, View
from fluxtui.themes import Palette
from fluxtui.widgets.framed import framed
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.spans import Line

SMALL_CHARTS_FROM_ROWS = 28


def _curve_panel(
    panel_id: str, title: str, curve_name: str, write: Callable[[float | None], str]
) -> Panel:
    def curve_of(view: View) -> Curve:
        curve: Curve = getattr(view.state, curve_name)
        return curve

    def heading(view: View, width: int) -> Line:
        buckets = curve_of(view).buckets
        return pair("now", write(buckets[-1].mean if buckets else None))

    def body(view: View, width: int, height: int) -> list[Line]:
        settings = ChartSettings(smooth=False, zoom=view.chart.zoom)
        return chart(curve_of(view), [], settings, width, height)

    return Panel(panel_id, title, body, heading)


GRAD_NORM = _curve_panel("grad_norm", "Gradient norm", "grad_norm", partial(number_text, digits=3))
LEARNING_RATE = _curve_panel("learning_rate", "Learning rate", "learning_rate", power_text)


class LossScreen(RunScreen):
    """The loss chart with zoom, scale and moving average."""

    NAME = "loss"

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", Lines)
        width, height = body.size
        if not width or not height:
            return
        low = 9 if height >= SMALL_CHARTS_FROM_ROWS else 0
        lines = framed(PANELS["loss"], view, width, height - low, "box")
        if low:
            half = width // 2
            left = framed(GRAD_NORM, view, half, low, "box")
            right = framed(LEARNING_RATE, view, width - half, low, "box")
            lines += [(*a, *b) for a, b in zip(left, right, strict=True)]
        body.show(lines, palette)
