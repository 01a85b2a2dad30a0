"""The methods side by side: whether each fits, what it takes, and what it gives up."""

from __future__ import annotations

from textual.content import Content

from fluxtrain.errors import EXIT_DOES_NOT_FIT
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.units import UNKNOWN, bytes_text, count_text, predicted_text
from fluxtui.answers.questions import GIVES_UP, METHOD_TITLES
from fluxtui.answers.rows import METHODS, rows_of
from fluxtui.widgets.spans import cut
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.engine.plan_preview import fit, model_line
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.found import pending
from fluxtui.wizard.pages.training import value_and_reason
from fluxtui.wizard.pages.wizard_view import WizardView

_MARKS = {"fits": "✓", "fits with offload": "✓", "does not fit": "✗", "not known": "✗"}
_NAME_CELLS = 9


def method_page(view: WizardView, width: int) -> Content:
    """Draw the question, its cards, their trade-offs, and the questions about adapters."""
    keys = view.key("wizard_method_before", "wizard_method_after")
    lines = [drawing.heading("Choose a method", f"{keys} choose", width), _limits(view, width)]
    lines += [_cards(view, width), *_given_up(view, width)]
    lines += _trouble(view, width)
    questions = _questions(view, width)
    if questions:
        lines += [*([] if view.short else [Content("")]), *questions]
    plan = view.plan.value
    if plan is not None:
        words = " · ".join((numbers_line(plan), model_line(plan)))
        lines += [Content(""), drawing.paragraph(words, width, drawing.MUTED)]
    return Content("\n").join(lines)


def fit_words(view: WizardView, method: str | None = None) -> str:
    """Tell in one line whether a method (by default the chosen one) fits."""
    asked = view.plan_of(method or view.answers.method)
    if asked.value is not None:
        return fit(asked.value)
    if asked.refusal is not None:
        fits = asked.exit_code != EXIT_DOES_NOT_FIT
        return "not known" if fits else "does not fit"
    return "being planned" if asked.pending else "waits"


def numbers_line(plan: PlanAnswer) -> str:
    """Write the predicted speed in one line, or why there is none."""
    told = plan.predicted
    if told is None:
        return f"time is not predicted: {plan.predicted_because}"
    return (
        f"{predicted_text(told.step_s, plan.timing)} a step, "
        f"{count_text(told.tokens_per_s)} tokens/s, "
        f"bound by {told.binds}"
    )


def method_facts(plan: PlanAnswer | None) -> list[tuple[str, str]]:
    """Return names and values of a card; without a plan nothing is known."""
    if plan is None:
        names = ("device", "host", "a step", "trains", "checkpoint")
        return [(name, UNKNOWN) for name in names]
    return [
        ("GPU" if plan.device == "cuda" else "buffers", bytes_text(plan.device_bytes)),
        ("host", bytes_text(plan.host_bytes)),
        ("a step", predicted_text(plan.predicted.step_s if plan.predicted else None, plan.timing)),
        ("trains", count_text(plan.method.trained_parameters)),
        ("checkpoint", bytes_text(plan.checkpoint_bytes)),
    ]


def method_lines(view: WizardView, method: str) -> list[str]:
    """Describe a method in plain lines, with its trade-off."""
    asked, title = view.plan_of(method), METHOD_TITLES[method]
    head = f"{title} {fit_words(view, method)}"
    if asked.value is None:
        told = f": {asked.refusal}" if asked.refusal else ""
    else:
        told = ": " + ", ".join(f"{name} {value}" for name, value in method_facts(asked.value))
    return [head + told, f"{title}: {GIVES_UP[method]}"]


def _limits(view: WizardView, width: int) -> Content:
    """Write the memory limits, with which all cards are compared."""
    plans = [view.plan_of(method).value for method in METHODS]
    plan = next((plan for plan in plans if plan is not None), None)
    if plan is None:
        return Content("")
    parts = [f"host memory {bytes_text(plan.host_limit_bytes)}"] if plan.host_limit_bytes else []
    if plan.device_budget_bytes:
        parts.insert(0, f"{'GPU' if plan.device == 'cuda' else 'buffers'} "
                        f"{bytes_text(plan.device_budget_bytes)}")  # fmt: skip
    text = f"available: {', '.join(parts)}" if parts else ""
    return Content.styled(drawing.shortened(text, width), drawing.MUTED)


def _cards(view: WizardView, width: int) -> Content:
    """Draw the cards next to each other, or a line each where they do not fit."""

    def rows(method: str) -> list[drawing.CardRow]:
        facts = method_facts(view.plan_of(method).value)
        return [("", *_verdict(view, method)), *((name, value, "bold") for name, value in facts)]

    cards = [(METHOD_TITLES[one], rows(one), one == view.answers.method) for one in METHODS]
    beside = drawing.cards(cards, width)
    return beside or Content("\n").join(_row(view, method, width) for method in METHODS)


def _row(view: WizardView, method: str, width: int) -> Content:
    chosen = method == view.answers.method
    words, look = _verdict(view, method)
    plan = view.plan_of(method).value
    known = method_facts(plan)[:3] if plan is not None else []
    text = ", ".join([words, *(f"{name} {value}" for name, value in known)])
    return Content.assemble(
        ("▸ " if chosen else "  ", "bold $accent"),
        (METHOD_TITLES[method].ljust(_NAME_CELLS), "bold"),
        (cut(text, width - 2 - _NAME_CELLS), look),
    )


def _verdict(view: WizardView, method: str) -> tuple[str, str]:
    """Return the verdict on a method and its style."""
    words = fit_words(view, method)
    asked: Asked[PlanAnswer] = view.plan_of(method)
    if words not in _MARKS:
        waited = f"  {asked.waited_s:.0f} s" if asked.pending else ""
        return f"{words}{waited}", drawing.MUTED
    fits = _MARKS[words] == "✓"
    return f"{_MARKS[words]} {words.upper()}", "bold $success" if fits else "bold $error"


def _given_up(view: WizardView, width: int) -> list[Content]:
    """Draw a line for each method: its trade-off."""
    lines = []
    for method in METHODS:
        here = method == view.answers.method
        text = GIVES_UP[method]
        lines.append(
            Content.assemble(
                ("▸ " if here else "  ", "bold $accent"),
                (METHOD_TITLES[method].ljust(_NAME_CELLS - 2), "bold" if here else drawing.MUTED),
                (cut(text, width - _NAME_CELLS), "" if here else drawing.MUTED),
            )
        )
    return lines


def _trouble(view: WizardView, width: int) -> list[Content]:
    """Say why the chosen method is impossible, and a cure; or that it is being planned."""
    asked = view.plan
    if asked.refusal is not None:
        cure = (
            f"{view.key('wizard_back')} changes model or data, {view.key('wizard_again')} asks "
            "again"
        )
        told = drawing.problem(asked.refusal, width)
        return [Content(""), told, Content.styled(cure, drawing.MUTED)]
    if asked.value is None and not asked.pending:
        return [Content(""), pending("The machine is measured first", view.probe, width)]
    return []


def _questions(view: WizardView, width: int) -> list[Content]:
    """Draw a line for each setting of the method: its key, the value, and its effect."""
    rows = [
        (view.key(row.action), row.name, *value_and_reason(view, row))
        for row in rows_of("method", view.answers.method)
    ]
    values = min(20, max((len(value) for _, _, value, _ in rows), default=0))
    return [
        Content.assemble(
            (f"{key} ", "bold $accent"),
            (name.ljust(_NAME_CELLS), drawing.MUTED),
            (drawing.shortened(value, values).ljust(values), "bold"),
            (f"  {cut(reason, width - values - _NAME_CELLS - 4)}", drawing.MUTED),
        )
        for key, name, value, reason in rows
    ]
