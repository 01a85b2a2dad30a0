"""The Chat screen: talk with a trained model, which answers in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, cast

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input

from fluxtrain.events.answers.asking import EngineRefused, Talk
from fluxtrain.events.printable import printable_lines
from fluxtrain.units import duration_text
from fluxtui.actions.action_screen import ActionScreen
from fluxtui.actions.key_map import own_bindings
from fluxtui.actions.table import ACTIONS, Action
from fluxtui.app_base import AppBase
from fluxtui.chat.state import ChatState, Turn
from fluxtui.widgets.entry import PrintableInput
from fluxtui.widgets.lines import Ground, Lines
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line, Span, dropped_to_fit, joined, spread, wrapped

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
    """Say which model answers and how fast; before it is loaded, how long it has been loading."""
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


DRAWN_AFTER_S = 0.1  # pieces of an answer that come meanwhile are drawn at once
CHAT_KEYS = tuple(action.id for action in ACTIONS if action.group == "Chat")
HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("chat_send",), "ask"),
    (("chat_stop",), "stop"),
    (("chat_cooler", "chat_warmer"), "temperature"),
    (("chat_narrower", "chat_wider"), "top-p"),
    (("chat_new",), "new"),
    (("help",), "help"),
    (("chat_up", "chat_down"), "scroll"),
)
LEAVES_NEXT = "press again to leave; the conversation is not saved"


class ChatScreen(Ground, ActionScreen[None]):
    """Asks a model and shows its answers as they come."""

    AUTO_FOCUS = "#question"
    BINDINGS: ClassVar[list[BindingType]] = own_bindings(CHAT_KEYS)
    DEFAULT_CSS = """
    ChatScreen { layout: vertical; overflow: hidden; }
    ChatScreen > .chrome { height: 1; width: 1fr; }
    ChatScreen > #said { height: 1fr; width: 1fr; }
    ChatScreen > Input, ChatScreen > Input:focus {
        height: 1; border: none; padding: 0 1; background: $surface;
    }
    """

    def __init__(self, model: str, title: str, program: tuple[str, ...] = ()) -> None:
        """Talk with `model`, as `fluxtrain generate` takes it; `program` replaces the engine."""
        super().__init__()
        self.state = ChatState()
        self._model, self._named, self._program = model, title, program
        self._talk: Talk | None = None
        self._began_s = time.monotonic()
        self._said = ""  # by the process, on its standard error
        self._due = False  # a drawing is on its way
        self._following = True  # the newest line stays in view
        self._leaves = False  # the next press leaves
        self._asks_first = False  # Enter was pressed while the model was loading

    def compose(self) -> ComposeResult:
        yield Lines(id="top", classes="chrome")
        yield Lines(id="model", classes="chrome")
        yield ScrollingLines(id="said")
        yield PrintableInput(placeholder="ask something", id="question")
        yield Lines(id="keys", classes="chrome")

    @property
    def place(self) -> str:
        return "chat"

    @property
    def flux(self) -> AppBase:
        """Return the app with its own type."""
        return cast("AppBase", self.app)

    def on_mount(self) -> None:
        self.run_worker(self._listen(), group="talk", exclusive=True)
        self.set_interval(1.0, self._tick)
        self.call_later(self.draw)

    def on_resize(self) -> None:
        self.call_next(self.draw)

    def on_screen_resume(self) -> None:
        self.call_next(self.draw)

    # --- the model ----------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Start the model's process and fold its events, until it ends or the screen is left."""
        talk = self._talk = await Talk.begin(self._model, said=self._hear, program=self._program)
        try:
            async for event in talk.events():
                self._take(self.state.after(event))
                if self._asks_first and self.state.ready is not None:
                    self._asks_first = False
                    await self.action_send()
            self._take(self.state.failed("the model's process has ended: leave and come again"))
        except EngineRefused as error:
            self._take(self.state.failed(str(error)))
        finally:
            await talk.close()

    def _hear(self, line: str) -> None:
        """Keep the newest line that the engine prints while it loads."""
        self._said = line

    def _take(self, state: ChatState) -> None:
        self.state = state
        if not self._due:
            self._due = True
            self.set_timer(max(DRAWN_AFTER_S, self.flux.period_s() / 4), self._draw_due)

    def _draw_due(self) -> None:
        self._due = False
        self.draw()

    def _tick(self) -> None:
        """Advance the clock while the model loads."""
        if self.state.ready is None and not self.state.problem:
            self.draw()

    # --- drawing ------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the conversation as it is."""
        if not self.is_mounted or not self.query("#keys") or not self.size.width:
            return
        width, palette, state = self.size.width, self.flux.palette, self.state
        word, role = _status(state)
        right: Line = (("  ", "text"), *sampling_spans(state), (f"● {word} ", role))
        name: Line = ((f"chat with {self._named}", "strong"),)
        left = joined([((" FluxTrain", "accent"),), name])
        self.query_one("#top", Lines).show([spread(left, right, width)], palette)
        waited_s = time.monotonic() - self._began_s
        self.query_one("#model", Lines).show(
            [model_line(state, self._said or self._named, waited_s)], palette
        )
        said = self.query_one("#said", ScrollingLines)
        lines: list[Line] = [BLANK, *conversation(state, said.size.width)]
        if state.problem:
            told = wrapped(printable_lines(state.problem), max(8, said.size.width - 4))
            lines += [(("  ", "text"), (part, "bad")) for part in told]
        said.show_all(lines, palette, at_end=self._following)
        self.query_one("#keys", Lines).show([keys_line(self.flux.actions, state, width)], palette)

    def on_scrolling_lines_scrolled(self, event: ScrollingLines.Scrolled) -> None:
        self._following = event.at_end

    # --- actions ------------------------------------------------------------------------------

    async def on_input_submitted(self) -> None:
        await self.action_send()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._leaves = False

    async def action_send(self) -> None:
        """Ask what was typed, once the model is there and has answered."""
        box = self.query_one("#question", PrintableInput)
        question, talk = box.value.strip(), self._talk
        if not question:
            return
        if talk is None or self.state.ready is None:
            self._asks_first = True
            self.flux.notify("asked as soon as the model is loaded", timeout=4)
            return
        if self.state.answering or self.state.problem:
            why = self.state.problem or "one answer at a time: wait, or stop this one"
            self.flux.notify(why, title="Not asked", severity="warning", timeout=4)
            return
        self.state, ask = self.state.asked(question)
        box.value, self._following = "", True
        self.draw()
        await talk.ask(ask)

    async def action_stop_answer(self) -> None:
        """Stop the answer; without one leave, after a second press where something was said."""
        if self.state.answering and self._talk is not None:
            await self._talk.stop()
        elif self.state.turns and not self._leaves:
            self._leaves = True
            key = next(one.key_text for one in self.flux.actions if one.id == "chat_stop")
            self.flux.notify(f"{key}: {LEAVES_NEXT}", timeout=4)
        else:
            self.dismiss(None)

    async def action_anew(self) -> None:
        """Begin a new conversation."""
        if self.state.answering and self._talk is not None:
            await self._talk.stop()
        self.state = self.state.anew()
        self.draw()

    def action_temperature(self, by: int) -> None:
        """Raise or lower the temperature from the next answer on."""
        self.state = self.state.warmer(by)
        self.draw()

    def action_top_p(self, by: int) -> None:
        """Raise or lower top-p from the next answer on."""
        self.state = self.state.wider(by)
        self.draw()

    def action_scroll_said(self, pages: int) -> None:
        """Scroll the conversation."""
        self.query_one("#said", ScrollingLines).action_page(pages)


def _status(state: ChatState) -> tuple[str, str]:
    if state.problem:
        return "ENDED", "bad"
    if state.ready is None:
        return "LOADING", "warn"
    return ("ANSWERING", "accent") if state.answering else ("READY", "good")


def keys_line(registry: Sequence[Action], state: ChatState, width: int) -> Line:
    """Draw the keys of the screen, the user's own where set; letters are left to the question."""
    keys = {action.id: action.key_text for action in registry}
    keys["help"] = next(one for action in registry if action.id == "help"
                        for one in (*action.keys.split(",")[::-1],) if len(one) > 1)  # fmt: skip
    words = {"chat_stop": "stop" if state.answering else "leave"}
    shown = [
        ((" ".join(keys[name] for name in names), "key"), (f" {words.get(names[0], text)}", "dim"))
        for names, text in HINTS
    ]
    return ((" ", "text"), *dropped_to_fit(shown, width - 2))
