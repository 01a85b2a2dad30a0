"""Programs in processes of their own, without the seconds that importing torch takes.

They are forked, before any thread was started, from one process that has imported it. What a
program does before it imports torch, or reads from the environment while it does, needs a process
that starts anew: `subprocess`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.engine.imported_before"])
_AT_FIRST = dict(os.environ)
LIMIT_S = 240.0  # for what never ends; a slow machine is no failure


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let a run time its blocks with few steps and show four tokens of what its model makes.

    Calibration is repeated where other programs disturbed it, as the test workers do each other,
    and few tests look at the results.
    """
    from fluxtrain.models.generation import sample_text

    patch.setattr("fluxtrain.measure.measured_constants.is_calm_after", lambda _: False)
    patch.setattr("fluxtrain.measure.calibrate.MOST_REPEATS", 1)
    patch.setattr("fluxtrain.measure.block_timing.STEPS", 1)
    patch.setattr("fluxtrain.train.run.sample_text", partial(sample_text, max_new_tokens=4))


def start(program: Callable[..., Any], *arguments: Any) -> ForkServerProcess:
    """`program(*arguments)`, a function of a module, in a process of its own."""
    process = _PROCESSES.Process(target=_begun, args=(dict(os.environ), program, *arguments))
    with _environment_of_no_test():
        process.start()  # the first one starts the server, which keeps its environment
    return process


@contextlib.contextmanager
def running(program: Callable[..., Any], *arguments: Any) -> Iterator[ForkServerProcess]:
    """As `start`; killed where it has not ended by itself."""
    process = start(program, *arguments)
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join()


Meanwhile = Callable[[ForkServerProcess], None]


def exit_code(
    program: Callable[..., Any],
    *arguments: Any,
    limit_s: float = LIMIT_S,
    meanwhile: Meanwhile | None = None,
) -> int:
    """Of a process that runs `program(*arguments)`; what `meanwhile` does with it comes first."""
    with running(program, *arguments) as process:
        if meanwhile is not None:
            meanwhile(process)
        process.join(limit_s)
        assert process.exitcode is not None, "it did not end in time"
        return process.exitcode


def python(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    limit_s: float = LIMIT_S,
    meanwhile: Meanwhile | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python -c CODE ...` or `python -m MODULE ...`, with what it wrote.

    environment: what is set beside that of the tests. folder: where it runs. meanwhile: called with
    the process that was started.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("out", "err")]
        here = str(folder or Path.cwd())
        begun = (words, environment or {}, here, files)
        code = exit_code(_python, *begun, limit_s=limit_s, meanwhile=meanwhile)
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return subprocess.CompletedProcess(words, code, out, err)


@contextlib.contextmanager
def _environment_of_no_test() -> Iterator[None]:
    before = dict(os.environ)
    try:
        _set_environment(_AT_FIRST)
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(wanted)


def _begun(environment: Mapping[str, str], program: Callable[..., Any], *arguments: Any) -> None:
    _set_environment(environment)
    tempfile.tempdir = None
    shorten(pytest.MonkeyPatch())
    program(*arguments)


def _python(
    words: list[str], environment: Mapping[str, str], folder: str, files: list[Path]
) -> None:
    for number, file in zip((1, 2), files, strict=True):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(environment)
    os.chdir(folder)
    how, what, *rest = words
    if how == "-c":
        sys.argv = ["-c", *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        assert how == "-m", how
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
