"""What was found about the data: facts, its lengths, and samples as the model will see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from textual.content import Content

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import InspectionAnswer, PairsInspectionAnswer
from fluxtrain.files.half_blocks import BLOCK, half_blocks
from fluxtrain.units import count_text
from fluxtui.home import home_folder
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.found import found_page, pending
from fluxtui.wizard.pages.wizard_view import WizardView
from fluxtui.words import counted

BEYOND = 0.98  # longer documents than this share of them are put into the last column
EIGHTHS = " ▁▂▃▄▅▆▇█"


def extent(found: InspectionAnswer) -> str:
    """Tell how much data there is, and whether that was counted or estimated."""
    documents = found.sampled_documents
    if found.is_whole:
        return f"{counted(documents, 'document')}, {count_text(found.sampled_tokens)} tokens"
    return (
        f"about {count_text(found.estimated_documents)} documents, "
        f"{count_text(found.estimated_tokens)} tokens: by {documents:,} of them"
    )


def inspection_rows(found: InspectionAnswer) -> tuple[tuple[str, str], ...]:
    """Return name and value of every fact."""
    about = "" if found.is_whole else "about "
    return (
        ("size", extent(found)),
        ("trained on", f"{found.trained_share:.0%} of the tokens"),
        ("cut", f"{found.cut_documents_share:.0%} of the documents are longer than a row"),
        (
            "packed",
            f"{about}{count_text(found.estimated_rows)} rows of {found.sequence_length:,}, "
            f"{1 - found.padding_share:.0%} full",
        ),
    )


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many documents have which length.

    Attributes:
        counts: of each column, from 0 tokens to `limit`; the last one also holds what is longer.
        marked: the column in which the sequence length lies.
        longest: of all documents.
    """

    counts: tuple[int, ...]
    limit: int
    marked: int
    longest: int


def histogram(lengths: Sequence[int], sequence_length: int, columns: int) -> Histogram:
    """Count lengths in equal columns; the sequence length is always among them."""
    in_order = sorted(lengths)
    most = in_order[round(BEYOND * (len(in_order) - 1))]
    limit = max(most, sequence_length * 5 // 4, 1) + 1
    counts = [0] * columns
    for length in lengths:
        counts[min(columns - 1, length * columns // limit)] += 1
    marked = min(columns - 1, sequence_length * columns // limit)
    return Histogram(tuple(counts), limit, marked, in_order[-1])


def histogram_lines(found: Histogram, sequence_length: int, height: int) -> list[str]:
    """Draw the histogram as `height` lines of bars, with the sequence length as a line across,
    and a line below that names it."""
    most = max(found.counts)
    eighths = [0 if not n else max(1, round(n / most * height * 8)) for n in found.counts]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [EIGHTHS[max(0, min(8, level - row * 8))] for level in eighths]
        cells[found.marked] = "│"
        lines.append("".join(cells))
    return [*lines, _axis(found, sequence_length)]


def _axis(found: Histogram, sequence_length: int) -> str:
    columns = len(found.counts)
    end = f"{found.limit - 1:,}" + ("+" if found.longest >= found.limit else "")
    mark = f"{sequence_length:,} = a row"
    line = list("0".ljust(columns))
    line[columns - len(end) :] = end
    at = min(max(2, found.marked - len(mark) + 1), columns - len(end) - len(mark) - 1)
    if at >= 2:
        line[at : at + len(mark)] = mark
    return "".join(line)


HISTOGRAM_LINES = 3
SAMPLE_LINES = 8
FIRST_SAMPLE_LINES = 4  # where the screen is low: it must stand above the fold
PAIR_LINES = 6
NAME_CELLS = 16
LEGEND = "▌ trained on; the rest is context (masked)"


def data_page(view: WizardView, width: int) -> Content:
    """Draw the answer's check, and what the engine found in the data."""
    check, asked = view.checks.get("data"), view.inspection
    if check is None or check.error:
        return _refused(view, check, width)
    parts = [_in_a_line(check, width) if view.short else found_page(view, width)]
    if isinstance(asked.value, PairsInspectionAnswer):
        parts += _pairs(asked.value, view, width)
    elif asked.value is not None:
        if view.answers.data_source == "hub":  # its shape is known to the engine alone
            parts.append(drawing.pairs([_read_as(asked.value)], width))
        more = [note for note in asked.value.notes if note not in check.warnings]
        parts += [drawing.caution(note, width) for note in more]
        parts += _inspected(asked.value, width, view.short)
    elif asked.refusal is not None:
        parts.append(drawing.problem(asked.refusal, width))
    else:
        if asked.pending:
            what = "pairs" if view.answers.of_images else "first documents"
            parts.append(pending(f"The engine reads the {what}", asked, width))
        parts.append(_first_documents(check, width))
    return Content("\n\n").join(part for part in parts if part.plain)


def _pairs(found: PairsInspectionAnswer, view: WizardView, width: int) -> list[Content]:
    home = str(home_folder())
    rows = [(name, value.replace(home, "~", 1)) for name, value in found.rows()]
    parts = [drawing.pairs(rows, width)]
    parts += [drawing.caution(note, width) for note in found.notes]
    hint = "references, then the target, with the prompt"
    lines = [drawing.heading("Contact sheet", hint, width), *_sheet(found, view.pictures)]
    return [*parts, Content("\n").join(lines)]


def _sheet(found: PairsInspectionAnswer, pictures: bool) -> list[Content]:
    """Draw the first pairs, each with its prompt beside its first line."""
    try:
        cells = half_blocks(Path(found.contact_sheet), 36, PAIR_LINES * len(found.prompts))
    except BadInput as error:
        return [Content.styled(str(error), drawing.MUTED), *map(Content, found.prompts)]
    if not pictures:
        return [Content(prompt) for prompt in found.prompts]
    prompts = (text for prompt in found.prompts for text in (prompt, *[""] * (PAIR_LINES - 1)))
    return [
        Content.assemble(
            *((BLOCK, f"{above} on {below}") for above, below in line or ()),
            f"  {prompt or ''}",
        )
        for line, prompt in zip_longest(cells, prompts)
    ]


def _read_as(found: InspectionAnswer) -> tuple[str, str]:
    first = found.files[0]
    more = f"; {len(found.files) - 1} more files" if len(found.files) > 1 else ""
    return "format", f"{first.title} ({first.shape}), because {first.because}{more}"


def _refused(view: WizardView, check: Check | None, width: int) -> Content:
    """Ask how unclear columns are read; after a refusal say how to make the setting
    that it names."""
    found = found_page(view, width)
    if check is None:
        return found
    if check.readings:
        ways = len(check.readings)
        told = "can be read in a way that is not sure" if ways == 1 else f"have {ways} readings"
        pick = f", {view.key('list_up', 'list_down')} marks another one" if ways > 1 else ""
        asks = f"the columns {told}: {view.key('wizard_next')} takes the marked one{pick}"
        return drawing.caution(asks, width)
    if "set data." not in (check.error or ""):
        return found
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
    """Draw lengths, then samples; where the screen is low the first sample comes first."""
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
