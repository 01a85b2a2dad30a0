"""Several cards, a row or a column each: memory by category, utilisation, copies, blocks.

A run on one card never shows this panel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fluxtrain.events.events import CardMemory, CardPlan, CardTraffic, MemorySampled
from fluxtrain.units import UNKNOWN, bytes_text, count_text, duration_text, rate_text
from fluxtui.panels.bus import label_of
from fluxtui.panels.card_colours import card_of, role_of
from fluxtui.panels.memory import category_parts, heading, host_line, legend_line
from fluxtui.panels.panel import Panel, pair, whole_share
from fluxtui.plots.bars import BarPart, gauge, partition
from fluxtui.state.machine_sample import GpuSample
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit, fitted, joined, width_of
from fluxtui.words import counted

COLUMN_GAP = "  "
LEAST_BAR_CELLS = 8
LETTERS_FROM_CELLS = 12  # a narrower bar shows how full a card is, and no categories


@dataclass(frozen=True, slots=True)
class CardRow:
    """What is known of one card now."""

    number: int
    memory: CardMemory | None = None
    traffic: CardTraffic | None = None
    plan: CardPlan | None = None
    gpu: GpuSample | None = None
    blocks: int | None = None


def rows_of(view: View) -> list[CardRow]:
    """Return every card that computes; values that are too old are None."""
    memory, traffic = view.fresh(view.state.memory), view.fresh(view.state.traffic)
    place, planned = view.fresh(view.state.residency), view.state.planned
    memories = {one.number: one for one in memory.cards} if memory else {}
    traffics = {one.number: one for one in traffic.cards} if traffic else {}
    plans = {one.number: one for one in planned.cards} if planned else {}
    found = []
    for number in range(view.cards):
        plan = plans.get(number)
        blocks = plan.blocks if plan else None
        if place is not None and place.cards:
            blocks = [card_of(letter) for letter in place.cards].count(number)
        found.append(
            CardRow(
                number=number, memory=memories.get(number), traffic=traffics.get(number),
                plan=plan, gpu=_gpu_of(view, plan), blocks=blocks,
            )
        )  # fmt: skip
    return found


def _gpu_of(view: View, plan: CardPlan | None) -> GpuSample | None:
    """Return the sample of a card, where its driver number is known and the trainer has memory on
    it; otherwise it could be another run's or machine's."""
    sample = None if view.link.replay or view.closed_in_order else view.machine
    if sample is None or plan is None or plan.gpu is None:
        return None
    return next((one for one in sample.gpus if one.index == plan.gpu and one.has_trainer), None)


def body(view: View, width: int, height: int) -> list[Line]:
    """Return the cards, or the processes that have them, in columns where there are more than
    lines; then the host's line."""
    lines = (
        _in_columns(view.ranks, width, height, partial(_rank_line, view))
        if view.ranks > 1
        else grid(view, width, height, rates=True)
    )
    sample = view.fresh(view.state.memory)
    if sample is not None and len(lines) < height:
        lines.append(host_line(view, sample, width))
    return lines[:height]


def memory_body(view: View, width: int, height: int) -> list[Line]:
    """Return the memory of each card, what the colours mean, and the host's line."""
    below = min(2, max(0, height - 1))
    lines = grid(view, width, height - below, rates=False)
    sample = view.fresh(view.state.memory)
    if sample is not None:
        lines += [legend_line(category_parts(sample.device_by), width)]
        lines.append(host_line(view, sample, width))
    return lines[:height]


def grid(view: View, width: int, height: int, *, rates: bool) -> list[Line]:
    """Draw all cards in at most `height` lines."""
    rows, whole = rows_of(view), _scale(view.fresh(view.state.memory))

    def drawn(number: int, cell: int) -> Line:
        return _card_line(view, rows[number], cell, whole, rates=rates)

    return _in_columns(len(rows), width, height, drawn)


def _in_columns(
    count: int, width: int, height: int, draw: Callable[[int, int], Line]
) -> list[Line]:
    """Draw so many cells, each as wide as `draw` is told, in at most `height` lines."""
    columns = -(-count // max(1, height))
    lines_needed = -(-count // columns)
    cell = (width - len(COLUMN_GAP) * (columns - 1)) // columns
    drawn = [draw(number, cell) for number in range(count)]
    return [
        fitted(joined(drawn[at::lines_needed], COLUMN_GAP), width) for at in range(lines_needed)
    ]


def _rank_line(view: View, rank: int, width: int) -> Line:
    """Return a process's number, the bar of its cards, its speed, its wait, and where it is."""
    step = view.fresh(view.state.step)
    name: Line = ((f"{rank} ", role_of(rank)),)
    if step is None:
        return fitted((*name, (UNKNOWN, "dim")), width)
    mine = step.ranks[rank]
    limit = mine.limit_bytes or max(one.used_bytes for one in step.ranks) or 1
    named = f"card {mine.card}"
    if mine.cards > 1:
        named = f"cards {mine.card} to {mine.card + mine.cards - 1}"
    place = f"{named} of {mine.machine}" if view.on_gpu else f"on {mine.machine}"
    numbers: list[Line] = [
        ((f" {bytes_text(mine.used_bytes):>8}", "strong"),),
        ((f" {count_text(mine.tokens_per_s):>7}", "text"), (" tok/s", "dim")),
        ((" waits ", "dim"), (f"{duration_text(mine.waited_s):>7}", "text")),
        ((f"  {place}", "dim"),),
    ]
    room = width - width_of(name) - LEAST_BAR_CELLS
    shown: list[Line] = []
    for text in numbers:
        if width_of(text) <= room:
            shown.append(text)
            room -= width_of(text)
    right = joined(shown, "")
    bar = gauge(mine.used_bytes / limit, max(0, width - width_of(name) - width_of(right)), "device")
    return fitted((*name, *bar, *right), width)


def ranks_heading(view: View, width: int) -> Line:
    """Say how far apart the processes are; of several cards what `memory.heading` says."""
    step = view.fresh(view.state.step)
    if view.ranks == 1 or step is None:
        return heading(view, width)
    busy_s = [one.busy_s for one in step.ranks]
    told = [
        ((f"{view.ranks} processes", "strong"),),
        pair("skew", duration_text(max(busy_s) - min(busy_s))),
        pair("slowest", f"rank {busy_s.index(max(busy_s))}"),
    ]
    return dropped_to_fit(told, width)


def _scale(sample: MemorySampled | None) -> int:
    """Return the bytes that a whole bar stands for where a card has no limit: the largest peak."""
    return max((card.peak_bytes for card in sample.cards), default=0) if sample else 0


def _card_line(view: View, row: CardRow, width: int, whole: int, *, rates: bool) -> Line:
    """Return a card's name, its bar, and as many of its numbers as fit, the first ones first."""
    name: Line = ((f"{row.number} ", role_of(row.number)),)
    left = width - width_of(name) - LEAST_BAR_CELLS
    numbers: list[Line] = []
    for text in _numbers(view, row, rates=rates):
        if width_of(text) <= left:
            numbers.append(text)
            left -= width_of(text)
    right = joined(numbers, "")
    room = max(0, width - width_of(name) - width_of(right))
    return fitted((*name, *_bar(row.memory, room, whole), *right), width)


def _bar(card: CardMemory | None, width: int, whole: int) -> Line:
    if card is None:
        return (("╌" * width, "track"),)
    limit = card.budget_bytes or card.total_bytes or whole
    if width < LETTERS_FROM_CELLS:
        return gauge(card.used_bytes / limit if limit else None, width, "device")
    parts = category_parts(card.by)
    used = sum(part.value for part in parts)
    return partition([*parts, BarPart("", "", max(0.0, limit - used), "free")], width)


def _numbers(view: View, row: CardRow, *, rates: bool) -> list[Line]:
    """Return the numbers of a card in the order of their rank, each as wide on every card."""
    memory, traffic = row.memory, row.traffic
    limit = (memory.budget_bytes or memory.total_bytes) if memory else None
    used = bytes_text(memory.used_bytes if memory else None)
    found: list[Line] = [((f" {used:>8}", "strong" if memory else "dim"),)]
    if row.gpu is not None:
        found.append(((f" {whole_share(row.gpu.utilisation):>4}", "strong"), (" busy", "dim")))
    if limit:
        found.append(((f" of {bytes_text(limit):<8}", "dim"),))
    if not rates:
        peak = bytes_text(memory.peak_bytes if memory else None)
        found.append(((" peak ", "dim"), (f"{peak:>8}", "text")))
        if row.plan is not None:
            planned = bytes_text(row.plan.device_bytes)
            found.append(((" plan ", "dim"), (f"{planned:>8}", "text")))
        return [*found, _blocks(row)]
    for way, role in (("h2d", "device"), ("d2h", "host")):
        rate = rate_text(getattr(traffic, f"{way}_bytes_per_s") if traffic else None)
        found.append(((f"  {label_of(view, way).strip()} ", role), (f"{rate:>9}", "text")))
    landed = rate_text(traffic.landed_bytes_per_s if traffic else None)
    return [*found, (("  from cards ", "dim"), (f"{landed:>9}", "text")), _blocks(row)]


def _blocks(row: CardRow) -> Line:
    told = UNKNOWN if row.blocks is None else counted(row.blocks, "block")
    return ((f"  {told:>9}", "dim"),)


PANEL = Panel(
    "cards",
    "Cards",
    body,
    ranks_heading,
    about="memory and work of each card, or of each process",
)
MEMORY = Panel(
    "card_memory", "Device memory", memory_body, heading,
    about="memory of each of several cards by category",
)  # fmt: skip
