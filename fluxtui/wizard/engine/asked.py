"""A question to the engine: the state of its answer, and the worker that asks it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from textual.screen import Screen

from fluxtrain.events.answers.answers import Answer
from fluxtrain.events.answers.asking import EngineRefused, ask_engine

T = TypeVar("T", bound=Answer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked(Generic[T]):
    """The state of a question.

    Attributes:
        asked_s: when it was asked, on the monotonic clock; None before.
        said: the newest line that the engine said while it works.
        value: the answer.
        refusal, exit_code: why there is none, in the engine's words.
    """

    asked_s: float | None = None
    said: str = ""
    value: T | None = None
    refusal: str | None = None
    exit_code: int = 0

    @property
    def pending(self) -> bool:
        """Return whether the question is asked, and neither answered nor refused."""
        return self.asked_s is not None and self.value is None and self.refusal is None

    @property
    def waited_s(self) -> float:
        """Return the seconds since the question was asked."""
        return 0.0 if self.asked_s is None else time.monotonic() - self.asked_s


class Question(Generic[T]):
    """Asks the engine for an `answer` in a worker of `screen`; a new request ends the process of
    the last.

    `on_change` is called whenever `state` has changed.
    """

    def __init__(
        self,
        screen: Screen[Any],
        answer: type[T],
        on_change: Callable[[], None],
        program: tuple[str, ...] = (),
        group: str = "",
    ) -> None:
        """Ask one question of a `group` at a time; the group is the command by default."""
        self.state: Asked[T] = Asked()
        self._screen, self.answer = screen, answer
        self._on_change, self._program = on_change, program
        self._group = group or answer.COMMAND
        self.key: object = None  # of what was asked last

    def ask(
        self,
        key: object,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Ask with the command's `arguments`, unless the last request had the same `key`.

        `forget` makes it ask again.
        """
        if key == self.key:
            return
        self.key = key
        self.state = Asked(asked_s=time.monotonic())
        self._on_change()
        self._screen.run_worker(
            self._run(arguments, environment or {}), group=self._group, exclusive=True
        )

    def take(self, key: object, known: Asked[T]) -> None:
        """Accept an already known answer to the question of `key`."""
        if key == self.key:
            return
        self._screen.workers.cancel_group(self._screen, self._group)
        self.key, self.state = key, known
        self._on_change()

    def forget(self) -> None:
        """End a running request, and drop the answer."""
        self._screen.workers.cancel_group(self._screen, self._group)
        self.key, self.state = None, Asked()
        self._on_change()

    async def _run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            value = await ask_engine(
                self.answer,
                *arguments,
                program=self._program,
                said=self._said,
                environment=environment,
            )
            self.state = dataclasses.replace(self.state, value=value)
        except EngineRefused as error:
            self.state = dataclasses.replace(
                self.state, refusal=str(error), exit_code=error.exit_code
            )
        self._on_change()

    def _said(self, line: str) -> None:
        self.state = dataclasses.replace(self.state, said=line)
        self._on_change()
