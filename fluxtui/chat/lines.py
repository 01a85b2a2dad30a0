"""A conversation with a model as lines."""

from __future__ import annotations

from functools import lru_cache

from fluxtrain.events.printable import printable_lines
from fluxtrain.units import duration_text
from fluxtui.chat.state import ChatState, Turn
from fluxtui.widgets.spans import BLANK, Line, Span, wrapped

ENDED_BECAUSE = {
    "end": "",
    "length": "cut at the most tokens of an answer",
    "context": "the model knows no further positions",
    "stopped": "stopped",
}
CURSOR = "▌"


def conversation(state: ChatState, width: int) -> list[Line]:
    """Draw every turn: the question, the answer, and what it took."""
    return [line for turn in state.turns for line in (*turn_lines(turn, width), BLANK)]


@lru_cache(maxsize=512)
def turn_lines(turn: Turn, width: int) -> tuple[Line, ...]:
    """Draw one turn."""
    lines = [
        (("  > " if number == 0 else "    ", "accent"), (text, "strong"))
        for number, text in enumerate(_in_lines(turn.question, width - 5))
    ]
    answer = turn.answer + (CURSOR if turn.open else "")
    lines += [(("    ", "text"), (text, "text")) for text in _in_lines(answer, width - 5)]
    if turn.refused:
        told = _in_lines(turn.refused, width - 7)
        lines += [
            (("    ✗ " if number == 0 else "      ", "bad"), (text, "bad"))
            for number, text in enumerate(told)
        ]
    elif turn.ended is not None:
        lines += [(("    ", "text"), (text, "dim")) for text in _in_lines(took(turn), width - 5)]
    return tuple(lines)


def took(turn: Turn) -> str:
    """Say how many tokens an answer has, how long it took, and why it ended early."""
    rate = f", {turn.tokens / turn.seconds:.3g} tokens/s" if turn.seconds > 0 else ""
    why = ENDED_BECAUSE[turn.ended or "end"]
    count = f"{turn.tokens:,} token{'' if turn.tokens == 1 else 's'}"
    return f"{count} in {duration_text(turn.seconds)}{rate}{f'; {why}' if why else ''}"


def model_line(state: ChatState, named: str, waited_s: float) -> Line:
    """Say who answers and how long that takes; before it is loaded, for how long it loads."""
    if state.problem:
        return ((" the model answers no more", "bad"),)
    ready = state.ready
    if ready is None:
        return ((f" loading {named}  {waited_s:.0f} s", "dim"),)
    base = f" on {ready.base}" if ready.base else ""
    most = duration_text(ready.pass_s * ready.max_new_tokens)
    return (
        (f" a token takes {duration_text(ready.pass_s)} (measured), ", "text"),
        (f"{ready.max_new_tokens} tokens {most} at most", "text"),
        (f"  {ready.model}{base} in {ready.dtype}, {ready.placed}", "dim"),
    )


def sampling_spans(state: ChatState) -> list[Span]:
    """Draw the sampling settings: temperature, top-p and the like."""
    shown = [("temperature", state.temperature), ("top-p", state.top_p)]
    return [
        span
        for name, value in shown
        for span in (
            (f"{name} ", "dim"),
            (f"{'auto' if value is None else f'{value:g}'}  ", "strong"),
        )
    ]


def _in_lines(text: str, width: int) -> list[str]:
    plain = printable_lines(text)
    return [part for line in plain.split("\n") for part in wrapped(line, max(8, width)) or [""]]
