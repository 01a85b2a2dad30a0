"""What the wizard's pages say as plain lines: for screen readers and terminals that cannot draw.

No boxes, no bars, no columns: one fact a line, the same facts as on the screen.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.events.answers.answers import (
    DryRunAnswer,
    InspectionAnswer,
    PairsInspectionAnswer,
    TextPiece,
)
from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer, PlanOption
from fluxtrain.units import bytes_text
from fluxtui.answers.answers import Answers
from fluxtui.answers.questions import METHOD_TITLES
from fluxtui.answers.rows import METHODS, SettingRow
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.engine.machine import age_text, machine_table, machine_warnings
from fluxtui.wizard.engine.plan_preview import fit
from fluxtui.wizard.pages.data import inspection_rows
from fluxtui.wizard.pages.launch import (
    bar_rows,
    card_lines,
    launch_rows,
    margin_text,
    resumed_rows,
)
from fluxtui.wizard.pages.method import fit_words, method_lines, numbers_line
from fluxtui.wizard.pages.strategy import card_facts
from fluxtui.wizard.pages.training import value_and_reason
from fluxtui.wizard.pages.wizard_view import WizardView


def check_lines(check: Check) -> list[str]:
    """Tell what was found about an answer."""
    if check.error:
        return [f"error: {check.error}"]
    return [*pair_lines(check.facts), *(f"note: {warning}" for warning in check.warnings)]


def pair_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Write `name: value` for each."""
    return [f"{name}: {value}" for name, value in rows]


def inspection_lines(found: InspectionAnswer | PairsInspectionAnswer) -> list[str]:
    """Write lengths in words, and the samples: which parts are trained on and which are context; of
    pairs of images their sizes and prompts."""
    if isinstance(found, PairsInspectionAnswer):
        notes = [f"note: {note}" for note in found.notes]
        prompts = [f"pair {number}: {text}" for number, text in enumerate(found.prompts, start=1)]
        return [*pair_lines(found.rows()), *notes, *prompts]
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
        f"{'trained on' if piece.trained else 'context'}: {line}"
        for piece in pieces
        for line in piece.text.splitlines()
        if line.strip()
    ]


def machine_rows(asked: Asked[ProbeAnswer]) -> list[str]:
    """Describe the machine and the age of its rates."""
    probe = asked.value
    if probe is None:
        return [f"error: {asked.refusal}"]
    rows = machine_table(probe)
    lines = [", ".join(filter(None, (f"{name}: {value}", how))) for name, value, how in rows]
    return [*lines, *(f"note: {warning}" for warning in machine_warnings(probe)), age_text(probe)]


def methods_lines(view: WizardView) -> list[str]:
    """Say for each method whether it fits, its memory and time, and its trade-off."""
    return [line for method in METHODS for line in method_lines(view, method)]


def setting_lines(view: WizardView, rows: Sequence[SettingRow]) -> list[str]:
    """List settings with their numbers, values and reasons."""
    return [
        f"{number} {row.name}: " + ", ".join(value_and_reason(view, row))
        for number, row in enumerate(rows, start=1)
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


def trial_lines(asked: Asked[DryRunAnswer]) -> list[str]:
    """Write measured against predicted values."""
    trial = asked.value
    if trial is None:
        return [f"error: {asked.refusal}"]
    lines = [
        f"{row.name}: predicted {row.predicted}, measured {row.measured}"
        + (f", error {row.error}" if row.error else "")
        for row in trial.rows()
    ]
    over = "error: needs more memory than there is: set the dial to fit"
    return [*lines, *([over] if trial.is_over_limit else []), trial.eta_text()]


def launch_lines(view: WizardView) -> list[str]:
    """Describe the run in words, with the memory and the disk that it takes."""
    if view.answers.start == "resume":
        return pair_lines(resumed_rows(view))
    plan = view.plan.value
    uses = [_use_line(*row) for row in bar_rows(view, plan)] if plan else []
    refusal = [f"error: {view.plan.refusal}"] if view.plan.refusal else []
    return [*pair_lines(launch_rows(view)), *uses, *(card_lines(plan) if plan else []), *refusal]


def draft_lines(draft: Answers) -> list[str]:
    """Describe the kept answers."""
    return pair_lines([("model", draft.model_path or "-"), ("data", draft.data_file or "-")])


def _use_line(name: str, used: int | None, limit: int | None) -> str:
    left = margin_text(used, limit)
    of = f" of {bytes_text(limit)}" if limit else ""
    return f"{name}: {bytes_text(used)}{of}" + (f", {left}" if left else "")
