"""Screen 6: advice and its outcome, prediction against measurement, every choice and its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType

from fluxtrain.events.events import Planned
from fluxtrain.units import UNKNOWN, bytes_text, duration_text, rough_text
from fluxtui.actions.key_map import screen_bindings
from fluxtui.panels.advice import rows as advice_rows
from fluxtui.panels.card_colours import role_of
from fluxtui.panels.trials import asked_line, no_advice, trial_line, why_not
from fluxtui.screens.run_actions import apply_advice, send
from fluxtui.screens.run_screen import RunScreen
from fluxtui.state.changes import ranked
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line, cut, dropped_to_fit, width_of, wrapped
from fluxtui.words import counted

WIDEST_TEXT = 110
NAME_CELLS = 22
CHOICE_CELLS = 27  # of the longest setting
TRIALS_SHOWN = 6
WARMING_STEPS = 3  # the trainer leaves out as many when it compares


class PlanScreen(RunScreen):
    """The plan that the run follows, each choice with its reason, and advice."""

    NAME = "plan"
    AUTO_FOCUS = "#body"
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings("plan")

    def compose_body(self) -> ComposeResult:
        yield ScrollingLines(id="body")

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", ScrollingLines)
        body.show_all(plan_lines(view, min(WIDEST_TEXT, body.size.width - 4)), palette)

    def action_select_advice(self, by: int) -> None:
        """Select the next piece of advice, in the order from the best on."""
        app = self.flux
        held = ranked(app.view.state.advice)
        if held:
            at = max(0, min(len(held) - 1, app.view.advice_at + by))
            app.view = replace(app.view, advice_at=at)
            app.redraw()

    def action_apply_advice(self) -> None:
        """Apply the selected piece of advice."""
        held = ranked(self.flux.view.state.advice)
        selected = held[: self.flux.view.advice_at + 1][-1:]
        apply_advice(self.flux, selected[0] if selected else None)

    def action_undo_change(self) -> None:
        """Take back the newest change."""
        send(self.flux, "undo")


def plan_lines(view: View, width: int) -> list[Line]:
    """Draw the whole screen as lines."""
    planned = view.state.planned
    if planned is None:
        return [BLANK, (("  the trainer has not planned yet", "dim"),)]
    lines = [BLANK, *_advice(view, width), *_changes(view, width)]
    lines += [_title("What the run does"), *_facts(view.state, planned), BLANK]
    lines += _cards(view, planned, width)
    lines += [_title("Predicted and measured"), *_comparison(view.state, planned, width), BLANK]
    if planned.choices:
        lines.append(_title("What was chosen, and why"))
    for choice in planned.choices:
        lines.append(((f"  {choice.name:<{CHOICE_CELLS}}", "text"), (choice.value, "strong")))
        lines += _indented(choice.because, width, CHOICE_CELLS)
    return lines


def _indented(text: str, width: int, name_cells: int = NAME_CELLS) -> list[Line]:
    """Wrap a text and indent it below a value."""
    room = max(20, width - name_cells - 2)
    return [((" " * (name_cells + 2), "text"), (part, "dim")) for part in wrapped(text, room)]


def _advice(view: View, width: int) -> list[Line]:
    """List the advice, the best first; the selected one is marked."""
    held = ranked(view.state.advice)
    because = why_not(view)
    note = f"  cannot be applied: {because}" if because and held else ""
    lines: list[Line] = [(*_title("Advice"), (note, "warn"))]
    if not held:
        follows = "" if view.status.ended else ": it needs 20 steps of steady speed"
        lines.append(((f"  {no_advice(view)}{follows}", "dim"),))
    selected = min(view.advice_at, len(held) - 1)
    for at, given in enumerate(held):
        mark = "▸" if at == selected else " "
        told = advice_rows(view, given, width, mark)
        lines += [(("  ", "text"), *spans) for spans in told]
    return [*lines, BLANK]


def _changes(view: View, width: int) -> list[Line]:
    """Return the changes during training, the newest first; nothing without changes."""
    waiting = asked_line(view)
    trials = view.state.changes.trials[::-1][:TRIALS_SHOWN]
    lines = [line for line in (waiting, *map(trial_line, trials)) if line]
    if not lines:
        return []
    parts = [part for line in lines for part in _in_parts(line, width)]
    return [_title("Changed while it trains"), *((("  ", "text"), *part) for part in parts), BLANK]


def _in_parts(line: Line, width: int) -> list[Line]:
    """Return one line, or its spans below each other if it is too long."""
    if width_of(line) <= width:
        return [line]
    (first, role), *rest = line
    below = [((part, role),) for text, role in rest for part in wrapped(text, width - 2)]
    return [*(((part, role),) for part in wrapped(first, width)),
            *((("  ", "text"), *part) for part in below)]  # fmt: skip


def _title(text: str) -> Line:
    return ((f"  {text}", "accent"),)


def _name(text: str) -> Line:
    return ((f"  {text:<{NAME_CELLS}}", "text"),)


def _facts(state: FoldedRun, planned: Planned) -> list[Line]:
    now = state.changes.now
    ahead = max(0, planned.slots - 1)
    pairs = (
        ("offload", planned.offload, None),
        (
            "batch",
            f"{counted(planned.batch_rows, 'row')} of {counted(planned.sequence_length, 'token')}",
            None,
        ),
        ("accumulation", str(planned.accumulation), None),
        ("chunk_rows", str(planned.chunk_rows), now.get("chunk_rows")),
        ("resident_blocks", str(planned.resident_blocks), now.get("resident_blocks")),
        ("prefetch", str(ahead), now.get("prefetch")),
        ("device_groups", str(planned.device_groups), now.get("device_groups")),
    )
    return [(*_name(name), *_value(value, changed)) for name, value, changed in pairs]


def _cards(view: View, planned: Planned, width: int) -> list[Line]:
    """Return what each of several cards does, and which are left out; nothing for one card."""
    if not planned.cards and not planned.left_out:
        return []
    memory = view.fresh(view.state.memory)
    peaks = {one.number: one.peak_bytes for one in memory.cards} if memory else {}
    lines: list[Line] = [_title("Which card does what")]
    if planned.cards:
        heads = (f"{'predicted':>12}", f"{'measured':>12}", f"{'may use':>11}")
        first: Line = (*_name(""), (f"{'blocks':>8}", "dim"))
        lines.append(dropped_to_fit([first, *(((head, "dim"),) for head in heads)], width, ""))
    for card in planned.cards:
        row: list[Line] = [
            (
                (f"  {card.number} ", role_of(card.number)),
                (f"{cut(card.name or 'pretended', NAME_CELLS - 3):<{NAME_CELLS - 2}}", "text"),
                (f"{card.blocks:>8}", "strong"),
            ),
            ((f"{bytes_text(card.device_bytes):>12}", "text"),),
            ((f"{bytes_text(peaks.get(card.number)):>12}", "strong"),),
            ((f"{bytes_text(card.budget_bytes):>11}", "dim"),),
            (("  embedding, head", "dim"),) if card.edges else BLANK,
        ]
        lines.append(dropped_to_fit(row, width, ""))
    for out in planned.left_out:
        name = f"card {out.index}" + f" ({out.name})" * bool(out.name)
        told = wrapped(f"{name} is left out: {out.because}", max(20, width - 2))
        lines += [(("  ", "text"), (part, "warn")) for part in told]
    return [*lines, BLANK]


def _value(planned: str, changed: int | None) -> Line:
    """Return the planned value, or the one that it was changed to."""
    if changed is None or str(changed) == planned:
        return ((planned, "strong"),)
    return ((str(changed), "strong"), (f"  planned {planned}", "dim"))


def _comparison(state: FoldedRun, planned: Planned, width: int) -> list[Line]:
    """Compare peaks and the median step with the plan; final once the run has compared them
    itself."""
    memory = state.memory
    found = {
        "device_peak_bytes": memory.device_peak_bytes if memory else None,
        "host_peak_bytes": memory.host_peak_bytes if memory else None,
        "step_s": _steady_step_s(state),
    }
    wanted = {
        "device_peak_bytes": planned.device_bytes,
        "host_peak_bytes": planned.host_bytes,
        "step_s": planned.step_s,
    }
    for row in state.checked.rows if state.checked else ():
        wanted[row.quantity] = row.predicted
        if row.measured is not None:  # a run without a GPU compares no device memory
            found[row.quantity] = row.measured
    names = (f"{'predicted':>12}", f"{'measured':>12}", f"{'error':>9}")
    so_far = "" if state.checked or state.done else "  so far"
    head: Line = (*_name(""), *((name, "dim") for name in names))
    lines: list[Line] = [dropped_to_fit([head, ((so_far, "dim"),)], max(width, width_of(head)), "")]
    lines += [
        _compared(label, wanted[name], found[name], *texts)
        for name, label, *texts in (
            ("device_peak_bytes", "device peak", bytes_text, bytes_text),
            ("host_peak_bytes", "host peak", bytes_text, bytes_text),
            ("step_s", "median step", _predicted_step_text, duration_text),
        )
    ]
    since = state.changes.last_step
    notes = [
        f"as changed after step {since}" if since else "",
        f"bound by {planned.binds}" if planned.binds else "",
        planned.constants,
    ]
    return lines + _indented("; ".join(note for note in notes if note), width)


def _steady_step_s(state: FoldedRun) -> float | None:
    """Return the median of this process's last steps, leaving out those after a start or change."""
    began = state.hello.first_step if state.hello else 0
    warming = max(began, state.changes.last_step) + WARMING_STEPS
    steps = [step.step_s for step in state.steps if step.step > warming]
    return median(steps) if steps else None


def _predicted_step_text(seconds: float | None) -> str:
    return rough_text(seconds, 2)


def _compared(
    name: str,
    wanted: float | None,
    found: float | None,
    wanted_text: Callable[[float | None], str],
    found_text: Callable[[float | None], str],
) -> Line:
    error = f"{(wanted / found - 1) * 100:+.1f}%" if wanted and found else UNKNOWN
    return (
        *_name(name),
        (f"{wanted_text(wanted):>12}", "text"),
        (f"{found_text(found):>12}", "strong"),
        (f"{error:>9}", "dim"),
    )
