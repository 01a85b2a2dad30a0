"""Talk with a model that answers in a process of its own: `fluxtrain generate MODEL --json`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence

import msgspec

from fluxtrain.client.asking import EngineRefused, last_words
from fluxtrain.client.generation import COMMAND, Ask, Event, Stop, encoded, read_event
from fluxtrain.errors import EXIT_BUG

_LINE_LIMIT_BYTES = 1 << 24
_KEPT_BYTES = 1 << 16  # of what it says on standard error


class Talk:
    """The process, with its questions and its events. It ends with `end`, or by itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Take over a process; `begin` starts one."""
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._in, self._out = process.stdin, process.stdout
        self._said = asyncio.ensure_future(_last_of(process.stderr))

    @classmethod
    async def begin(
        cls, model: str, options: Sequence[str] = (), program: tuple[str, ...] = ()
    ) -> Talk:
        """Start the process for a model: a folder, a run's folder, a hub id, or `demo`.

        It has a session of its own, so that no Ctrl-C of the terminal reaches it.
        """
        started_by = program or (sys.executable, "-P", "-m", "fluxtrain")
        process = await asyncio.create_subprocess_exec(
            *started_by, COMMAND, model, "--json", *options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_LIMIT_BYTES,
        )  # fmt: skip
        return cls(process)

    def ask(self, question: Ask) -> None:
        """Ask for an answer; its events follow those of earlier questions."""
        self._write(encoded(question))

    def stop(self) -> None:
        """Stop the answer that is being written; what there is of it is an answer."""
        self._write(encoded(Stop()))

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it ended: `events` says why
            self._in.write(line)

    async def events(self) -> AsyncIterator[Event]:
        """Yield what it says, until it ends.

        Raises:
            EngineRefused: it failed, with its own last words, or said what is no event.
        """
        async for line in self._out:
            try:
                yield read_event(line)
            except msgspec.MsgspecError as error:
                raise EngineRefused(f"its line is no event: {error}", EXIT_BUG) from error
        code = await self._process.wait()
        said = await self._said
        if code:
            raise EngineRefused(last_words(said, code), code)

    async def end(self) -> None:
        """End the process and its helpers, and wait until its pipes are closed."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._said
        self._in.close()


async def _last_of(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end; return its last part."""
    assert stream is not None
    kept = b""
    while part := await stream.read(1 << 14):
        kept = (kept + part)[-_KEPT_BYTES:]
    return kept
