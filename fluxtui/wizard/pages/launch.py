"""The last page: the whole run before it starts. Memory, time, disk, a dry run, the command."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from fluxtrain.events.answers.answers import DryRunAnswer
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.units import bytes_text, predicted_text
from fluxtui.answers.configuring import flat_configuration, yaml_text
from fluxtui.answers.launching import command_text
from fluxtui.answers.rows import BY_KEY, value_text
from fluxtui.home import expanded
from fluxtui.sources.trust import question_of_trust, trusts_code
from fluxtui.wizard.checks.known_runs import run_rows
from fluxtui.wizard.engine import plan_preview
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.found import pending, refused
from fluxtui.wizard.pages.training import value_and_reason
from fluxtui.wizard.pages.wizard_view import WizardView
from fluxtui.words import counted

MOST_CARDS = 4  # with a bar each
OWN_PROCESS = "in a process of its own: closing this app does not stop it"
HOW_TIMED = {
    "measured": "estimated",
    "disturbed": "estimated while other programs computed",
    "assumed": "a guess: nothing of this model was timed here yet",
}


def launch_page(view: WizardView, width: int) -> Content:
    """Draw what Enter starts, with its memory, time and disk."""
    going_on = view.answers.start == "resume"
    key = view.key("wizard_next")
    verb = f"{key.capitalize() if len(key) > 1 else key} " + (
        "goes on with the run" if going_on else "starts the training"
    )
    problems = [drawing.problem(message, width) for message in launch_problems(view)]
    ready = Content.assemble(("▸ ", "bold $accent"), (verb, "bold $accent"))
    parts = [
        *problems,
        ready + Content("\n") + drawing.paragraph(OWN_PROCESS, width, drawing.MUTED),
    ]
    if going_on:
        parts += [
            drawing.pairs(resumed_rows(view), width),
            Content("\n").join(
                [
                    Content.styled("The same from a shell", "bold"),
                    drawing.command(command_text(view.answers), width),
                ]
            ),
        ]
        return Content("\n\n").join(parts)
    if view.trial.asked_s is not None:  # it was asked for: what comes of it stands in front
        parts.append(_trial_part(view, width))
    parts += _planned(view, width)
    if view.trial.asked_s is None:
        parts.append(_trial_part(view, width))
    if not view.wide:
        parts.append(equivalent(view, width))
    return Content("\n\n").join(parts)


def launch_problems(view: WizardView) -> list[str]:
    """Return why the run cannot start, or would fail at once."""
    data = view.inspection.refusal if view.answers.start != "resume" else None
    return [message for message in (view.launch_error, data) if message]


def launch_rows(view: WizardView) -> list[tuple[str, str]]:
    """List the answers in words, the time and the disk they take, and the folder of the run."""
    where = view.answers.run_folder
    place = ("runs as", expanded(where)) if where else ("runs in", str(view.root))
    plan = view.plan.value
    disk = [("disk", disk_text(plan))] if plan else []
    rows = [*summary_rows(view), place, ("time", time_text(view)), *disk]
    changed = _set_by_the_user(view)
    told = ", ".join(f"{key} {value_text(value)}" for key, value in changed.items())
    return [*rows, ("not default", told)] if told else rows


def _set_by_the_user(view: WizardView) -> dict[str, Any]:
    """Return the settings that differ from the defaults and have no line of their own; for the
    demo its settings too."""
    answers, plan = view.answers, view.plan.value
    if answers.is_demo:
        found = dict(plan.changed) if plan else {}
    else:
        given = (one.partition("=") for one in answers.overrides)
        found = flat_configuration(answers) | {key: value for key, _, value in given}
    return {key: value for key, value in found.items()
            if key not in ("model.path", "data.path", "method.name")}  # fmt: skip


def summary_rows(view: WizardView) -> list[tuple[str, str]]:
    """List the answers in words."""
    answers, plan = view.answers, view.plan.value
    steps = f"{answers.settings.get('train.steps', 'auto')} steps"
    offload = str(answers.settings.get("placement.offload", "auto"))
    rate = value_text(answers.settings.get("train.learning_rate", "auto"))
    if plan is not None:
        steps = plan.steps_text
        rate, _ = value_and_reason(view, BY_KEY["train.learning_rate"])
        if plan.layout.offload != offload:
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


def bar_rows(view: WizardView, plan: PlanAnswer) -> list[tuple[str, int | None, int | None]]:
    """Return name, use and limit of each memory; of a few cards each."""
    device = "VRAM" if plan.device == "cuda" else "buffers"
    rows = [(device, plan.device_bytes, plan.device_budget_bytes)]
    if 0 < len(plan.cards) <= MOST_CARDS:
        rows = [(f"card {c.index}", c.device_bytes, c.budget_bytes) for c in plan.cards]
    return [
        *rows,
        ("RAM", plan.host_bytes, plan.host_limit_bytes),
        ("disk", plan.disk_bytes, view.free_disk_bytes),
    ]


def card_lines(plan: PlanAnswer) -> list[str]:
    """Tell what each of several cards does, and which are left out; nothing for one card."""
    dealt = ", ".join(
        f"card {card.index}: {counted(card.blocks, 'block')}"
        + " with embedding and head" * card.edges
        for card in plan.cards
    )
    left_out = [
        f"card {card.index}" + f" ({card.name})" * bool(card.name) + f" is left out: {card.because}"
        for card in plan.left_out
    ]
    return [*([f"cards: {dealt}"] if dealt else []), *left_out]


def margin_text(used: int | None, limit: int | None) -> str:
    """Write how much is left over."""
    if used is None or not limit:
        return ""
    return f"{bytes_text(limit - used)} left" if used <= limit else ""


def time_text(view: WizardView) -> str:
    """Write the run's time: an interval after a dry run, before it an estimate."""
    plan, trial = view.plan.value, view.trial.value
    if trial is not None:
        return f"{trial.eta_text()}, by the speed of the dry run"
    if plan is None or plan.predicted is None:
        why = plan.predicted_because if plan else "there is no plan yet"
        return f"not predicted: {why}"
    told = predicted_text(plan.predicted.eta_s, plan.timing)
    return f"{told}, {HOW_TIMED[plan.timing]}; {view.key('wizard_try')} measures it in a dry run"


def disk_text(plan: PlanAnswer) -> str:
    """Say what is written to the disk, and how much of it stays."""
    written = counted(plan_preview.checkpoints(plan), "checkpoint")
    return (
        f"{bytes_text(plan.disk_bytes)} at most, with the trained model; about {written} of "
        f"{bytes_text(plan.checkpoint_bytes)} are written in turn, and the newest are kept"
    )


def equivalent(view: WizardView, width: int) -> Content:
    """Draw the run as a command and as YAML."""
    hint = f"   {view.key('wizard_command')} copies it"
    text = "\n".join(f"  {line}" for line in config_text(view).rstrip().splitlines())
    return Content("\n").join(
        [
            Content.assemble(("The same from a shell", "bold"), (hint, drawing.MUTED)),
            drawing.command(command_text(view.answers), width),
            Content(""),
            drawing.heading("config.yaml", f"{view.key('wizard_yaml')} copies it", 80),
            Content(text),
        ]
    )


def config_text(view: WizardView) -> str:
    """Write the YAML of the run. The demo needs none, so its own settings come from the plan."""
    plan = view.plan.value
    if view.answers.is_demo and plan is not None:
        return plan_preview.config_text(plan)
    return yaml_text(view.answers)


def _planned(view: WizardView, width: int) -> list[Content]:
    """Draw the answers with the plan's numbers, or why there is no plan."""
    asked = view.plan
    parts = [drawing.pairs(launch_rows(view), width)]
    if asked.refusal is not None:
        back, again = view.key("wizard_back"), view.key("wizard_again")
        cure = f"Press {back} to change an answer, or {again} to ask again."
        return [refused(asked.refusal, cure, width), *parts]
    if asked.value is None:
        return [pending("The engine reads the model and measures what is free", asked, width)]
    lines = [drawing.paragraph(line, width) for line in card_lines(asked.value)]
    return [*parts, Content("\n").join([*_bars(view, asked.value, width), *lines])]


def _bars(view: WizardView, plan: PlanAnswer, width: int) -> list[Content]:
    lines = []
    for name, used, limit in bar_rows(view, plan):
        bar = drawing.memory_bar(name, used, limit, width - 16)
        left = margin_text(used, limit)
        fits = left and len(bar.plain) + 2 + len(left) <= width
        lines.append(Content.assemble(bar, (f"  {left}" if fits else "", drawing.MUTED)))
    return lines


def _trial_part(view: WizardView, width: int) -> Content:
    asked = view.trial
    hint = f"{view.key('wizard_try')} trains three real steps; nothing is kept"
    if asked.pending:
        hint = f"{view.key('wizard_back')} ends it"
    title = drawing.heading("Dry run", hint, width)
    if asked.refusal is not None:
        told = drawing.problem(asked.refusal, width)
    elif asked.value is not None:
        told = _compared(asked.value, width)
    elif asked.pending:
        told = pending("Training three steps", asked, width)
    else:
        return title
    return Content("\n").join([title, told])


def _compared(trial: DryRunAnswer, width: int) -> Content:
    lines = [Content.styled(f"  {'':<14}{'predicted':>12}{'measured':>12}  error", drawing.MUTED)]
    for row in trial.rows():
        lines.append(
            Content.assemble(
                (f"  {row.name:<14}", drawing.MUTED),
                f"{row.predicted:>12}",
                (f"{row.measured:>12}", "bold"),
                (f"  {row.error}", drawing.MUTED),
            )
        )
    if trial.is_over_limit:
        lines.append(drawing.problem("needs more memory than there is: set the dial to fit", width))
    return Content("\n").join(lines)


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
