"""Answers asks that come as lines and go as lines (`fluxtrain.events.answers.generation`)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from fluxtrain.errors import BadInput, Busy
from fluxtrain.events.answers.generation import (
    Ask,
    Event,
    Mount,
    Mounted,
    Refused,
    Stop,
    Text,
    Unmount,
    read_request,
)
from fluxtrain.models.generate.batch import AnswerBatch, AnswerRow
from fluxtrain.models.generate.prompts import UserPrompt
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.results.generation_session import (
    MOST_ROWS,
    GenerationSession,
    answered,
    rows_that_fit,
)

TOGETHER_S = 0.02
Send = Callable[[Event], None]
Line = Ask | Stop | Mount | Unmount | Refused | None  # None: the input has ended


class Stopping:
    """Counts the times that somebody asked to stop, as by a signal."""

    def __init__(self) -> None:
        self.count = 0
        self._begun_at = 0

    def ask(self) -> None:
        """Stop the running and the waiting answers."""
        self.count += 1

    def asked(self) -> bool:
        """Return whether a stop was asked for after the answer was."""
        return self.count > self._begun_at

    def begin(self) -> None:
        """Begin an answer, which earlier stops do not concern."""
        self._begun_at = self.count


def serve(
    session: GenerationSession,
    lines: Iterable[bytes],
    write: Callable[[Sequence[Event]], None],
    stopping: Stopping,
) -> None:
    """Answer the asks of `lines` until they end, as many at once as fit in memory.

    A thread reads them, so that asks, stops and mounts are heard between two passes. write: gets
    what is to be told, that of a pass together.
    """
    told: list[Event] = []

    def tell() -> None:
        if told:
            write(told)
            told.clear()

    heard: queue.SimpleQueue[Line] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, heard.put), name="asks", daemon=True).start()
    has_ended = False

    def hear() -> None:
        """Take the lines that have come; wait for one where nothing else is to do, and a moment for
        more, so that asks that are sent together share their passes."""
        nonlocal has_ended
        until_s: float | None = None  # once there is an answer to begin
        while not has_ended and not (answering.is_writing and heard.empty()):
            if answering.is_busy and until_s is None:
                until_s = perf_counter() + TOGETHER_S
            left_s = None if until_s is None else max(0.0, until_s - perf_counter())
            try:
                line = heard.get(timeout=left_s)
            except queue.Empty:
                break
            has_ended = line is None
            if line is not None:
                answering.take(line)
                tell()
        if stopping.asked():
            stopping.begin()
            answering.stop("")

    answering = _Answering(session, told.append)
    while not has_ended or answering.is_busy:
        hear()
        answering.go_on()
        tell()


def _read(lines: Iterable[bytes], put: Callable[[Line], None]) -> None:
    for line in lines:
        if not line.strip():
            continue
        try:
            put(read_request(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            put(Refused(id="", message=f"a line of the input is no request: {why}"))
    put(None)


class _Answering:
    """The rows being written, the waiting ones, and the adapters in slots."""

    def __init__(self, session: GenerationSession, send: Send) -> None:
        self._session, self._send = session, send
        self._voices: dict[str, GenerationSession] = {}  # by adapter
        self._batch = AnswerBatch(session.opened, self._before_pass)
        self._waiting: list[AnswerRow] = []
        self._most: int | None = None  # rows at once, where memory has run out

    @property
    def is_writing(self) -> bool:
        """Return whether rows are being computed."""
        return bool(self._batch.rows)

    @property
    def is_busy(self) -> bool:
        """Return whether an answer is under way."""
        return bool(self._batch.rows or self._waiting)

    def take(self, line: Ask | Stop | Mount | Unmount | Refused) -> None:
        """Carry out a line."""
        try:
            if isinstance(line, Ask):
                self._waiting.append(self._row(line))
            elif isinstance(line, Stop):
                self.stop(line.id)
            elif isinstance(line, Mount | Unmount):
                self._change_slots(line)
            else:
                self._send(line)
        except BadInput as error:
            name = line.id if isinstance(line, Ask) else getattr(line, "name", "")
            self._send(Refused(id=name, message=str(error), later=isinstance(error, Busy)))

    def stop(self, name: str) -> None:
        """End one answer with its text so far, or all ("")."""
        for row in (*self._batch.rows, *self._waiting):
            if name in ("", row.id):
                row.ended = "stopped"
        self._end()

    def go_on(self) -> None:
        """Let waiting rows in, and compute one more token of every row."""
        try:
            if self._batch.rows:
                self._batch.step()
                self._end()
            if self._waiting and (room := self._room()) > 0:
                self._batch.join(self._waiting[:room])
                self._waiting = self._waiting[room:]
                self._end()
        except torch.OutOfMemoryError:
            self._with_fewer_rows()

    def _end(self) -> None:
        """Tell the answers that are whole, and let their rows leave."""
        ended = [row for row in (*self._batch.rows, *self._waiting) if row.ended is not None]
        self._batch.leave([row for row in ended if row in self._batch.rows])
        self._waiting = [row for row in self._waiting if row.ended is None]
        for row in ended:
            try:
                written = row.written()  # sends the last text
                self._send(answered(row.id, written))
            except BadInput as error:
                self._send(Refused(id=row.id, message=str(error)))

    def _room(self) -> int:
        """Return how many of the waiting rows may join now."""
        if not self._batch.changes_rows:
            return 0 if self._batch.rows else 1
        longest = max(len(row.ids) for row in self._waiting)
        most = max(row.most for row in self._waiting)
        fitting = rows_that_fit(self._session.opened, self._session.measured, longest, most)
        limit = MOST_ROWS if self._most is None else self._most
        return min(fitting, limit - len(self._batch.rows))

    def _with_fewer_rows(self) -> None:
        """Compute half as many rows at once from here on; memory ran out. All wait with their
        text so far, for their keys and values may be of half a pass."""
        rows = self._batch.rows
        if len(rows) == 1 or (not rows and self._most == 1):
            row = rows[0] if rows else self._waiting.pop(0)
            self._batch.leave([row])
            told = "it has no room in the device's memory: shorten prompt or answer"
            self._send(Refused(id=row.id, message=told))
            return
        self._most = max(1, (len(rows) or len(self._waiting)) // 2)
        self._batch.leave(rows)
        self._waiting = [*rows, *self._waiting]

    def _row(self, asked: Ask) -> AnswerRow:
        session = self._session
        if asked.adapter is not None:
            slots = session.opened.slots
            if slots is None or asked.adapter not in slots.filled:
                raise BadInput(f"the adapter {asked.adapter} is not mounted: mount it first")
            session = self._voices[asked.adapter]
        return AnswerRow(
            asked.id,
            session.opened,
            session.prompting.tokens(_prompt(asked), plain=asked.plain),
            _sampling(asked, self._session.sampling),
            lambda text, told: self._send(Text(id=asked.id, text=text, logprobs=told)),
            asked.adapter,
        )

    def _before_pass(self, rows: list[AnswerRow]) -> None:
        if self._session.opened.slots is not None:
            self._session.opened.slots.use([row.adapter for row in rows])

    def _change_slots(self, line: Mount | Unmount) -> None:
        slots, started_s = self._session.opened.slots, perf_counter()
        if slots is None:
            raise BadInput("there are no slots for adapters: start with --slots")
        busy = {row.adapter for row in (*self._batch.rows, *self._waiting)}
        if isinstance(line, Unmount):
            slots.unmount(line.name, busy)
        elif line.name in slots.filled:
            slots.touch(line.name)
        else:
            self._voices[line.name] = self._session.mount(slots, line.name, Path(line.path), busy)
        told = tuple(slots.filled)
        self._send(Mounted(name=line.name, mounted=told, seconds=perf_counter() - started_s))


def _prompt(asked: Ask) -> UserPrompt:
    if (asked.messages is None) == (asked.prompt is None):
        raise BadInput("an ask has either `messages` or `prompt`")
    messages = None if asked.messages is None else [dict(one) for one in asked.messages]
    return UserPrompt(text=asked.prompt, messages=messages, where="the ask")


def _sampling(asked: Ask, usual: Sampling) -> Sampling:
    given = {
        name: value
        for name in ("max_new_tokens", "temperature", "top_p", "seed", "stop", "logprobs")
        if (value := getattr(asked, name)) is not None
    }
    return replace(usual, **given)
