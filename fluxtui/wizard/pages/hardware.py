"""This machine: what was measured, what limits it, and who else uses it."""

from __future__ import annotations

from textual.content import Content

from fluxtui.wizard import drawing
from fluxtui.wizard.pages.waiting import pending, refused
from fluxtui.wizard.view import View


def hardware_page(view: View, width: int) -> Content:
    """The probe's table."""
    asked = view.probe
    head = Content.styled("This machine", "bold")
    if asked.refusal is not None:
        cure = "Press r to measure again, or enter to go on: the plan then says less about time."
        return Content("\n").join([head, Content(""), refused(asked.refusal, cure, width)])
    if asked.value is None:
        note = "about 20 s the first time; enter goes on meanwhile"
        return Content("\n").join([head, Content(""), pending("Measuring", asked, width, note)])
    facts = asked.value
    title = drawing.heading("This machine", f"{facts.age_text()}; r measures again", width)
    warnings = [drawing.caution(warning, width) for warning in facts.warnings]
    return Content("\n").join([title, Content(""), *warnings, drawing.table(facts.rows, width)])
