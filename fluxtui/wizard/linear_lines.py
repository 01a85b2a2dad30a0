"""What the wizard's pages say as plain lines: for screen readers and terminals that cannot draw.

No boxes, no bars, no columns: one fact a line, the same facts as on the screen.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.events.answers.answers import DryRunAnswer, InspectionAnswer, TextPiece
from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer, PlanOption
from fluxtrain.units import bytes_text
from fluxtui.answers.answers import METHODS, Answers
from fluxtui.answers.questions import METHOD_TITLES
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.engine.inspection import inspection_rows
from fluxtui.wizard.engine.machine import age_text, machine_table, machine_warnings
from fluxtui.wizard.engine.plan_preview import fit
from fluxtui.wizard.pages.launch import launch_rows, resumed_rows
from fluxtui.wizard.pages.method import fit_words, method_lines, numbers_line
from fluxtui.wizard.pages.preview import (
    bar_rows,
    card_lines,
    changed_rows,
    disk_line,
    margin_text,
    time_line,
)
from fluxtui.wizard.pages.strategy import card_facts
from fluxtui.wizard.pages.training import row_texts
from fluxtui.wizard.pages.wizard_view import WizardView


def check_lines(check: Check) -> list[str]:
    """Tell what was found about an answer."""
    if check.error:
        return [f"error: {check.error}"]
    return [*pair_lines(check.facts), *(f"note: {warning}" for warning in check.warnings)]


def pair_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Write `name: value` for each."""
    return [f"{name}: {value}" for name, value in rows]


def inspection_lines(found: InspectionAnswer) -> list[str]:
    """Lengths in words, and the samples: which parts are trained on and which are context."""
    lengths = sorted(found.lengths)
    at = [lengths[round(share * (len(lengths) - 1))] for share in (0.5, 0.9, 1.0)]
    lines = [
        *pair_lines(inspection_rows(found)),
        f"lengths: half of the documents have up to {at[0]:,} tokens, nine in ten up to "
        f"{at[1]:,}, the longest {at[2]:,}; a row has {found.sequence_length:,}",
    ]
    for number, sample in enumerate(found.samples, start=1):
        lines.append(f"sample {number}: {sample.title}")
        lines += piece_lines(sample.pieces)
    return lines


def piece_lines(pieces: Sequence[TextPiece]) -> list[str]:
    """Mark every line of a sample as trained on or as context."""
    return [
        f"{'trained on' if piece.learnt else 'context'}: {line}"
        for piece in pieces
        for line in piece.text.splitlines()
        if line.strip()
    ]


def machine_rows(probe: ProbeAnswer) -> list[str]:
    """Describe the machine and the age of its rates."""
    rows = machine_table(probe)
    lines = [", ".join(filter(None, (f"{name}: {value}", how))) for name, value, how in rows]
    return [*lines, *(f"note: {warning}" for warning in machine_warnings(probe)), age_text(probe)]


def methods_lines(view: WizardView) -> list[str]:
    """Tell for each method whether it fits, what it takes, and its trade-off."""
    return [line for method in METHODS for line in method_lines(view, method)]


def training_lines(view: WizardView) -> list[str]:
    """List every setting of the training with its number, value and reason."""
    return [
        f"{number} {question.name}: {value}, {because}"
        for number, (question, value, because) in enumerate(row_texts(view), start=1)
    ]


def fit_lines(view: WizardView) -> list[str]:
    """Tell whether the chosen method fits, and how fast it is."""
    plan, title = view.plan.value, METHOD_TITLES[view.answers.method]
    if plan is None:
        return [f"{title} {fit_words(view)}: {view.plan.refusal}"]
    uses = [_use_line(name, used, limit) for name, used, limit in bar_rows(view, plan)]
    return [f"{title} {fit(plan)}", *uses, numbers_line(plan)]


def card_line(card: PlanOption, plan: PlanAnswer) -> str:
    """Describe a ranked plan in one line."""
    return f"{card.name}: " + ", ".join(f"{name} {value}" for name, value in card_facts(card, plan))


def choice_lines(plan: PlanAnswer) -> list[str]:
    """List every choice with its reason."""
    return [f"{choice.name} is {choice.value}: {choice.because}" for choice in plan.choices]


def preview_lines(view: WizardView, plan: PlanAnswer) -> list[str]:
    """Memory, disk, time, and what is not a default."""
    lines = [_use_line(name, used, limit) for name, used, limit in bar_rows(view, plan)]
    lines += [*card_lines(plan), time_line(view), disk_line(plan)]
    changed = ", ".join(f"{key} {value}" for key, value in changed_rows(plan.changed))
    return [*lines, f"not the defaults: {changed or 'nothing'}"]


def trial_lines(trial: DryRunAnswer) -> list[str]:
    """Measured against predicted."""
    lines = [
        f"{row.name}: predicted {row.predicted}, measured {row.measured}"
        + (f", error {row.error}" if row.error else "")
        for row in trial.rows()
    ]
    warning = (
        ["error: needs more memory than there is: set the dial to fit"]
        if trial.is_over_limit
        else []
    )
    return [*lines, *warning, trial.eta_text()]


def launch_lines(view: WizardView) -> list[str]:
    """Describe the run in words."""
    going_on = view.answers.start == "resume"
    return pair_lines(resumed_rows(view) if going_on else launch_rows(view))


def draft_lines(draft: Answers) -> list[str]:
    """Describe the kept answers."""
    return pair_lines([("model", draft.model_path or "-"), ("data", draft.data_file or "-")])


def _use_line(name: str, used: int | None, limit: int | None) -> str:
    left = margin_text(used, limit)
    of = f" of {bytes_text(limit)}" if limit else ""
    return f"{name}: {bytes_text(used)}{of}" + (f", {left}" if left else "")
