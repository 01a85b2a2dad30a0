"""What was found about an answer; while the engine is asked, and when it refuses."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.wizard_view import WizardView


def found_page(view: WizardView, width: int) -> Content:
    """Draw what is known about the answer of the step on screen."""
    check = view.checks.get(view.answers.step)
    if check is None:
        return Content.styled("looking ...", drawing.MUTED)
    if check.error and check.open:
        return drawing.paragraph(check.error, width, drawing.MUTED)
    if check.error:
        return drawing.problem(check.error, width)
    lines = [drawing.facts(check.facts, width)] if check.facts else []
    lines += [drawing.caution(warning, width) for warning in check.warnings]
    return Content("\n").join(lines)


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
