"""What was found about an answer."""

from __future__ import annotations

from textual.content import Content

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
