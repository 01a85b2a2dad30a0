"""The training: how fast, how long, how it is judged and where it lives, each with its reason."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from fluxtrain.events.answers.plan import PlanAnswer
from fluxtui.answers.rows import (
    BY_KEY,
    ROWS,
    SettingRow,
    declared,
    default_text,
    rows_of,
    value_text,
)
from fluxtui.widgets.spans import cut
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.wizard_view import WizardView

NAME_CELLS = 2 + max(len(row.name) for row in ROWS if row.page == "training")
VALUE_CELLS = 11
REASON_LINES = 3  # kept free, so that the page does not jump under the cursor
AS_SET = "as set"


def training_page(view: WizardView, width: int, cursor: int = 0) -> Content:
    """Draw a line for each setting under the headings of their groups, with all reasons where they
    fit, else the chosen one's below."""
    keys = view.key("wizard_value_before", "wizard_value_after")
    hint = f"{keys} change, {view.key('wizard_edit')} types a value"
    lines = [drawing.heading("Training settings", hint, width)]
    group = ""
    rows = rows_of("training", of_images=view.answers.of_images)
    for index, row in enumerate(rows):
        if row.group != group and not view.short:
            lines.append(Content.styled(row.group, "bold"))
        group = row.group
        lines += _row(view, row, width, here=index == cursor)
    if not view.tall:
        chosen = rows[cursor]
        _, because = value_and_reason(view, chosen)
        told = drawing.paragraph(f"{chosen.name}: {because}", width - 2)
        drawn = [Content("  ") + line for line in told.split("\n")][:REASON_LINES]
        drawn += [Content("")] * (REASON_LINES - len(drawn))
        lines += [*([] if view.short else [Content("")]), *drawn]
    return Content("\n").join(lines)


def value_and_reason(view: WizardView, row: SettingRow) -> tuple[str, str]:
    """Return the run's value and why: set by the user, chosen by the engine, or the setting's
    help."""
    settings, plan = view.answers.settings, view.plan.value
    about, choice = declared(row).help, _choice(plan, row.key)
    if row.key in settings:
        effect = ""
        if choice is not None and choice[1].startswith(AS_SET):
            effect = choice[1].removeprefix(AS_SET)
        return value_text(settings[row.key]), (
            f"set here{effect}; the default is {default_text(row)}: {about}"
        )
    if row.replaces in settings:
        return "-", f"not used, as {BY_KEY[row.replaces].name} is set; a value here replaces it"
    changed = _changed(plan)
    if row.key == "train.epochs" and "train.steps" in changed:
        return "-", "not used, as the demo sets a number of steps; a value here replaces it"
    if row.key in changed:
        why = "the demo's own" if view.answers.is_demo else "as the run's settings say"
        return value_text(changed[row.key]), f"{why}; elsewhere {default_text(row)}: {about}"
    if row.key == "train.steps":
        told = f"{plan.steps_text}: " if plan is not None else ""
        return "by epochs", f"{told}{about}"
    if choice is not None:
        return choice[0], choice[1]
    return default_text(row), about


def _choice(plan: PlanAnswer | None, key: str) -> tuple[str, str] | None:
    """Return the engine's choice for a setting, and why."""
    found = [one for one in plan.choices if one.name == key] if plan is not None else []
    return (found[0].value, found[0].because) if found else None


def _changed(plan: PlanAnswer | None) -> dict[str, Any]:
    """Return the settings of the planned configuration, such as the demo's own values."""
    return {one.key: one.value for one in plan.settings if one.changed} if plan else {}


def _row(view: WizardView, row: SettingRow, width: int, *, here: bool) -> list[Content]:
    value, because = value_and_reason(view, row)
    is_set = row.key in view.answers.settings
    room = max(0, width - 2 - NAME_CELLS - VALUE_CELLS - 1)
    style = "bold" if is_set or here else ""
    notes = [""]
    if row.is_folder and is_set:  # a path needs the whole line
        shown = drawing.shortened(value, VALUE_CELLS + room)
    else:
        shown = drawing.shortened(value, VALUE_CELLS).ljust(VALUE_CELLS + 1)
        note = because.removeprefix("set here; ") if is_set else because
        notes = [cut("set" if is_set else note, room)]
        if view.tall and room > len(note) // 8:
            notes = drawing.in_lines(note, room)
            if not here and len(notes) > 2:
                notes = [notes[0], cut(" ".join(notes[1:]), room)]
    head = Content.assemble(
        (drawing.CURSOR if here else "  ", "bold $accent"),
        (row.name.ljust(NAME_CELLS), "" if here else drawing.MUTED),
        (shown, style),
        (notes[0], drawing.MUTED),
    )
    indent = " " * (2 + NAME_CELLS + VALUE_CELLS + 1)
    return [head, *(Content.styled(indent + note, drawing.MUTED) for note in notes[1:])]
