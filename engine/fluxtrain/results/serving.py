"""Answers asks that come as lines and go as lines (`fluxtrain.events.answers.generation`)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.generation import Ask, Event, Refused, Stop, Text, read_request
from fluxtrain.models.generate.prompts import UserPrompt
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.results.generation_session import GenerationSession, answered

Send = Callable[[Event], None]


class Stopping:
    """Whether the answer that is being written shall stop; asked by a thread or a signal handler.

    An ask that came before a stop is stopped by it, whether its answer was begun or not.
    """

    def __init__(self) -> None:
        self.count = 0  # of the stops so far
        self._begun_at = 0

    def ask(self) -> None:
        """Stop the answer, and those that wait."""
        self.count += 1

    def asked(self) -> bool:
        """Was it asked for since the answer was asked for?"""
        return self.count > self._begun_at

    def begin(self, count: int | None = None) -> None:
        """Begin an answer that was asked for after `count` stops; None: just now."""
        self._begun_at = self.count if count is None else count


def serve(
    session: GenerationSession, lines: Iterable[bytes], send: Send, stopping: Stopping
) -> None:
    """Answer the asks of `lines` in their order until they end.

    A thread reads them, so that a stop is heard while an answer is written; asks wait meanwhile.
    """
    asks: queue.SimpleQueue[tuple[Ask | Refused | None, int]] = queue.SimpleQueue()

    def read() -> None:
        for line in lines:
            if not line.strip():
                continue
            try:
                request = read_request(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
                message = f"a line of the input is no request: {why}"
                asks.put((Refused(id="", message=message), 0))
                continue
            if isinstance(request, Stop):
                stopping.ask()
            else:
                asks.put((request, stopping.count))
        asks.put((None, 0))

    threading.Thread(target=read, name="asks", daemon=True).start()
    while True:
        asked, stops = asks.get()
        if asked is None:
            return
        if isinstance(asked, Refused):
            send(asked)
            continue
        stopping.begin(stops)
        try:
            _answer(session, asked, send, stopping)
        except BadInput as error:
            send(Refused(id=asked.id, message=str(error)))


def _answer(session: GenerationSession, asked: Ask, send: Send, stopping: Stopping) -> None:
    written = session.answer(
        _prompt(asked),
        _sampling(asked, session.sampling),
        lambda text: send(Text(id=asked.id, text=text)),
        stopping.asked,
    )
    send(answered(asked.id, written))


def _prompt(asked: Ask) -> UserPrompt:
    if (asked.messages is None) == (asked.prompt is None):
        raise BadInput("an ask has either `messages` or `prompt`")
    messages = None if asked.messages is None else [dict(one) for one in asked.messages]
    return UserPrompt(text=asked.prompt, messages=messages, where="the ask")


def _sampling(asked: Ask, usual: Sampling) -> Sampling:
    given = {
        name: value
        for name in ("max_new_tokens", "temperature", "top_p", "seed")
        if (value := getattr(asked, name)) is not None
    }
    return replace(usual, **given)
