"""One block: where its parts are, their bytes, and its latest copies with their cause."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.events.events import Move, ResidencySampled
from fluxtrain.units import UNKNOWN, bytes_text, duration_text
from fluxtui.panels.card_colours import card_of, letter_of, role_of
from fluxtui.panels.moves import ARROWS
from fluxtui.panels.moves import ROLES as WAY_ROLES
from fluxtui.panels.panel import Panel, key_of, stale_note
from fluxtui.panels.residency import CLASSES, ROLES, weights_apart
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit, wrapped

WORDS = {
    "G": "device", "C": "host", "N": "disk", ">": "on its way in", "<": "on its way to the host",
    ".": "not there",
}  # fmt: skip


def heading(view: View, width: int) -> Line:
    """Say which block is shown, and how to choose another one."""
    sample = view.fresh(view.state.residency)
    if sample is None:
        return stale_note(view.age_s(view.state.residency))
    at = selected(view, sample)
    name = name_of(sample, at)
    parts: list[Line] = [((f"{at + 1} of {len(sample.weights)}", "strong"),)]
    if at < len(sample.cards):
        card = card_of(sample.cards[at])
        parts.append((("card ", "dim"), (letter_of(card), role_of(card))))
    if name:
        parts.append(((name, "text"),))
    hint = f"{key_of(view, 'block_before')} {key_of(view, 'block_after')} choose"
    return dropped_to_fit([*parts, ((hint, "dim"),)], width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Return a line a class, then the latest copies that the trainer reported, newest first."""
    sample = view.fresh(view.state.residency)
    if sample is None:
        labels: list[Line] = [((f" {name:<10}", "dim"), (UNKNOWN, "dim")) for name in CLASSES]
        return labels[:height]
    at = selected(view, sample)
    sizes = bytes_of(sample, at)
    letters = (sample.weights, sample.gradients, sample.optimizer)
    lines = [
        _class_line(name, row[at] if at < len(row) else ".", size, width)
        for name, row, size in zip(CLASSES, letters, sizes, strict=True)
    ]
    if kinds := _kinds_of(sample, at):
        lines.insert(1, dropped_to_fit([((" " * 3, "dim"),), *kinds], width))
    name = name_of(sample, at)
    moves = [move for move in view.state.moves if name and move.block == name]
    lines += _copies_lines(moves, view.state.moves_are_a_sample, width)
    room = max(0, height - len(lines))
    lines += [_move_line(move, width) for move in reversed(moves[-room:] if room else [])]
    return lines[:height]


def selected(view: View, sample: ResidencySampled) -> int:
    """Return the index of the chosen block; without a choice the first."""
    return max(0, min(view.chart.block or 0, len(sample.weights) - 1))


def name_of(sample: ResidencySampled, at: int) -> str:
    """Return the block's name in the model; "" if the trainer did not send it."""
    for run in sample.blocks:
        if at < run.count:
            return run.name.replace("{}", str(run.first + at))
        at -= run.count
    return ""


def bytes_of(sample: ResidencySampled, at: int) -> tuple[int | None, int | None, int | None]:
    """Return the bytes of its weights, gradients and optimizer state; None if not sent."""
    for run in sample.blocks:
        if at < run.count:
            return run.weights_bytes, run.gradients_bytes, run.optimizer_bytes
        at -= run.count
    return None, None, None


def _kinds_of(sample: ResidencySampled, at: int) -> list[Line]:
    """Return the block's trained, frozen and packed bytes; nothing where all are trained."""
    for run in sample.blocks:
        if at < run.count:
            return weights_apart(run.weights_bytes, run.frozen_bytes, run.packed_bytes)
        at -= run.count
    return []


def _class_line(name: str, letter: str, size: int | None, width: int) -> Line:
    role = ROLES.get(letter, "absent")
    return dropped_to_fit(
        [
            (
                (f" {letter} ", "absent" if letter == "." else f"tile:{role}"),
                (f" {name:<10}", "dim"),
            ),
            ((f"{bytes_text(size):>9}", "dim" if size is None else "strong"),),
            ((WORDS.get(letter, letter), role if letter != "." else "dim"),),
        ],
        width,
    )


def _copies_lines(moves: Sequence[Move], sampled: bool, width: int) -> list[Line]:
    """Say how many of the latest copies are of this block, in and out."""
    if not moves:
        note = "none in the sample of copies" if sampled else "no copy of it among the latest"
        return [((f" {part}", "dim"),) for part in wrapped(note, max(1, width - 1))]
    inward = sum(move.direction.endswith(">G") for move in moves)
    counts = dropped_to_fit(
        [
            ((" sampled copies" if sampled else " latest copies", "title"),),
            ((f"{inward}", "strong"), (" in", "dim")),
            ((f"{len(moves) - inward}", "strong"), (" out", "dim")),
            ((f"steps {moves[0].step}-{moves[-1].step}", "dim"),),
        ],
        width,
    )
    return [counts]


def _move_line(move: Move, width: int) -> Line:
    return dropped_to_fit(
        [
            ((f"{move.step:>5}", "dim"),),
            ((ARROWS.get(move.direction, move.direction), WAY_ROLES.get(move.direction, "text")),),
            ((f"{bytes_text(move.bytes):>8}", "text"),),
            ((f"{move.cause:<8}", "text"),),
            ((f"{duration_text(move.duration_s):>7}", "dim"),),
            ((move.what, "dim"),),
        ],
        width,
        gap=" ",
    )


PANEL = Panel("block", "Block", body, heading, about="one block: its bytes, where they are, copies")
