"""Asks the engine, and talks with a model, in subprocesses: torch never loads into this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TypeVar
from weakref import WeakSet

import msgspec

from fluxtrain.errors import EXIT_BUG, FluxTrainError, native_end
from fluxtrain.events.answers.answers import Answer
from fluxtrain.events.answers.generation import (
    COMMAND,
    Ask,
    Event,
    Mount,
    Stop,
    encoded,
    read_event,
)
from fluxtrain.files.parent import environment_of_child

T = TypeVar("T", bound=Answer)
FLUXTRAIN = (sys.executable, "-P", "-m", "fluxtrain")
_LINE_LIMIT_BYTES = 1 << 24
_STARTED = WeakSet[asyncio.subprocess.Process]()


class EngineRefused(FluxTrainError):
    """The engine answered with an error; the message is its own last line."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def ask_engine(
    answer: type[T],
    *arguments: str,
    program: tuple[str, ...] = (),
    said: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> T:
    """Run the command of `answer` with `--json` and `arguments`, and return what it prints.

    Cancelling the task ends the process, and so does the end of this one. `said` gets every line of
    its standard error as it comes; `environment` is added to ours; `program` replaces
    `python -m fluxtrain`.

    Raises:
        EngineRefused: the process failed, or printed something else than such an answer.
    """
    command = (*(program or FLUXTRAIN), answer.COMMAND, "--json", *arguments)
    starting = asyncio.ensure_future(_start_engine(command, environment))
    ended = asyncio.ensure_future(_ended(starting, said))
    try:
        code, output, errors = await asyncio.shield(ended)
    except asyncio.CancelledError:
        process = await starting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its helpers too
        await ended  # to the end of its pipes, so that nothing is left open
        raise
    if code:
        raise EngineRefused(last_words(errors, code), code)
    return decoded(answer, output)


def decoded(answer: type[T], output: str | bytes) -> T:
    """Read what a command printed; fields that `answer` does not have are ignored.

    Raises:
        EngineRefused: it is not what an engine of this version answers.
    """
    try:
        return msgspec.convert(json.loads(output), answer)
    except msgspec.ValidationError as error:
        raise EngineRefused(f"its answer cannot be understood: {error}", EXIT_BUG) from error
    except (ValueError, RecursionError):
        raise EngineRefused("the engine's answer is not JSON", EXIT_BUG) from None


async def _start_engine(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stdin: int = asyncio.subprocess.DEVNULL,
) -> asyncio.subprocess.Process:
    """Start a command in its own session, with pipes for its output; it ends with us."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**environment_of_child(), **(environment or {})},
        limit=_LINE_LIMIT_BYTES,
    )
    _STARTED.add(process)
    return process


def _close_pipes(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a process, and kill it if it still runs."""
    process._transport.close()  # type: ignore[attr-defined]  # no public way


async def wait_for_engines() -> None:
    """Wait until the processes that were started are gone, as a loop must before it is closed."""
    await asyncio.gather(*(process.wait() for process in _STARTED))


async def _ended(
    starting: asyncio.Future[asyncio.subprocess.Process], said: Callable[[str], None]
) -> tuple[int, bytes, bytes]:
    """Exit code, standard output and standard error."""
    process = await starting
    try:
        output, errors = await asyncio.gather(_all(process.stdout), _lines(process.stderr, said))
        return await process.wait(), output, errors
    except asyncio.CancelledError:  # by a loop that closes next, when its pipes could not be
        _close_pipes(process)
        raise


async def _all(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    return await stream.read()


async def _lines(stream: asyncio.StreamReader | None, said: Callable[[str], None]) -> bytes:
    """Read all of `stream`; `said` gets each line when it comes."""
    assert stream is not None
    read = []
    async for line in stream:
        read.append(line)
        text = line.decode(errors="replace").strip()
        if text:
            said(text)
    return b"".join(read)


def last_words(errors: bytes, exit_code: int) -> str:
    """Return the line that says why a process failed: its own error line, else the last one."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return f"the engine ended with exit code {exit_code} and said nothing"
    if (crash := native_end(lines)) is not None:
        return crash
    told = [line for line in lines if line.startswith(("error:", "this is a bug"))]
    return (told or lines)[-1].removeprefix("error:").strip()


class Talk:
    """One model that answers until it is closed. Its first event but progress is `Ready`."""

    def __init__(self, process: asyncio.subprocess.Process, said: Callable[[str], None]) -> None:
        self._process = process
        self._errors = asyncio.create_task(_lines(process.stderr, said))

    @staticmethod
    async def begin(
        model: str,
        *options: str,
        said: Callable[[str], None] = lambda line: None,
        program: tuple[str, ...] = (),
    ) -> Talk:
        """Start the command; `said` gets every line of its standard error, `program` replaces
        `python -m fluxtrain`."""
        command = (*(program or FLUXTRAIN), COMMAND, "--json", *options, "--", model)
        return Talk(await _start_engine(command, stdin=asyncio.subprocess.PIPE), said)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the command's events until it ends. Raises EngineRefused, with its own words,
        where it fails or prints something else."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            try:
                yield read_event(line)
            except msgspec.MsgspecError as error:
                raise EngineRefused(f"its answer cannot be understood: {error}", EXIT_BUG) from None
        code = await self._process.wait()
        errors = await self._errors
        if code:
            raise EngineRefused(last_words(errors, code), code)

    async def ask(self, asked: Ask) -> None:
        """Ask for an answer; further ones wait for it."""
        await self._send(encoded(asked))

    async def mount(self, name: str, path: str) -> None:
        """Put the adapter of a folder into a slot, before the next ask that names it."""
        await self._send(encoded(Mount(name=name, path=path)))

    async def stop(self, name: str = "") -> None:
        """Stop the answer to an ask, or all running ones (""); they end with the text so far."""
        await self._send(encoded(Stop(id=name)))

    async def close(self) -> None:
        """End the process, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            await self._process.wait()
            await asyncio.wait([self._errors])
        finally:  # its pipes too, where the loop closes next
            _close_pipes(self._process)

    async def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # `events` says why it is gone
            self._process.stdin.write(line)
            await self._process.stdin.drain()
