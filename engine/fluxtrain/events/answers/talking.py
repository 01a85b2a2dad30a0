"""Talk with a model in a subprocess, `fluxtrain generate --json`, without torch in this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import msgspec

from fluxtrain.errors import EXIT_BUG
from fluxtrain.events.answers.asking import EngineRefused, close_pipes, last_words, start_engine
from fluxtrain.events.answers.generation import COMMAND, Ask, Event, Stop, encoded, read_event
from fluxtrain.files.parent import environment_of_child


class Talk:
    """One model that answers until it is closed. Its first event but progress is `Ready`."""

    def __init__(self, process: asyncio.subprocess.Process, said: Callable[[str], None]) -> None:
        self._process = process
        self._errors: list[bytes] = []
        self._listening = asyncio.create_task(self._listen(said))

    @staticmethod
    async def begin(
        model: str,
        *options: str,
        said: Callable[[str], None] = lambda line: None,
        program: tuple[str, ...] = (),
    ) -> Talk:
        """Start the command; `said` gets every line of its standard error, `program` replaces
        `python -m fluxtrain`."""
        started_by = program or (sys.executable, "-P", "-m", "fluxtrain")
        command = (*started_by, COMMAND, "--json", *options, "--", model)
        stdin = asyncio.subprocess.PIPE
        return Talk(await start_engine(command, environment_of_child(), stdin), said)

    async def events(self) -> AsyncIterator[Event]:
        """Yield what it says until it ends.

        Raises EngineRefused, with its own words, where it fails or says something else.
        """
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            try:
                yield read_event(line)
            except msgspec.MsgspecError as error:
                raise EngineRefused(f"its answer cannot be understood: {error}", EXIT_BUG) from None
        code = await self._process.wait()
        await self._listening
        if code:
            raise EngineRefused(last_words(b"".join(self._errors), code), code)

    async def ask(self, asked: Ask) -> None:
        """Ask for an answer; further ones wait for it."""
        await self._send(encoded(asked))

    async def stop(self) -> None:
        """Stop the answer that is being written; it ends with what is there."""
        await self._send(encoded(Stop()))

    async def close(self) -> None:
        """End the process, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            await self._process.wait()
            await asyncio.wait([self._listening])
        finally:  # its pipes too, where the loop closes next
            close_pipes(self._process)

    async def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # `events` says why it is gone
            self._process.stdin.write(line)
            await self._process.stdin.drain()

    async def _listen(self, said: Callable[[str], None]) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._errors.append(line)
            if text := line.decode(errors="replace").strip():
                said(text)
