"""The last page: everything once more, and Enter starts it."""

from __future__ import annotations

from textual.content import Content

from fluxtrain.units import bytes_text
from fluxtui.answers.launching import command_text
from fluxtui.answers.training import question_of
from fluxtui.home import expanded
from fluxtui.sources.trust import question_of_trust, trusts_code
from fluxtui.wizard.checks.known_runs import run_rows
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.preview import time_line, yaml_block
from fluxtui.wizard.pages.training import value_and_reason
from fluxtui.wizard.pages.wizard_view import WizardView

OWN_PROCESS = "in a process of its own: closing this app does not stop it"


def launch_page(view: WizardView, width: int) -> Content:
    """Draw the run in words, where it goes, and the command."""
    going_on = view.answers.start == "resume"
    lines = [Content.styled("Ready to go on" if going_on else "Ready", "bold"), Content("")]
    for message in launch_problems(view):
        lines += [drawing.problem(message, width), Content("")]
    key = view.key("wizard_next")
    verb = f"{key.capitalize() if len(key) > 1 else key} " + (
        "goes on with the run" if going_on else "starts the training"
    )
    lines += [
        drawing.pairs(resumed_rows(view) if going_on else launch_rows(view), width),
        Content(""),
        Content.assemble(("▸ ", "bold $accent"), (verb, "bold $accent")),
        drawing.paragraph(OWN_PROCESS, width, drawing.MUTED),
        Content(""),
        Content.styled("The same from a shell", "bold"),
        drawing.command(command_text(view.answers), width),
    ]
    if not (view.wide or going_on):
        lines += [Content(""), yaml_block(view)]
    return Content("\n").join(lines)


def launch_problems(view: WizardView) -> list[str]:
    """Why the run cannot start, or would fail at once."""
    data = view.inspection.refusal if view.answers.start != "resume" else None
    return [message for message in (view.launch_error, data) if message]


def launch_rows(view: WizardView) -> list[tuple[str, str]]:
    """List the answers in words, their effect, and the folder of the run."""
    where = view.answers.run_folder.strip()
    place = ("runs as", expanded(where)) if where else ("runs in", str(view.root))
    rows = [*summary_rows(view), place]
    if view.plan.value is not None:
        what, _, when = time_line(view).partition(": ")
        rows.append((what, when))
    if view.free_disk_bytes is not None:
        rows.append(("free disk", bytes_text(view.free_disk_bytes)))
    return rows


def summary_rows(view: WizardView) -> list[tuple[str, str]]:
    """List the answers in words."""
    answers, plan = view.answers, view.plan.value
    steps = f"{answers.steps or 'auto'} steps" if plan is None else plan.steps_text
    rate, _ = value_and_reason(view, question_of("learning_rate"))
    offload: str = answers.offload
    if plan is not None and plan.layout.offload != offload:
        offload = f"{plan.layout.offload} ({offload})"
    return [
        ("model", answers.model_path),
        ("data", answers.data_file),
        ("method", answers.method),
        ("strategy", answers.dial),
        ("offload", offload),
        ("training", f"{steps}, rate {rate}"),
    ]


def resumed_rows(view: WizardView) -> list[tuple[str, str]]:
    """List what is known about the run to resume."""
    path = view.answers.resume_run
    known = [list(run_rows(run)) for run in view.runs if run.path == path]
    code = trusts_code(path)
    asked = [("trust", question_of_trust(code))] if code else []
    return [*(known[0] if known else [("run", path)]), *asked]
