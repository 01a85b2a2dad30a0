"""Questions to the engine, asked in a subprocess so that torch never loads into the app."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from fluxtrain.errors import EXIT_BUG, FluxTrainError


class EngineRefused(FluxTrainError):
    """The engine answered with an error; the message is its own last line."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def ask_engine(*arguments: str, program: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run `fluxtrain ARGUMENTS` and return the JSON object it prints.

    Cancelling the task ends the process. `program` replaces the engine in tests.

    Raises:
        EngineRefused: the process failed, or printed something else than a JSON object.
    """
    command = program or (sys.executable, "-m", "fluxtrain")
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()  # to the end of its pipes, so that nothing is left open
        raise
    if process.returncode:
        raise EngineRefused(last_words(errors, process.returncode), process.returncode)
    try:
        answer = json.loads(output)
    except ValueError:
        raise EngineRefused("the engine's answer is not JSON", EXIT_BUG) from None
    if not isinstance(answer, dict):
        raise EngineRefused("the engine's answer is not a JSON object", EXIT_BUG)
    return answer


def last_words(errors: bytes, exit_code: int) -> str:
    """The line that says why a process failed: its own error line, else the last one."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return f"the engine ended with exit code {exit_code} and said nothing"
    told = [line for line in lines if line.startswith(("error:", "this is a bug"))]
    return (told or lines)[-1].removeprefix("error:").strip()
