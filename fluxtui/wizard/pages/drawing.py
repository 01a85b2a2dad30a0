"""Lines of the wizard as Textual content, from plain values and a width. No state, no widgets.

Colours are the theme's variables; every distinction is also a character or a word, so it
survives 16 colours and none.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, chop_cells, set_cell_size
from textual.content import Content

from fluxtrain.units import bytes_text
from fluxtui.answers.answers import STEPS
from fluxtui.answers.rows import StepName
from fluxtui.widgets.spans import Line, cut_in_front, wrapped
from fluxtui.wizard.checks.data_facts import Sample

MUTED = "dim"
CURSOR = "▸ "
CARD_LEAST, CARD_MOST = 22, 30  # columns of a card with its border
MORE_FOLLOWS = " \\"
TITLES: dict[StepName, str] = {
    "start": "Start",
    "model": "Model",
    "data": "Data",
    "method": "Method",
    "training": "Training",
    "strategy": "Strategy",
    "launch": "Launch",
}
STYLES = {"dim": MUTED, "strong": "bold", "warn": "$warning", "good": "$success",
          "accent": "bold $accent"}  # fmt: skip


def spans(line: Line) -> Content:
    """Convert a line of the panels to the wizard's own colours."""
    return Content.assemble(*((text, STYLES.get(role, "")) for text, role in line))


def stepper(current: StepName, width: int, steps: Sequence[StepName] = STEPS) -> Content:
    """Draw three lines: the product, a rule in as many parts as steps, and the names of the steps.

    A step has one name at every width. Where not all fit, only the current one is shown.
    """
    position = steps.index(current)
    counter = f"step {position + 1} of {len(steps)}"
    gaps = len(steps) - 1
    letters = sum(len(TITLES[step]) for step in steps)
    blank = " " if letters + 2 * len(steps) + gaps <= width else ""
    named = letters + (1 + len(blank)) * len(steps) + gaps <= width
    what = "new run" if named else TITLES[current]
    between = " " * max(1, width - len("FluxTrain  ") - len(what) - len(counter))
    head = Content.assemble(
        ("FluxTrain", "bold $accent"), (f"  {what}", MUTED if named else ""), between,
        (counter, "bold"),
    )  # fmt: skip
    least = [1 + len(blank) + len(TITLES[step]) if named else 1 for step in steps]
    spare = max(0, width - gaps - sum(least))
    rules, names = [], []
    for index, step in enumerate(steps):
        done, here = index < position, index == position
        style = "bold $accent" if here else "$success" if done else MUTED
        part = least[index] + spare // len(steps) + (index < spare % len(steps))
        rules.append(Content.styled(("━" if done or here else "─") * part, style))
        mark = "✓" if done else "●" if here else "○"
        name = f"{mark}{blank}{TITLES[step]}" if named else mark
        names.append(Content.styled(name.ljust(part), style))
    space = Content(" ")
    return Content("\n").join([head, space.join(rules), space.join(names)])


def keys_line(keys: Sequence[tuple[str, str]]) -> Content:
    """Draw key hints: the key bright, its meaning muted."""
    parts = [Content.assemble((key, "bold $accent"), (f" {text}", MUTED)) for key, text in keys]
    return Content("   ").join(parts)


def footer(keys: Sequence[tuple[str, str]], machine: Sequence[str], width: int) -> Content:
    """Draw a rule, and below it key hints; on the right as many facts of this machine as fit."""
    left = keys_line(keys)
    room = width - len(left.plain) - 3
    facts = list(machine)
    while len(right := " · ".join(facts)) > room and facts:
        facts.pop()
    gap = " " * max(0, width - len(left.plain) - len(right))
    return Content.assemble(("─" * width + "\n", MUTED), left, gap, (right, MUTED))


def heading(text: str, hint: str, width: int) -> Content:
    """Draw a heading; its hint only where there is room for all of it."""
    shown = f"   {hint}" if hint and len(text) + 3 + len(hint) <= width else ""
    return Content.assemble((text, "bold"), (shown, MUTED))


def paragraph(text: str, width: int, style: str = "") -> Content:
    """Wrap a text; words longer than the line, such as paths, are broken."""
    return Content.styled("\n".join(in_lines(text, max(10, width)) or [""]), style)


def command(text: str, width: int) -> Content:
    """Draw a command over several lines, each but the last with a backslash at its end."""
    return Content.styled("\n".join(command_lines(text, max(10, width))), "$accent")


def command_lines(text: str, width: int) -> list[str]:
    """Cut a command into lines; see `command`.

    An option stays with its value where both fit, and a word that does not fit in a line is broken
    too.
    """
    room = width - len(MORE_FOLLOWS)
    lines = [""]
    for part in _parts_of(shlex.split(text), room):
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(part) > room:
            lines[-1] += MORE_FOLLOWS
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + part
    return "\n".join(lines).split("\n")


def _parts_of(words: Sequence[str], room: int) -> Iterator[str]:
    """Return words that stay together, quoted for a shell; a word that is too long goes on in
    lines below."""
    held = ""  # an option that waits for its value
    for word in words:
        quoted = shlex.quote(word)
        if held and cell_len(held) + 1 + cell_len(quoted) <= room:
            quoted, held = f"{held} {quoted}", ""
        if held:
            yield held
        if word.startswith("--"):
            held = quoted
            continue
        held = ""
        if cell_len(quoted) > room:
            most = max(1, (room - 2) // (5 if "'" in word else 1))  # a quote takes five characters
            quoted = "\\\n".join(map(shlex.quote, chop_cells(word, most)))
        yield quoted
    if held:
        yield held


def problem(text: str, width: int) -> Content:
    """Draw an error with a mark in front, and the text indented under itself."""
    return _marked("✗ ", text, width, "$error")


def caution(text: str, width: int) -> Content:
    """Draw a warning that does not stop the user."""
    return _marked("! ", text, width, "$warning")


def facts(rows: Sequence[tuple[str, str]], width: int) -> Content:
    """Draw names and values under each other; the first line carries the mark of a
    usable answer."""
    name_width = max((len(name) for name, _ in rows), default=0) + 2
    lines: list[Content] = []
    for index, (name, value) in enumerate(rows):
        mark = ("✓ " if index == 0 else "  ", "bold $success")
        lines += _named(mark, name.ljust(name_width), value, max(8, width - name_width - 2), "")
    return Content("\n").join(lines)


def pairs(rows: Sequence[tuple[str, str]], width: int) -> Content:
    """Draw names and values under each other."""
    name_width = max((len(name) for name, _ in rows), default=0) + 2
    lines: list[Content] = []
    for name, value in rows:
        lines += _named(("", ""), name.ljust(name_width), value, width - name_width, "bold")
    return Content("\n").join(lines)


def _named(
    mark: tuple[str, str], name: str, value: str, room: int, style: str
) -> Iterator[Content]:
    """Return a value beside its name: words wrap below, a path loses its middle."""
    parts = in_words(value, max(1, room))
    yield Content.assemble(mark, (name, MUTED), (parts[0], style))
    for part in parts[1:]:
        yield Content.assemble(" " * (len(mark[0]) + len(name)), (part, style))


def in_words(text: str, width: int) -> list[str]:
    """Return lines of whole words; one line with its middle left out where a word is too long."""
    words = text.split()
    if len(words) < 2 or max(map(cell_len, words)) > width:
        return [shortened(text, width)]
    return in_lines(text, width)


def in_lines(text: str, width: int) -> list[str]:
    """Return lines of at most `width` cells; only a longer word is cut."""
    if cell_len(text) == len(text):
        return textwrap.wrap(text, width, break_on_hyphens=False)
    return wrapped(text, width)


CardRow = tuple[str, str, str]  # a name, its value and the value's style


def cards(drawn: Sequence[tuple[str, Sequence[CardRow], bool]], width: int) -> Content | None:
    """Draw cards next to each other from title, rows and whether each is chosen, which gets a
    double border and a mark; None where they do not fit."""
    room = (width - len(drawn) + 1) // max(1, len(drawn))
    if room < CARD_LEAST:
        return None
    lines = [_card(title, rows, chosen, min(room, CARD_MOST)) for title, rows, chosen in drawn]
    return Content("\n").join(Content(" ").join(parts) for parts in zip(*lines, strict=True))


def _card(title: str, rows: Sequence[CardRow], chosen: bool, width: int) -> list[Content]:
    corners = "╔═╗║╚╝" if chosen else "┌─┐│└┘"
    style = "bold $accent" if chosen else MUTED
    head = f"{corners[1]} {'▸ ' if chosen else ''}{title} ".ljust(width - 2, corners[1])
    side, inner = Content.styled(corners[3], style), width - 4
    lines = [Content.styled(f"{corners[0]}{head}{corners[2]}", style)]
    for name, value, looks in rows:
        told = value
        if len(name) + 1 + len(told) > inner:  # an interval in fewer cells
            told = value.replace(" to ", "–")
        text = shortened(told, inner - len(name) - bool(name))
        label = name.ljust(inner - cell_len(text)) if name else ""
        rest = " " * (inner - len(label) - cell_len(text))
        lines.append(Content.assemble(side, " ", (label, MUTED), (text, looks), f"{rest} ", side))
    return [*lines, Content.styled(corners[4] + corners[1] * (width - 2) + corners[5], style)]


def table(rows: Sequence[tuple[str, str, str]], width: int) -> Content:
    """Draw rows of name, value and explanation, which wraps in the remaining width."""
    if not rows:
        return Content("")
    name_width = max(len(name) for name, _, _ in rows) + 2
    value_width = min(max(len(value) for _, value, _ in rows), 24) + 2
    room = max(16, width - name_width - value_width)
    lines: list[Content] = []
    for name, value, text in rows:
        told = in_lines(text, room) or [""]
        first = Content.assemble(
            (name.ljust(name_width), MUTED),
            (shortened(value, value_width - 2).ljust(value_width), "bold"),
            told[0],
        )
        indent = " " * (name_width + value_width)
        lines += [first, *(Content(indent + rest) for rest in told[1:])]
    return Content("\n").join(lines)


def memory_bar(name: str, used: int | None, limit: int | None, width: int) -> Content:
    """Draw `used` bytes against `limit`: `host  ━━━────  2.1 GiB of 7.8 GiB`.

    Over the limit it is red and says by how much; without a number there is no bar.
    """
    head = name.ljust(8)
    if used is None:
        return Content.assemble((head, MUTED), "-")
    if not limit:
        return Content.assemble((head, MUTED), (bytes_text(used), "bold"))
    over = used > limit
    tail = f"  {bytes_text(used)} of {bytes_text(limit)}"
    tail += f", {bytes_text(used - limit)} too much" if over else ""
    room = max(8, min(44, width - len(head) - len(tail)))
    filled = min(room, max(1, round(room * used / limit)))
    return Content.assemble(
        (head, MUTED),
        ("━" * filled, "$error" if over else "$accent"),
        ("─" * (room - filled), MUTED),
        (tail, "bold $error" if over else ""),
    )


def samples(pieces: Sequence[Sample], width: int, lines_each: int) -> Content:
    """Draw samples of the data, trained stretches bright behind a bar, the others muted."""
    drawn: list[Content] = []
    for sample in pieces:
        drawn += _sample_lines(sample, width, lines_each)
        drawn.append(Content(""))
    return Content("\n").join(drawn[:-1])


def shortened(text: str, width: int) -> str:
    """Return `text` in at most `width` cells; a long path loses its middle."""
    if cell_len(text) <= width:
        return text
    head = max(1, width - 1) // 3
    return set_cell_size(text, head) + cut_in_front(text, max(2, width) - head)


def _sample_lines(sample: Sample, width: int, limit: int) -> list[Content]:
    lines: list[Content] = []
    room, share = max(10, width - 2), max(1, limit // len(sample))
    for piece in sample:
        told = [part for line in piece.text.splitlines() for part in in_lines(line, room)]
        if len(told) > share:
            last = told[share - 1]
            kept = last if cell_len(last) <= room - 2 else set_cell_size(last, room - 2)
            told = [*told[: share - 1], f"{kept} …"]
        bar = ("▌ ", "$accent") if piece.trained else ("  ", "")
        style = "" if piece.trained else MUTED
        lines += [Content.assemble(bar, (line, style)) for line in told]
    return lines[:limit]


def _marked(mark: str, text: str, width: int, style: str) -> Content:
    told = in_lines(text, max(10, width - len(mark))) or [""]
    body = ("\n" + " " * len(mark)).join(told)
    return Content.assemble((mark, f"bold {style}"), (body, style))
