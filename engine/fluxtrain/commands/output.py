"""Output of the `fluxtrain` command: answers to standard output, the rest to standard error."""

from __future__ import annotations

import json as json_module
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import typer

from fluxtrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    Interrupted,
    NoSpace,
    readable,
)
from fluxtrain.machine.failures import as_told  # here: where memory ran out nothing is imported

T = TypeVar("T")
TRACKER_THREADS = "tracker-"  # how their names begin


def hush_libraries() -> None:
    """Keep advice on other set-ups, which libraries log where they are imported, from the
    terminal: bitsandbytes' and that of liger's backends for other hardware."""
    for name in ("bitsandbytes", "liger_kernel"):
        logging.getLogger(name).setLevel(logging.ERROR)


def tell(error: BaseException, *, debug: bool) -> int:
    """Print an error in one line, its traceback only with --debug; return the exit code."""
    if isinstance(error, typer.Exit) and error.exit_code != EXIT_INTERRUPTED:
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt | typer.Abort | typer.Exit):  # typer raises Exit(130)
        complain("interrupted before anything was started")
        return EXIT_INTERRUPTED
    if (usage := _usage_message(error)) is not None:
        complain(usage if usage.startswith("Usage:") else readable(_one_line(usage)))
        return EXIT_BAD_INPUT
    if debug:
        complain("".join(traceback.format_exception(error)).rstrip())
    told = as_told(error)
    if told is not None:
        kind = "stopped" if isinstance(told, Interrupted) else "error"
        words = str(told)
        complain(_one_line(words if words.startswith(f"{kind} ") else f"{kind}: {words}"))
        return told.exit_code
    if (wrong := wrong_package(error)) is not None:
        complain(readable(_one_line(f"error: {wrong}")))
        return EXIT_BAD_INPUT
    words = f"this is a bug of FluxTrain: {type(error).__name__}: {error}"
    complain(readable(_one_line(words)))
    for note in getattr(error, "__notes__", ["run it again with --debug for the traceback"]):
        complain(note)
    return EXIT_BUG


def wrong_package(error: BaseException) -> str | None:
    """Say which package that FluxTrain needs is missing, broken or too old here; None where all are
    as they were installed with it, or `error` is none that another version leads to."""
    from importlib import metadata

    if not isinstance(error, ImportError | AttributeError | TypeError):
        return None

    failed = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    try:
        from packaging.requirements import Requirement

        every = [Requirement(text) for text in metadata.requires("fluxtrain") or ()]
    except ImportError:  # the sources alone, without their packages
        return None
    for wanted in every:
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found = ""
        broken = failed == wanted.name
        if found and wanted.specifier.contains(found, prereleases=True) and not broken:
            continue
        here = f"{wanted.name} {found}" if found else f"no {wanted.name}"
        why = f" ({error})" if broken else ""
        again = "--force-reinstall " if broken and found else ""
        return (
            f"{here} is installed{why}, and FluxTrain needs {wanted.name}{wanted.specifier}: "
            f"`pip install {again}'{wanted.name}{wanted.specifier}'`; docs/installing.md says which"
        )
    return None


def leave(code: int) -> NoReturn:
    """End the process. Where a tracker hangs, its library's own last words are not waited for:
    they would wait for it, too."""
    sys.stdout.flush()
    hung = any(thread.name.startswith(TRACKER_THREADS) for thread in threading.enumerate())
    if hung:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _one_line(text: str) -> str:
    """Return `text` without line ends and terminal codes, which names of files may hold."""
    joined = " ".join(text.split("\n"))
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


def _usage_message(error: BaseException) -> str | None:
    """Return the message of typer's parser, whose exception classes are private."""
    write = getattr(error, "format_message", None)
    if write is None:
        return None
    message = str(write())
    if message.startswith("Usage:"):  # no command was named
        return message
    context = getattr(error, "ctx", None)
    names: list[str] = []
    while (parent := getattr(context, "parent", None)) is not None:
        names.insert(0, str(getattr(context, "info_name", "")))
        context = parent
    named = " ".join(["fluxtrain", *names])
    return f"error: {message} (see `{named} --help`)" if message else ""


def print_json(value: Any) -> None:
    """Print JSON to standard output for programs; an answer of `events.answers` as its fields."""
    import msgspec

    say(json_module.dumps(msgspec.to_builtins(value), indent=2))


def answer(found: T, page: Callable[[T], str], *, json: bool) -> None:
    """Print what a command found: as JSON for programs, else as a page for people."""
    if json:
        print_json(found)
    else:
        say(page(found))


def say(text: str) -> None:
    """Print to standard output without terminal codes, which data and names of files may hold.

    A reader that left (a pager) is no error. Raises NoSpace.
    """
    from fluxtrain.events.printable import printable_lines

    try:
        print(printable_lines(text), flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the exit
        if not isinstance(error, BrokenPipeError):
            raise NoSpace(
                f"standard output cannot be written ({error.strerror}): send it to another disk"
            ) from error


def silent(_: str) -> None:
    """Drop progress, because programs read one JSON value."""


def complain(text: str) -> None:
    """Print to standard error, without terminal codes, which arguments and names of files may hold;
    nothing for an empty text."""
    if text:
        harmless = "\n".join(map(_one_line, text.split("\n")))
        print(harmless, file=sys.stderr, flush=True)
