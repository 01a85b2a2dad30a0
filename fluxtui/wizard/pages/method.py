"""The methods that train, each as a card that says whether it fits."""

from __future__ import annotations

from textual.content import Content

from fluxtrain.client.plan import PlanAnswer
from fluxtrain.errors import EXIT_DOES_NOT_FIT
from fluxtrain.units import count_text, duration_text
from fluxtui.wizard.answers.questions import METHODS
from fluxtui.wizard.engine.plan_preview import fit, model_line
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.waiting import pending
from fluxtui.wizard.pages.wizard_view import WizardView

_STYLES = {"fits": "$success", "fits with offload": "$success", "does not fit": "$error"}
_MARKS = {"fits": "✓", "fits with offload": "✓", "does not fit": "✗"}


def method_page(view: WizardView, width: int) -> Content:
    """The question and its cards."""
    lines = [Content.styled("How shall it learn?", "bold"), Content("")]
    for option in METHODS:
        here = option.id == view.answers.method
        head = Content.assemble(
            ("▸ " if here else "  ", "bold $accent"),
            (option.title.ljust(8), "bold $accent" if here else "bold"),
            drawing.shortened(option.text, width - 10),
        )
        lines += [head, Content(""), _card(view, width) if here else Content("")]
    return Content("\n").join(lines)


def fit_words(view: WizardView) -> str:
    """Whether the chosen method fits, in one line."""
    plan = view.plan.value
    if plan is not None:
        return fit(plan)
    if view.plan.refusal is not None:
        fits = view.plan.exit_code != EXIT_DOES_NOT_FIT
        return "not known" if fits else "does not fit"
    return "being planned"


def numbers_line(plan: PlanAnswer) -> str:
    """The predicted speed in one line, or why there is none."""
    told = plan.predicted
    if told is None:
        return f"time is not predicted: {plan.predicted_because}"
    return (
        f"{duration_text(told.step_s)} a step, {count_text(told.tokens_per_s)} tokens/s, "
        f"bound by {told.binds}"
    )


def _card(view: WizardView, width: int) -> Content:
    words, plan = fit_words(view), view.plan.value
    if view.plan.refusal is not None:
        verdict = "DOES NOT FIT" if words == "does not fit" else "NOT KNOWN"
        head = Content.styled(f"✗ {verdict}", "bold $error")
        cure = (
            f"{view.key('wizard_back')} changes model or data, {view.key('wizard_again')} asks "
            "again"
        )
        body = drawing.problem(view.plan.refusal, width)
        return Content("\n").join([head, body, Content.styled(cure, drawing.MUTED)])
    if plan is None:
        return pending("Seeing whether it fits", view.plan, width)
    head = Content.styled(f"{_MARKS[words]} {words.upper()}", f"bold {_STYLES[words]}")
    lines = [
        head,
        drawing.memory_bar("device", plan.device_bytes, plan.device_budget_bytes, width),
        drawing.memory_bar("host", plan.host_bytes, plan.host_limit_bytes, width),
        Content(""),
        drawing.paragraph(numbers_line(plan), width),
        drawing.paragraph(model_line(plan), width, drawing.MUTED),
    ]
    return Content("\n").join(lines)
