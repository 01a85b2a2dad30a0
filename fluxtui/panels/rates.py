"""The rates of both directions over time, under their measured ceilings."""

from __future__ import annotations

from fluxtrain.units import rate_text
from fluxtui.panels.bus import ROLES, ceiling_of, label_of, moved_on_disk, rate_of
from fluxtui.panels.card_colours import role_of
from fluxtui.panels.memory_history import NOTHING
from fluxtui.panels.panel import Panel, pair
from fluxtui.plots.timeline import Track, timeline
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit, fitted, joined

LETTERS = {"h2d": "H", "d2h": "D", "disk_read": "R", "disk_written": "W"}
CARD_CELLS = 18  # of a card's number and one rate
OFF_GPU = {"h2d": "I", "d2h": "O"}


def letter_of(view: View, name: str) -> str:
    """Return the letter of a direction on the chart."""
    return LETTERS[name] if view.on_gpu else OFF_GPU.get(name, LETTERS[name])


def directions(view: View) -> list[str]:
    """Return the directions to draw."""
    return ["h2d", "d2h", *moved_on_disk(view.state.traffic)]


def heading(view: View, width: int) -> Line:
    """Return the rates now or at the run's end, and the ceilings that were measured."""
    sample = view.fresh(view.state.traffic)
    parts: list[Line] = [(("last", "dim"),)] if sample and view.closed_in_order else []
    if view.cards > 1:
        parts.append(((f"{view.cards} cards together", "dim"),))
    for name in directions(view):
        now = rate_text(rate_of(sample, name) if sample else None)
        ceiling = ceiling_of(sample, name)
        of: Line = ((f" of {rate_text(ceiling)}", "dim"),) if ceiling else ()
        parts.append(
            (
                (f"{letter_of(view, name)} ", ROLES[name]),
                *pair(label_of(view, name).strip(), now),
                *of,
            )
        )
    return dropped_to_fit(parts, width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw one chart, a line for each direction, from zero up."""
    samples = list(view.state.traffics)
    if len(samples) < 2:
        return NOTHING
    cards = card_lines(view, width, height // 3)
    times = [sample.wall_s for sample in samples]
    tracks = [
        Track([rate_of(sample, name) for sample in samples], ROLES[name], letter_of(view, name))
        for name in directions(view)
    ]
    return [*timeline(times, tracks, width, height - len(cards), rate_text), *cards]


def card_lines(view: View, width: int, most: int) -> list[Line]:
    """Return the rates of each of several cards in at most `most` lines, or none where they do not
    fit; the chart shows all cards together."""
    sample = view.fresh(view.state.traffic)
    count = len(sample.cards) if sample else 0
    columns = -(-count // max(1, most))
    if sample is None or most < 1 or not 0 < columns <= width // CARD_CELLS:
        return []
    lines = -(-len(sample.cards) // columns)
    cell = (width - 2 * (columns - 1)) // columns
    drawn: list[Line] = []
    for card in sample.cards:
        parts: list[Line] = [((f"{card.number}", role_of(card.number)),)]
        for name in ("h2d", "d2h"):
            rate = rate_text(rate_of(card, name))
            parts.append(
                ((f"{label_of(view, name).strip()} ", ROLES[name]), (f"{rate:>9}", "text"))
            )
        landed = rate_text(card.landed_bytes_per_s)
        parts.append((("from cards ", "dim"), (f"{landed:>9}", "text")))
        drawn.append(fitted(dropped_to_fit(parts, cell), cell))
    return [joined(drawn[at::lines]) for at in range(lines)]


PANEL = Panel("rates", "Rates", body, heading, about="bytes a second over time, each direction")
