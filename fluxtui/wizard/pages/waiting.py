"""While the engine is asked, and when it refuses."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.pages import drawing

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def pending(what: str, asked: Asked[Any], width: int, note: str = "") -> Content:
    """Say what the engine is doing, for how long, and its newest message."""
    mark = _SPINNER[int(asked.waited_s * 4) % len(_SPINNER)]
    line = f"{what}  {asked.waited_s:.0f} s"
    first, *more = drawing.in_words(line, max(1, width - 2))
    lines = [Content.assemble((f"{mark} ", "$accent"), first), *(Content(f"  {w}") for w in more)]
    for text in filter(None, (asked.said, note)):
        words = drawing.in_words(text, max(1, width - 2))
        lines += [Content.styled(f"  {part}", drawing.MUTED) for part in words]
    return Content("\n").join(lines)


def refused(message: str, cure: str, width: int) -> Content:
    """Say why there is no answer, and what the user can do here."""
    return Content("\n").join(
        [
            drawing.problem(message, width),
            Content(""),
            drawing.paragraph(cure, width, drawing.MUTED),
        ]
    )
