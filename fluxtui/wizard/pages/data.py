"""What was found about the data: facts, its lengths, and samples as the model will see them."""

from __future__ import annotations

from textual.content import Content

from fluxtrain.events.answers.answers import InspectionAnswer
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.engine.inspection import histogram, histogram_lines, inspection_rows
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.found import found_page, pending
from fluxtui.wizard.pages.wizard_view import WizardView

HISTOGRAM_LINES = 3
SAMPLE_LINES = 8
FIRST_SAMPLE_LINES = 4  # where the screen is low: it must stand above the fold
NAME_CELLS = 16
LEGEND = "▌ trained on; the rest is context (masked)"


def data_page(view: WizardView, width: int) -> Content:
    """Draw the answer's check, and what the engine found in the data."""
    check, asked = view.checks.get("data"), view.inspection
    if check is None or check.error:
        return _refused(view, check, width)
    parts = [_in_a_line(check, width) if view.short else found_page(view, width)]
    if asked.value is not None:
        if view.answers.data_source == "hub":  # its shape is known to the engine alone
            parts.append(drawing.pairs([_read_as(asked.value)], width))
        more = [note for note in asked.value.notes if note not in check.warnings]
        parts += [drawing.caution(note, width) for note in more]
        parts += _inspected(asked.value, width, view.short)
    elif asked.refusal is not None:
        parts.append(drawing.problem(asked.refusal, width))
    else:
        if asked.pending:
            parts.append(pending("The engine reads the first documents", asked, width))
        parts.append(_first_documents(check, width))
    return Content("\n\n").join(part for part in parts if part.plain)


def _read_as(found: InspectionAnswer) -> tuple[str, str]:
    first = found.files[0]
    more = f"; {len(found.files) - 1} more files" if len(found.files) > 1 else ""
    return "format", f"{first.title} ({first.shape}), because {first.because}{more}"


def _refused(view: WizardView, check: Check | None, width: int) -> Content:
    """Ask how unclear columns are read; say after a refusal how the setting is made that it
    names."""
    found = found_page(view, width)
    if check is None or "set data." not in (check.error or ""):
        return found
    if check.readings:
        ways = len(check.readings)
        told = "can be read in a way that is not sure" if ways == 1 else f"have {ways} readings"
        pick = f", {view.key('list_up', 'list_down')} marks another one" if ways > 1 else ""
        asks = f"the columns {told}: {view.key('wizard_next')} takes the marked one{pick}"
        return drawing.caution(asks, width)
    how = (
        f"{view.key('wizard_read_as')} tries the next format; to set columns, start the app "
        "with fluxtrain-tui --set 'data.columns={text: body}': the answers so far are kept"
    )
    return Content("\n\n").join([found, drawing.paragraph(how, width, drawing.MUTED)])


def _in_a_line(check: Check, width: int) -> Content:
    """Draw the check's facts side by side, so that the samples have room; warnings in full."""
    values = [
        f"{name} {value}" if value.replace(",", "").isdigit() else value
        for name, value in check.facts
    ]
    while len(values) > 1 and len(" · ".join(values)) > width - NAME_CELLS:
        values.pop()  # a long one says what it says in full
    lines = [drawing.facts([(check.facts[0][0], " · ".join(values))], width)] if values else []
    lines += [drawing.caution(warning, width) for warning in check.warnings]
    return Content("\n").join(lines)


def _inspected(found: InspectionAnswer, width: int, short: bool) -> list[Content]:
    """Lengths, then samples; where the screen is low the first sample is in front of them."""
    if not short:
        samples = [_heading(width), *_samples(found, width, SAMPLE_LINES)]
        return [_lengths(found, width), Content("\n").join(samples)]
    first, *others = _samples(found, width, FIRST_SAMPLE_LINES) or [Content("")]
    parts = [Content("\n").join([_heading(width), first]), _lengths(found, width)]
    return [*parts, Content("\n").join(others)]


def _heading(width: int) -> Content:
    return drawing.heading("As the model sees it", LEGEND, width)


def _lengths(found: InspectionAnswer, width: int) -> Content:
    bars = histogram(found.lengths, found.sequence_length, min(width, 72))
    drawn = histogram_lines(bars, found.sequence_length, HISTOGRAM_LINES)
    return Content("\n").join(
        [
            drawing.heading("Lengths", "documents by tokens", width),
            *(_bar_line(line, bars.marked) for line in drawn[:-1]),
            Content.styled(drawn[-1], drawing.MUTED),
            drawing.pairs(inspection_rows(found), width),
        ]
    )


def _bar_line(line: str, marked: int) -> Content:
    return Content.assemble(
        (line[:marked], "$accent"), (line[marked], "bold $warning"), (line[marked + 1 :], "$accent")
    )


def _samples(found: InspectionAnswer, width: int, most_lines: int) -> list[Content]:
    """Draw each sample with its title and at most so many lines."""
    return [
        Content("\n").join(
            [
                drawing.paragraph(f"sample {number}: {sample.title}", width, drawing.MUTED),
                drawing.samples([sample.pieces], width, most_lines),
            ]
        )
        for number, sample in enumerate(found.samples, start=1)
    ]


def _first_documents(check: Check, width: int) -> Content:
    if not check.samples:
        return Content("")
    title = drawing.heading("First documents", LEGEND, width)
    return Content("\n").join([title, drawing.samples(check.samples, width, SAMPLE_LINES // 2)])
