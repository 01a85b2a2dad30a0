"""The column beside the question on a wide screen: the run so far, and this machine."""

from __future__ import annotations

from textual.content import Content

from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.launch import equivalent, summary_rows
from fluxtui.wizard.pages.wizard_view import WizardView


def aside(view: WizardView, width: int) -> Content:
    """Draw the answers and the machine; at the end the command and the file."""
    if view.answers.step == "launch" and view.answers.start != "resume":
        return equivalent(view, width)
    lines = [Content.styled("Your run", "bold"), Content("")]
    for name, value in summary_rows(view):
        check = view.checks.get(name)
        wrong = check is not None and check.error is not None
        lines.append(
            Content.assemble(
                (name.ljust(10), drawing.MUTED),
                (drawing.shortened(value or "-", width - 10), "$error" if wrong else "bold"),
            )
        )
    lines += [Content(""), Content.styled("This machine", "bold"), Content("")]
    lines += [drawing.paragraph(line, width) for line in view.machine_lines]
    if now := view.machine_now(width):
        lines += [Content(""), drawing.spans(now)]
    return Content("\n").join(lines)
