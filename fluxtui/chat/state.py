"""A conversation with a model as a value: what was said, and a fold over the model's events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fluxtrain.events.answers.generation import Answered, Ask, Ended, Event, Ready, Refused, Text

TEMPERATURES = (None, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0)
TOP_PS = (None, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with its answer so far; `ended` is None while it is being written."""

    question: str
    answer: str = ""
    ended: Ended | None = None
    tokens: int = 0
    seconds: float = 0.0
    refused: str = ""

    @property
    def open(self) -> bool:
        """Return whether the answer is still being written."""
        return self.ended is None and not self.refused


@dataclass(frozen=True, slots=True)
class ChatState:
    """The conversation.

    Attributes:
        ready: the model, once it is loaded.
        problem: why its process has ended.
        temperature, top_p: of the next answers; None leaves them to the model.
    """

    turns: tuple[Turn, ...] = ()
    ready: Ready | None = None
    problem: str = ""
    temperature: float | None = None
    top_p: float | None = None

    @property
    def answering(self) -> bool:
        """Return whether an answer is being written."""
        return bool(self.turns) and self.turns[-1].open and not self.problem

    def asked(self, question: str) -> tuple[ChatState, Ask]:
        """Return the state with another question, and the request to the model."""
        number = str(len(self.turns) + 1)
        talks = self.ready is None or self.ready.has_template
        ask = Ask(
            id=number,
            messages=(*self._said, _message("user", question)) if talks else None,
            prompt=None if talks else question,
            temperature=self.temperature,
            top_p=self.top_p,
        )
        return replace(self, turns=(*self.turns, Turn(question))), ask

    def after(self, event: Event) -> ChatState:
        """Return the state after an event of the model."""
        if isinstance(event, Ready):
            return replace(self, ready=event)
        if not self.turns or not self.turns[-1].open or event_id(event) != str(len(self.turns)):
            return self  # of a conversation that was given up
        last = self.turns[-1]
        if isinstance(event, Text):
            last = replace(last, answer=last.answer + event.text)
        elif isinstance(event, Answered):
            last = replace(
                last, answer=event.text, ended=event.ended, tokens=event.tokens,
                seconds=event.seconds,
            )  # fmt: skip
        elif isinstance(event, Refused):
            last = replace(last, refused=event.message)
        return replace(self, turns=(*self.turns[:-1], last))

    def failed(self, problem: str) -> ChatState:
        """Return the state after the end of the model's process."""
        return replace(self, problem=problem)

    def anew(self) -> ChatState:
        """Return the state with an empty conversation, and the same model and sampling."""
        return replace(self, turns=())

    def warmer(self, by: int) -> ChatState:
        """Return the state with another temperature."""
        return replace(self, temperature=_turned(TEMPERATURES, self.temperature, by))

    def wider(self, by: int) -> ChatState:
        """Return the state with another top-p."""
        return replace(self, top_p=_turned(TOP_PS, self.top_p, by))

    @property
    def _said(self) -> tuple[dict[str, Any], ...]:
        kept = [turn for turn in self.turns if not turn.refused and turn.answer]
        return tuple(
            _message(role, text)
            for turn in kept
            for role, text in (("user", turn.question), ("assistant", turn.answer))
        )


def event_id(event: Event) -> str:
    """Return the question that an event is about; "" for none."""
    return event.id if isinstance(event, Text | Answered | Refused) else ""


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _turned(stops: tuple[float | None, ...], value: float | None, by: int) -> float | None:
    at = stops.index(value) + by
    return stops[max(0, min(len(stops) - 1, at))]
