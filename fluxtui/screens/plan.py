"""Screen 6: what was chosen and why, prediction against measurement, and advice."""

from __future__ import annotations

from textual.app import ComposeResult

from fluxtrain.telemetry.events import Planned
from fluxtrain.units import UNKNOWN, bytes_text
from fluxtui.panels.advice import rows as advice_rows
from fluxtui.screens.run_screen import RunScreen
from fluxtui.state.run import RunState
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line, wrapped

WIDEST_TEXT = 110
NAME_CELLS = 22


class PlanScreen(RunScreen):
    """The plan that the run follows, each choice with its reason."""

    NAME = "plan"
    AUTO_FOCUS = "#body"

    def compose_body(self) -> ComposeResult:
        yield ScrollingLines(id="body")

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", ScrollingLines)
        body.show_all(plan_lines(view.state, min(WIDEST_TEXT, body.size.width - 4)), palette)


def plan_lines(state: RunState, width: int) -> list[Line]:
    """The whole screen as lines."""
    planned = state.planned
    if planned is None:
        return [BLANK, (("  the trainer has not planned yet", "dim"),)]
    lines = [BLANK, _title("What the run does"), *_facts(planned), BLANK]
    if planned.choices:
        lines.append(_title("What was chosen, and why"))
        for choice in planned.choices:
            lines.append((*_name(choice.name), (choice.value, "strong")))
            room = max(20, width - NAME_CELLS - 2)
            lines += [
                ((" " * (NAME_CELLS + 2), "text"), (part, "dim"))
                for part in wrapped(choice.because, room)
            ]
        lines.append(BLANK)
    lines += [_title("Predicted and measured"), *_comparison(state, planned), BLANK]
    lines.append(_title("Advice"))
    if not state.advice:
        lines.append((("  none so far", "dim"),))
    for given in reversed(state.advice):
        lines += [(("  ", "text"), *spans) for spans in advice_rows(given, width)]
    return lines


def _title(text: str) -> Line:
    return ((f"  {text}", "accent"),)


def _name(text: str) -> Line:
    return ((f"  {text:<{NAME_CELLS}}", "text"),)


def _facts(planned: Planned) -> list[Line]:
    pairs = (
        ("offload", planned.offload),
        ("batch", f"{planned.batch_rows} rows of {planned.sequence_length} tokens"),
        ("chunks", f"{planned.chunk_rows} rows at a time"),
        ("accumulation", str(planned.accumulation)),
        ("resident blocks", str(planned.resident_blocks)),
        ("device slots", str(planned.slots)),
        ("updated on the device", f"{planned.device_groups} groups of parameters"),
    )
    return [(*_name(name), (value, "strong")) for name, value in pairs]


def _comparison(state: RunState, planned: Planned) -> list[Line]:
    memory = state.memory
    pairs = (
        ("device peak", planned.device_bytes, memory.device_peak_bytes if memory else None),
        ("host peak", planned.host_bytes, memory.host_peak_bytes if memory else None),
    )
    head: Line = (*_name(""), (f"{'predicted':>12}", "dim"), (f"{'measured':>12}", "dim"))
    return [head, *(_compared(name, wanted, found) for name, wanted, found in pairs)]


def _compared(name: str, wanted: int | None, found: int | None) -> Line:
    off = f"{(found / wanted - 1) * 100:+.1f}%" if wanted and found else UNKNOWN
    return (
        *_name(name),
        (f"{bytes_text(wanted):>12}", "text"),
        (f"{bytes_text(found):>12}", "strong"),
        (f"{off:>9}", "dim"),
    )
