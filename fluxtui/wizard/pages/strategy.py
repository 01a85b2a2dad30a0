"""The strategy: the dial from fast to fit, the ranked plans as cards, and why each choice."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from fluxtrain.events.answers.plan import PlanAnswer, PlanOption, distinct_plans
from fluxtrain.events.events import ChoiceMade
from fluxtrain.units import bytes_text, count_text, predicted_text
from fluxtui.answers.answers import DIAL
from fluxtui.answers.rows import BY_KEY, value_text
from fluxtui.wizard.engine.machine import age_text, machine_table, machine_warnings
from fluxtui.wizard.engine.plan_preview import unranked_because
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.found import pending, refused
from fluxtui.wizard.pages.wizard_view import WizardView

OLDER = "planned before the numbers below were set"


def strategy_page(view: WizardView, width: int, *, cursor: int = 0, why: bool = False) -> Content:
    """Draw the choices of where bytes live and how many rows a step has; below, this machine.

    The choice at `cursor` shows its reason; with `why` all of them do.
    """
    return Content("\n").join(
        [*_strategy(view, width, cursor, why), Content(""), *_machine(view, width)]
    )


def _strategy(view: WizardView, width: int, cursor: int, why: bool) -> list[Content]:
    head = [dial_line(view, width), Content("")]
    if view.cards:
        older = drawing.paragraph(OLDER, width, drawing.MUTED) if view.cards_are_older else ""
        head += [cards(view, width), Content("") + older]
    asked = view.plan
    if asked.refusal is not None:
        return [*head, refused(asked.refusal, _cure(view), width)]
    if asked.value is None:
        note = "goes on when the plan is there" if view.goes_on else ""
        what = "The engine reads the model and measures what is free"
        return [*head, pending(what, asked, width, note)]
    plan = asked.value
    if not view.cards:
        head += [Content.styled(f"no ranked plans: {unranked_because(plan)}", drawing.MUTED)]
    if not plan.fits:
        head += [drawing.problem(_over(view), width)]
    head += [numbers_line(view, plan, width), Content("")]
    return [*head, *_reasons(view, plan.choices, width, cursor, why)]


def _machine(view: WizardView, width: int) -> list[Content]:
    """Draw the measured rates of this machine, or that it is being measured."""
    asked, key = view.probe, view.key("wizard_measure")
    if asked.refusal is not None:
        cure = f"{key} measures again; without rates the plan cannot predict times"
        return [Content.styled("This machine", "bold"), refused(asked.refusal, cure, width)]
    if asked.value is None:
        told = pending("Measuring", asked, width, "about 20 s the first time")
        return [Content.styled("This machine", "bold"), told]
    probe = asked.value
    title = drawing.heading("This machine", f"{age_text(probe)}; {key} measures again", width)
    now = view.machine_now(width - 5)
    load = [Content.assemble(("now  ", drawing.MUTED), drawing.spans(now))] if now else []
    warnings = [drawing.caution(warning, width) for warning in machine_warnings(probe)]
    return [title, *load, *warnings, drawing.table(machine_table(probe), width)]


def _cure(view: WizardView) -> str:
    back, offload, again = map(view.key, ("wizard_back", "wizard_offload", "wizard_again"))
    return (
        f"Press {back} to change an answer, {offload} for another offload setting, or {again} to "
        "ask again."
    )


def _over(view: WizardView) -> str:
    back, offload = view.key("wizard_back"), view.key("wizard_offload")
    return f"this does not fit: turn the dial to fit, press {offload} for more offload, or {back}"


def dial_line(view: WizardView, width: int) -> Content:
    """Draw the dial with its stops; the chosen one stands between arrows."""
    parts: list[Content | tuple[str, str]] = [("Strategy  ", "bold")]
    for stop in DIAL:
        here = stop == view.answers.dial
        text = f"‹ {stop} ›" if here else f"  {stop}  "
        parts.append((text, "bold $accent" if here else drawing.MUTED))
    hint = f"  {view.key('wizard_faster', 'wizard_smaller')} from fast to fit"
    if sum(len(part[0]) for part in parts if isinstance(part, tuple)) + len(hint) <= width:
        parts.append((hint, drawing.MUTED))
    return Content.assemble(*parts)


def cards(view: WizardView, width: int) -> Content:
    """Draw the ranked plans next to each other, or under each other where they do not fit."""
    plan, found = view.plan.value, distinct_plans(view.cards)
    drawn = [
        (
            names,
            [(name, value, "bold") for name, value in card_facts(card, plan)],
            view.answers.dial in names.split(" = "),
        )
        for names, card in found.items()
    ]
    beside = drawing.cards(drawn, width)
    return beside or Content("\n").join(
        _card_row(view, names, card, width) for names, card in found.items()
    )


def card_facts(card: PlanOption, plan: PlanAnswer | None) -> list[tuple[str, str]]:
    """Return names and values of a card."""
    told = card.predicted
    timing = plan.timing if plan else "measured"
    return [
        ("tokens/s", count_text(told.tokens_per_s)),
        ("step", predicted_text(told.step_s, timing)),
        ("VRAM" if plan and plan.device == "cuda" else "buffers", bytes_text(card.device_bytes)),
        ("RAM", bytes_text(card.host_bytes)),
        ("run", predicted_text(told.eta_s, timing)),
        ("bound by", told.binds.removeprefix("the ")),
    ]


def numbers_line(view: WizardView, plan: PlanAnswer, width: int) -> Content:
    """Draw batch, chunk, steps and offload with the keys that change them."""
    planned = {
        "train.batch_rows": plan.layout.batch_rows,
        "placement.chunk_rows": plan.layout.chunk_rows,
        "train.steps": plan.steps,
        "placement.offload": plan.layout.offload,
    }
    lines, used = [Content("")], 0
    for key, value in planned.items():
        chosen = view.answers.settings.get(key)
        entry = Content.assemble(
            (view.key(BY_KEY[key].action), "bold $accent"),
            (f" {BY_KEY[key].name} ", drawing.MUTED),
            (value_text(value if chosen is None else chosen), "bold"),
            ("" if chosen is None else " set", drawing.MUTED),
            "   ",
        )
        if used + len(entry.plain) > width:
            lines, used = [*lines, Content("")], 0
        lines[-1] += entry
        used += len(entry.plain)
    return Content("\n").join(lines)


def _reasons(
    view: WizardView, choices: Sequence[ChoiceMade], width: int, cursor: int, why: bool
) -> list[Content]:
    """Draw every choice; the reason under the one with the cursor, or under all of them."""
    all_of_them = view.key("wizard_why")
    hint = f"{view.key('list_up', 'list_down')} choose, {all_of_them} all reasons"
    if why:
        hint = f"{all_of_them} fewer"
    lines = [drawing.heading("Chosen for you: why?", hint, width)]
    name_width = max((len(choice.name) for choice in choices), default=0) + 2
    for index, choice in enumerate(choices):
        here = index == cursor
        lines.append(
            Content.assemble(
                (drawing.CURSOR if here else "  ", "bold $accent"),
                (choice.name.ljust(name_width), "" if here else drawing.MUTED),
                (drawing.shortened(choice.value, width - name_width - 2), "bold"),
            )
        )
        if here or why:
            reason = drawing.paragraph(choice.because, width - 4, "" if here else drawing.MUTED)
            lines.append(Content("\n").join(Content("    ") + line for line in reason.split("\n")))
    return lines


def _card_row(view: WizardView, names: str, card: PlanOption, width: int) -> Content:
    chosen = view.answers.dial in names.split(" = ")
    told = card.predicted
    text = (
        f"{count_text(told.tokens_per_s)} tokens/s, {bytes_text(card.device_bytes)}, "
        f"{predicted_text(told.eta_s, view.plan.value.timing if view.plan.value else 'measured')}"
    )
    mark = "▸ " if chosen else "  "
    return Content.assemble(
        (mark, "bold $accent"),
        (f"{names.ljust(9)} ", "bold"),
        drawing.shortened(text, width - max(12, len(names) + 3)),
    )
