"""What the model answers to the prompts of the run; with a crosshair, what it answered there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.events.events import SampleGenerated
from fluxtrain.events.printable import printable
from fluxtrain.events.run_folder.own_files import SAMPLES
from fluxtrain.files.half_blocks import BLOCK, Cell, half_blocks
from fluxtrain.units import duration_text
from fluxtui.panels.panel import Panel, key_of
from fluxtui.state.samples import Round, round_at
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, cut, dropped_to_fit, fitted, width_of, wrapped
from fluxtui.words import counted

LEAST_PICTURE = 8  # lines
ENDS = {"length": " …", "context": " …"}  # an answer that was cut off goes on


def heading(view: View, width: int) -> Line:
    """Return the step of the answers, and what they took."""
    found = round_at(view.state.samples, view.chart.crosshair)
    if found is None:
        return ()
    when = "before the first step" if found.step == 0 else f"after step {found.step}"
    role = "warn" if view.chart.crosshair is not None else "text"
    parts: list[Line] = [((when, role),)]
    if found.seconds is not None:
        took = f"{counted(found.count, 'prompt')} in {duration_text(found.seconds)}"
        parts.append(((took, "dim"),))
    return dropped_to_fit(parts, width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Give each prompt a line and its answer the remaining lines; say how many prompts
    do not fit."""
    found = round_at(view.state.samples, view.chart.crosshair)
    if found is None:
        nothing: list[Line] = [((" no prompts: set samples.prompts", "dim"),)]
        return nothing[:height]
    room, shown = _fitting(found, height, view.pictures)
    answers = found.answers[:shown]
    wanted = [_answer(view, answer, width, room) for answer in answers]
    lines: list[Line] = []
    shares = _shares([len(part) for part in wanted], room)
    for answer, whole, rows in zip(answers, wanted, shares, strict=True):
        scales = len(whole) > rows and bool(answer.path)  # a picture is not cut
        part = _answer(view, answer, width, rows) if scales else whole
        lines += part if len(part) <= rows else _cut_off(part, rows, width)
    hidden = len(found.answers) - shown
    if hidden:
        more = f"{counted(hidden, 'more prompt')}: {key_of(view, 'maximise')} shows all"
        lines.append(((cut(f" {more}", width), "dim"),))
    return [fitted(line, width) for line in lines[:height]]


def _fitting(found: Round, height: int, pictures: bool) -> tuple[int, int]:
    """Return the lines for answers, and the number of answers shown: at least two lines each, the
    prompt's included, and of pictures as many as show something."""
    count = len(found.answers)
    least = LEAST_PICTURE if pictures and found.answers[0].path else 2
    if least * count <= height or count == 1:
        return height, count
    room = max(2, height - 1)  # a line says how many are hidden
    return room, max(1, room // least)


def _shares(wanted: list[int], room: int) -> list[int]:
    """Divide `room` lines: no answer gets more than it wants, and the rest goes to the others."""
    given = [0] * len(wanted)
    while room > 0 and given != wanted:
        for number, most in enumerate(wanted):
            if given[number] < most and room > 0:
                given[number] += 1
                room -= 1
    return given


def _answer(view: View, answer: SampleGenerated, width: int, rows: int) -> list[Line]:
    """Return the lines of the prompt and its answer; a picture takes at most `rows` with it."""
    prompt = " ".join(printable(answer.prompt).split())
    words = " ".join(printable(answer.text).split()) + ENDS.get(answer.ended, "")
    parts = wrapped(words, max(8, width - 2)) or [""]
    head: Line = (("› ", "accent"), (cut(prompt, max(1, width - 2)), "dim"))
    if answer.path and view.pictures and view.link.run_dir is not None:
        try:
            place = view.link.run_dir / SAMPLES / Path(answer.path).name
            return [head, *(_drawn(line) for line in half_blocks(place, width - 2, rows - 1))]
        except BadInput as error:
            parts = wrapped(printable(str(error)), max(8, width - 2))
    return [head, *((("  ", "text"), (part, "text")) for part in parts)]


def _drawn(cells: Sequence[Cell]) -> Line:
    """Return a line of a picture, neighbours of equal colours as one span."""
    alike = (f"{above} on {below}" for above, below in cells)
    return (("  ", "text"), *((BLOCK * len(list(group)), role) for role, group in groupby(alike)))


def _cut_off(lines: list[Line], rows: int, width: int) -> list[Line]:
    """Return the first `rows` lines; the last of them says that there is more."""
    kept = lines[:rows]
    if rows > 1:
        text = kept[-1][1][0].removesuffix(" …")
        fits = width_of(((text, ""),)) <= width - 4
        kept[-1] = (("  ", "text"), (text + " …" if fits else cut(text, width - 2), "text"))
    return kept


PANEL = Panel(
    "samples",
    "Samples",
    body,
    heading,
    about="answers to your prompts, at the crosshair's step",
    shows=lambda view: (view.state.samples, view.chart),
)
