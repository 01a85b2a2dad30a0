"""This machine: its measurements, its limits, and other programs on it."""

from __future__ import annotations

from textual.content import Content

from fluxtui.wizard.engine.machine import age_text, machine_table, machine_warnings
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.waiting import pending, refused
from fluxtui.wizard.pages.wizard_view import WizardView


def hardware_page(view: WizardView, width: int) -> Content:
    """Draw the probe's table."""
    asked = view.probe
    head = Content.styled("This machine", "bold")
    if asked.refusal is not None:
        cure = (
            f"Press {view.key('wizard_again')} to measure again, or {view.key('wizard_next')} to "
            "go on: the plan then cannot predict times."
        )
        return Content("\n").join(
            [head, *now_lines(view, width), Content(""), refused(asked.refusal, cure, width)]
        )
    if asked.value is None:
        note = f"about 20 s the first time; {view.key('wizard_next')} goes on meanwhile"
        return Content("\n").join(
            [head, *now_lines(view, width), Content(""), pending("Measuring", asked, width, note)]
        )
    probe = asked.value
    hint = f"{age_text(probe)}; {view.key('wizard_again')} measures again"
    title = drawing.heading("This machine", hint, width)
    warnings = [drawing.caution(warning, width) for warning in machine_warnings(probe)]
    table = drawing.table(machine_table(probe), width)
    return Content("\n").join([title, *now_lines(view, width), Content(""), *warnings, table])


def now_lines(view: WizardView, width: int) -> list[Content]:
    """Return the machine's present load; the table shows the time of its measurement."""
    now = view.machine_now(width - 5)
    return [Content.assemble(("now  ", drawing.MUTED), drawing.spans(now))] if now else []
