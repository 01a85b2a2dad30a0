"""The training: how fast, how long, how it is judged and where it lives, each with its reason."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from fluxtrain.events.answers.plan import PlanAnswer
from fluxtui.answers.training import (
    TRAINING_QUESTIONS,
    TrainingQuestion,
    answer_text,
    question_of,
)
from fluxtui.widgets.spans import cut
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.wizard_view import WizardView

GROUP_CELLS = 2 + max(len(one.group) for one in TRAINING_QUESTIONS)
NAME_CELLS = 2 + max(len(one.name) for one in TRAINING_QUESTIONS)
VALUE_CELLS = 11
REASON_LINES = 3  # kept free, so that the page does not jump under the cursor
AS_SET = "as set"


def training_page(view: WizardView, width: int, cursor: int = 0, problem: str = "") -> Content:
    """Draw a line for each question; below, the reason of the chosen one or a `problem`."""
    keys = view.key("wizard_value_before", "wizard_value_after")
    hint = f"{keys} change, {view.key('wizard_edit')} types a value"
    lines = [drawing.heading("Training settings", hint, width)]
    if not view.short:
        lines.append(Content(""))
    group = ""
    for index, question in enumerate(TRAINING_QUESTIONS):
        head = question.group if question.group != group else ""
        group = question.group
        lines.append(_row(view, question, head, width, here=index == cursor))
    chosen = TRAINING_QUESTIONS[cursor]
    _, because = value_and_reason(view, chosen)
    told = drawing.paragraph(f"{chosen.name}: {because}", width - 2)
    if problem:
        told = drawing.problem(problem, width)
    indent = Content("" if problem else "  ")
    drawn = [indent + line for line in told.split("\n")]
    drawn = drawn if problem else drawn[:REASON_LINES]
    drawn += [Content("")] * (REASON_LINES - len(drawn))
    return Content("\n").join([*lines, *([] if view.short else [Content("")]), *drawn])


def value_and_reason(view: WizardView, question: TrainingQuestion) -> tuple[str, str]:
    """Return the run's value and why: as set, as the engine chose it, or the default's reason."""
    answers, plan = view.answers, view.plan.value
    value = getattr(answers, question.field)
    choice = _choice(plan, question.key)
    if value not in (None, ""):
        effect = ""
        if choice is not None and choice[1].startswith(AS_SET):
            effect = choice[1].removeprefix(AS_SET)
        return answer_text(question, value), (
            f"set here{effect}; the default is {question.default}: {question.reason}"
        )
    if question.field == "steps" and plan is not None and not _of_the_run(plan, question):
        return answer_text(question, None), f"{plan.steps_text}, from the epochs: {question.reason}"
    own = _of_the_run(plan, question)
    if question.clears and getattr(answers, question.clears) is not None:
        other = question_of(question.clears).name
        return "-", f"not used, as the {other} are set; a value here replaces them"
    if own is not None:
        if question.field == "epochs":
            return "-", "not used, as the demo sets a number of steps; a value here replaces it"
        why = "the demo's own" if answers.is_demo else "as the run's settings say"
        return answer_text(question, own), f"{why}; elsewhere {question.default}: {question.reason}"
    if choice is not None:
        return choice[0], choice[1]
    return question.default, question.reason


def row_texts(view: WizardView) -> list[tuple[TrainingQuestion, str, str]]:
    """Return every question with its value and reason."""
    return [(one, *value_and_reason(view, one)) for one in TRAINING_QUESTIONS]


def _choice(plan: PlanAnswer | None, key: str) -> tuple[str, str] | None:
    """Return the engine's choice for a setting, and why."""
    found = [one for one in plan.choices if one.name == key] if plan is not None else []
    return (found[0].value, found[0].because) if found else None


def _of_the_run(plan: PlanAnswer | None, question: TrainingQuestion) -> Any:
    """Return the planned configuration's value if not the default, such as the demo's own."""
    if plan is None or not question.key:
        return None
    changed = {one.key: one.value for one in plan.settings if one.changed}
    if question.field == "epochs":
        return changed.get("train.steps")
    return changed.get(question.key)


def _row(view: WizardView, question: TrainingQuestion, head: str, width: int, *,
         here: bool) -> Content:  # fmt: skip
    value, because = value_and_reason(view, question)
    is_set = getattr(view.answers, question.field) not in (None, "")
    room = max(0, width - 2 - GROUP_CELLS - NAME_CELLS - VALUE_CELLS - 1)
    if question.kind == "folder" and is_set:  # a path needs the whole line
        told = (drawing.shortened(value, VALUE_CELLS + room), "bold")
        shown = Content.assemble(told)
    else:
        note = "set" if is_set else because
        shown = Content.assemble(
            (drawing.shortened(value, VALUE_CELLS).ljust(VALUE_CELLS + 1),
             "bold" if is_set or here else ""),
            (cut(note, room), drawing.MUTED),
        )  # fmt: skip
    return Content.assemble(
        (drawing.CURSOR if here else "  ", "bold $accent"),
        (head.ljust(GROUP_CELLS), "bold"),
        (question.name.ljust(NAME_CELLS), "" if here else drawing.MUTED),
        shown,
    )
