"""Reads a running run: the journal of any run, and the live pipe of a run that this app started.

Both give the same events, so attach, follow and replay are the same code. A reader never blocks and
does a bounded amount of work a call. Texts are made printable, because they are read to be shown.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from fluxtrain.events.events import FRAME_LIMIT_BYTES, AnyEvent
from fluxtrain.events.frames import SchemaTooNew, Skipped, classify_line, decode_line
from fluxtrain.events.printable import is_plain, printable_texts
from fluxtrain.files.opening import open_plain

__all__ = ["JournalFollower", "PipeReader", "SchemaTooNew", "decode_line"]

POLL_BYTES = 1 << 20


class _Lines:
    """Splits bytes into events and counts the lines that are no frames."""

    def __init__(self) -> None:
        self.garbage_lines = 0
        self._in_garbage = False  # inside a line that is longer than any frame

    def take(self, data: bytes) -> tuple[list[AnyEvent], int]:
        """Return the events of the whole lines in `data`, and how many bytes of it were used."""
        used = data.rfind(b"\n") + 1
        events = []
        for line in data[:used].split(b"\n")[:-1]:
            if self._in_garbage:
                self._in_garbage = False
                continue
            event = classify_line(line)
            if not isinstance(event, Skipped):
                events.append(event if is_plain(line) else printable_texts(event))
            elif event is Skipped.GARBAGE:
                self.garbage_lines += 1
        if len(data) - used > FRAME_LIMIT_BYTES:
            self.garbage_lines += not self._in_garbage
            self._in_garbage, used = True, len(data)
        return events, used


class JournalFollower:
    """Follows a journal that may not exist yet, grows, or was cut by a resumed trainer.

    `follow`: the path may be a link, as of a recording that the user names.
    """

    def __init__(self, path: Path, poll_bytes: int = POLL_BYTES, *, follow: bool = False) -> None:
        self.path = path
        self._follow = follow
        self.restarts = 0  # times the file was replaced or cut before the read position
        self._poll_bytes = max(poll_bytes, 2 * FRAME_LIMIT_BYTES)
        self._offset = 0  # always at the start of a line, so a torn tail is read again
        self._inode = 0
        self._seen_size = 0
        self._lines = _Lines()

    @property
    def garbage_lines(self) -> int:
        """Count the lines that were not frames."""
        return self._lines.garbage_lines

    def poll(self) -> list[AnyEvent]:
        """Return the next events, at most `poll_bytes` of them; [] without news.

        Raises `SchemaTooNew` for a run of another major version.
        """
        try:
            with open_plain(self.path, follow=self._follow) as file:
                return self._read(file)
        except FileNotFoundError:
            return []

    def _read(self, file: io.FileIO) -> list[AnyEvent]:
        facts = os.fstat(file.fileno())
        if facts.st_ino != self._inode or facts.st_size < self._offset:
            self.restarts += self._inode != 0
            self._inode, self._offset, self._seen_size = facts.st_ino, 0, 0
            self._lines = _Lines()  # counts start again in the new file
        if facts.st_size == self._seen_size:
            return []
        data = os.pread(file.fileno(), self._poll_bytes, self._offset)
        events, used = self._lines.take(data)
        self._offset += used
        self._seen_size = facts.st_size if len(data) < self._poll_bytes else self._offset
        return events

    def read_all(self) -> list[AnyEvent]:
        """Return all events up to now, for a replay."""
        events: list[AnyEvent] = []
        while True:
            before = self._offset
            events += self.poll()
            if self._offset == before:
                return events


class PipeReader:
    """The reading end of the live pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._rest = b""
        self._lines = _Lines()
        self.closed = False  # the trainer ended, or closed the pipe

    @property
    def garbage_lines(self) -> int:
        """Count the lines that were not frames."""
        return self._lines.garbage_lines

    def poll(self) -> list[AnyEvent]:
        """Return the events since the last call, about 1 MiB at most; [] without news."""
        if self.closed:
            return []
        received = bytearray(self._rest)
        while len(received) < POLL_BYTES:
            try:
                data = os.read(self._descriptor, POLL_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.close()
                break
            received += data
        events, used = self._lines.take(bytes(received))
        self._rest = bytes(received[used:])
        return events

    def close(self) -> None:
        """Stop reading; the trainer notices and goes on without a reader."""
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)
