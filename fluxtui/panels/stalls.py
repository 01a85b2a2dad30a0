"""The waiting time of the last step by cause, and the mean of recent steps."""

from __future__ import annotations

from fluxtrain.units import UNKNOWN, duration_text
from fluxtui.panels.bus import totals_line, untrained
from fluxtui.panels.panel import Panel, pair, share_text
from fluxtui.plots.bars import gauge
from fluxtui.state.view import View
from fluxtui.widgets.spans import BLANK, Line, dropped_to_fit, fitted

BAR_FROM_CELLS = 44
MEAN_FROM_CELLS = 37


def heading(view: View, width: int) -> Line:
    """Say over how many steps the mean is taken."""
    count = len(view.state.steps)
    return dropped_to_fit([((f"last step, mean of {count}", "dim"),)] if count else [], width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Return a line a cause with its share of the time; then the bytes moved."""
    steps = list(view.state.steps)
    step = view.fresh(view.state.step)
    whole_s = sum(old.step_s for old in steps)
    causes = sorted({cause for old in steps for cause in old.stalls_s})
    lines: list[Line] = []
    for cause in causes or ["weights", "update", "gradients"]:
        waited_s = sum(old.stalls_s.get(cause, 0.0) for old in steps)
        share = waited_s / whole_s if whole_s > 0 else None
        last = waited_text(step.stalls_s.get(cause, 0.0)) if step else UNKNOWN
        mean = waited_text(waited_s / len(steps)) if steps else UNKNOWN
        room = width - 40 if width >= BAR_FROM_CELLS else 0
        between: Line = ((f"{mean:>9}", "text"),) if width >= MEAN_FROM_CELLS else ()
        text: list[Line] = [
            ((f"{cause:<11}", "text"), (f"{last:>8}", "strong")),
            (*between, (f"{share_text(share):>7}", "dim")),
        ]
        whole = dropped_to_fit(text, width, gap="")
        beside: Line = (("  ", "text"), *gauge(share, room, "stall")) if room else ()
        lines.append(fitted((*whole, *beside), width))
    traffic = view.fresh(view.state.traffic)
    told = totals_line(traffic, width)
    lines += [BLANK, told]
    apart = untrained(traffic)
    if apart and apart[-1][-1] not in told:  # no room beside the whole
        lines.append(dropped_to_fit(apart, width))
    if step is not None:
        lines.append(
            dropped_to_fit([pair("the last step took", duration_text(step.step_s))], width)
        )
    return lines[:height]


def waited_text(seconds: float) -> str:
    """Write a waiting time; none at all is "0 s"."""
    return duration_text(seconds) if seconds > 0 else "0 s"


PANEL = Panel("stalls", "Stalls", body, heading, about="what the steps waited for, by cause")
