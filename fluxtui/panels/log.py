"""The newest lines of the run's log; advice that was given stays on top."""

from __future__ import annotations

import time

from fluxtui.panels.panel import Panel, key_of
from fluxtui.state.run import LogLine
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit, fitted, width_of, wrapped
from fluxtui.words import counted

LEVEL_ROLES = {"debug": "dim", "info": "text", "warning": "warn", "error": "bad"}
RECURRING = ("training", "evaluating", "saving", "finished")
LEVEL_MARKS = {"debug": " ", "info": " ", "warning": "!", "error": "✗"}
KIND_ROLES = {"checkpoint": "good", "evaluation": "info", "advice": "accent", "done": "good"}


def heading(view: View, width: int) -> Line:
    """Say how much advice was given, and the key of the screen that shows it."""
    count = len(view.state.advice)
    told = f"{key_of(view, 'show_plan')} shows {counted(count, 'piece')} of advice"
    return dropped_to_fit([((told, "dim"),)] if count else [], width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw the newest advice (two lines at most when there is room), then the newest log lines."""
    lines: list[Line] = []
    if view.state.advice and height >= 4:
        text = view.state.advice[-1].text
        for i, part in enumerate(wrapped(text, width - 2)[:2]):
            lines.append((("▲ " if i == 0 else "  ", "accent"), (part, "text")))
    return [*lines, *news(view, width, height - len(lines))]


def news(view: View, width: int, height: int) -> list[Line]:
    """Draw the newest log lines alone, where another panel shows the advice."""
    recent = [entry for entry in view.state.log.last(height * 4 + 8) if _is_news(entry)]
    return [row(entry, width) for entry in recent[-height:]] or [((" nothing so far", "dim"),)]


def _is_news(entry: LogLine) -> bool:
    """Return whether an entry is shown: advice has its own place, and phases that repeat after each
    evaluation are no news."""
    return entry.kind != "advice" and entry.text not in RECURRING


def row(entry: LogLine, width: int) -> Line:
    """Write one entry's time, mark and text, cut at the width."""
    head, role = _head(entry, dates=False)
    return fitted((*head, (" ".join(entry.text.split()), role)), width)


def rows(entry: LogLine, width: int, dates: bool = False) -> list[Line]:
    """Return an entry in as many lines as its text needs."""
    head, role = _head(entry, dates)
    indent = width_of(head)
    parts = wrapped(entry.text, max(8, width - indent)) or [""]
    return [
        ((*head, (part, role)) if i == 0 else ((" " * indent, "text"), (part, role)))
        for i, part in enumerate(parts)
    ]


def _head(entry: LogLine, dates: bool) -> tuple[Line, str]:
    """Return an entry's time and mark, and the role of its text."""
    pattern = "%Y-%m-%d %H:%M:%S" if dates else "%H:%M:%S"
    clock = time.strftime(pattern, time.localtime(entry.wall_s))
    role = LEVEL_ROLES[entry.level]
    if entry.level == "info":
        role = KIND_ROLES.get(entry.kind, role)
    return ((f"{clock} ", "dim"), (f"{LEVEL_MARKS[entry.level]} ", role)), role


PANEL = Panel("log", "Log", body, heading, about="what happened; the whole of it on screen 5")
NEWS = Panel("news", "Log", news, about="what happened; the whole of it on screen 5")
