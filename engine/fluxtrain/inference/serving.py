"""Answers asks that come as lines and go as lines (`fluxtrain.client.generation`)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from fluxtrain.client.generation import Ask, Event, Refused, Stop, Text, read_request
from fluxtrain.errors import BadInput
from fluxtrain.inference.prompts import Prompt
from fluxtrain.inference.sampling import Sampling
from fluxtrain.inference.session import Session, answered

Send = Callable[[Event], None]


class Stopping:
    """Whether the answer that is being written shall stop; set by other threads and signals."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """Stop the answer."""
        self._asked.set()

    def asked(self) -> bool:
        """Was it asked for?"""
        return self._asked.is_set()

    def begin(self) -> None:
        """Begin another answer."""
        self._asked.clear()


def serve(session: Session, lines: Iterable[bytes], send: Send, stopping: Stopping) -> None:
    """Answer the asks of `lines` in their order until they end.

    A thread reads them, so that a stop is heard while an answer is written; asks wait meanwhile.
    """
    asks: queue.SimpleQueue[Ask | Refused | None] = queue.SimpleQueue()

    def read() -> None:
        for line in lines:
            if not line.strip():
                continue
            try:
                request = read_request(line)
            except msgspec.MsgspecError as error:
                asks.put(Refused(id="", message=f"a line of the input is no request: {error}"))
                continue
            if isinstance(request, Stop):
                stopping.ask()
            else:
                asks.put(request)
        asks.put(None)

    threading.Thread(target=read, name="asks", daemon=True).start()
    while (asked := asks.get()) is not None:
        if isinstance(asked, Refused):
            send(asked)
            continue
        stopping.begin()
        try:
            _answer(session, asked, send, stopping)
        except BadInput as error:
            send(Refused(id=asked.id, message=str(error)))


def _answer(session: Session, asked: Ask, send: Send, stopping: Stopping) -> None:
    written = session.answer(
        _prompt(asked),
        _sampling(asked, session.sampling),
        lambda text: send(Text(id=asked.id, text=text)),
        stopping.asked,
    )
    send(answered(asked.id, written))


def _prompt(asked: Ask) -> Prompt:
    if (asked.messages is None) == (asked.prompt is None):
        raise BadInput("an ask has either `messages` or `prompt`")
    messages = None if asked.messages is None else [dict(one) for one in asked.messages]
    return Prompt(text=asked.prompt, messages=messages, where="the ask")


def _sampling(asked: Ask, usual: Sampling) -> Sampling:
    given = {
        name: value
        for name in ("max_new_tokens", "temperature", "top_p", "seed")
        if (value := getattr(asked, name)) is not None
    }
    return replace(usual, **given)
