"""The whole run before it starts: memory, disk, time, what is not a default, and a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.content import Content

from fluxtrain.events.answers.answers import DryRunAnswer
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.units import bytes_text, predicted_text
from fluxtui.answers.configuring import yaml_text
from fluxtui.answers.launching import command_text
from fluxtui.wizard.engine import plan_preview
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.waiting import pending, refused
from fluxtui.wizard.pages.wizard_view import WizardView
from fluxtui.words import counted

MOST_CARDS = 4  # with a bar each
HOW_TIMED = {
    "measured": "predicted",
    "disturbed": "as a block was timed while other programs computed",
    "assumed": "as nothing of this model was timed here yet",
}


def preview_page(view: WizardView, width: int) -> Content:
    """Bars with margins, time, disk, differences from the defaults, and predicted = measured?"""
    asked = view.plan
    if asked.refusal is not None:
        back, again = view.key("wizard_back"), view.key("wizard_again")
        cure = f"Press {back} to change an answer, or {again} to ask again."
        return refused(asked.refusal, cure, width)
    if asked.value is None:
        return pending("The engine reads the model and measures what is free", asked, width)
    plan = asked.value
    parts = [
        Content("\n").join([Content.styled("Before it starts", "bold"), *_bars(view, plan, width)]),
        Content("\n").join(
            drawing.paragraph(line, width)
            for line in (*card_lines(plan), time_line(view), disk_line(plan))
        ),
        Content("\n").join([_trial_title(view, width), _trial(view, width)]),
        Content("\n").join([Content.styled("Not the defaults", "bold"), _changed(plan, width)]),
    ]
    if not view.wide:
        parts.append(equivalent(view, width))
    return Content("\n\n").join(parts)


def bar_rows(view: WizardView, plan: PlanAnswer) -> list[tuple[str, int | None, int | None]]:
    """Name, what is taken and what there is, of each memory; of a few cards each."""
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


def time_line(view: WizardView) -> str:
    """Write the run's time: an interval after a dry run, before it a prediction."""
    plan, trial = view.plan.value, view.trial.value
    if trial is not None:
        return f"time: {trial.eta_text()}, by the speed of the dry run"
    if plan is None or plan.predicted is None:
        why = plan.predicted_because if plan else "there is no plan yet"
        return f"time: not predicted: {why}"
    told = predicted_text(plan.predicted.eta_s, plan.timing)
    return f"time: {told}, {HOW_TIMED[plan.timing]}; a dry run measures it"


def disk_line(plan: PlanAnswer) -> str:
    """Tell what is written to the disk, and how much of it stays."""
    stays = f"checkpoints and the trained model take {bytes_text(plan.disk_bytes)} at most"
    count, each = plan_preview.checkpoints(plan), plan.checkpoint_bytes
    plural = "s" * (count != 1)
    return (
        f"disk: {stays}; about {count} checkpoint{plural} of {bytes_text(each)} are written in "
        "turn, and the newest are kept"
    )


def changed_rows(changed: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the settings that are not the defaults."""
    return [(key, str(value)) for key, value in changed.items()]


def equivalent(view: WizardView, width: int) -> Content:
    """Draw the run as a command and as YAML."""
    hint = f"   {view.key('wizard_command')} copies it"
    return Content("\n").join(
        [
            Content.assemble(("The same from a shell", "bold"), (hint, drawing.MUTED)),
            drawing.command(command_text(view.answers), width),
            Content(""),
            yaml_block(view),
        ]
    )


def yaml_block(view: WizardView) -> Content:
    """Draw the configuration file."""
    text = "\n".join(f"  {line}" for line in config_text(view).rstrip().splitlines())
    title = drawing.heading("config.yaml", f"{view.key('wizard_yaml')} copies it", 80)
    return Content("\n").join([title, Content(text)])


def config_text(view: WizardView) -> str:
    """Write the YAML of the run. The demo needs none, so its own settings come from the plan."""
    plan = view.plan.value
    if view.answers.is_demo and plan is not None:
        return plan_preview.config_text(plan)
    return yaml_text(view.answers)


def _bars(view: WizardView, plan: PlanAnswer, width: int) -> list[Content]:
    lines = []
    for name, used, limit in bar_rows(view, plan):
        bar = drawing.memory_bar(name, used, limit, width - 16)
        left = margin_text(used, limit)
        fits = left and len(bar.plain) + 2 + len(left) <= width
        lines.append(Content.assemble(bar, (f"  {left}" if fits else "", drawing.MUTED)))
    return lines


def _trial_title(view: WizardView, width: int) -> Content:
    hint = f"{view.key('wizard_try')} trains three real steps; nothing is kept"
    if view.trial.pending:
        hint = f"{view.key('wizard_back')} ends it"
    return drawing.heading("Dry run", hint, width)


def _trial(view: WizardView, width: int) -> Content:
    asked = view.trial
    if asked.refusal is not None:
        return drawing.problem(asked.refusal, width)
    if asked.value is not None:
        return _compared(asked.value, width)
    if asked.pending:
        return pending("Training three steps", asked, width)
    return Content.styled("  not tried yet", drawing.MUTED)


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


def _changed(plan: PlanAnswer, width: int) -> Content:
    rows = changed_rows(plan.changed)
    if not rows:
        return Content.styled("  everything is at its default", drawing.MUTED)
    return drawing.pairs(rows, width)
