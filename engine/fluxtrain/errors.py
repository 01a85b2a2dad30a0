"""Errors that a user can cause or must act on, each with the process exit code it leads to.

Every message names the numbers and the cure. Any other exception is a bug of FluxTrain and ends
with exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Self

EXIT_FINISHED = 0
EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_DOES_NOT_FIT = 3
EXIT_DIVERGED = 4
EXIT_NO_SPACE = 5
EXIT_DISAGREES = 6
EXIT_DEVICE_FAILED = 7
EXIT_READ_FAILED = 8
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
LONGEST_WORD = 500  # characters of a message without a space between them
LONGEST_MESSAGE = 4000
_FATAL = "Fatal Python error: "


def brief(text: str, limit: int = 300) -> str:
    """Return a text as messages quote it: of a long one its beginning and its end."""
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def readable(message: str) -> str:
    """Return a message whose words end somewhere: names of files and values in it may be as long as
    a forged file makes them."""
    words = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: brief(word[0], 300), message)
    return brief(words, LONGEST_MESSAGE)


class FluxTrainError(Exception):
    """Base of all errors that carry a message for the user; `exit_code` is the process's."""

    exit_code: int = EXIT_BUG

    def __str__(self) -> str:
        """Return the message, with the two ends of what is too long to read."""
        return readable(super().__str__())


class BadInput(FluxTrainError, ValueError):
    """A configuration, a model folder, a data file or an argument is not usable as it is."""

    exit_code = EXIT_BAD_INPUT


class TooNew(BadInput):
    """A file is in a format of a later FluxTrain (docs/formats.md)."""

    @classmethod
    def of(cls, what: str, found: str, reads: str, written_by: str) -> Self:
        """Return the error of a file. what: names it; found: its format; reads: the newest that is
        read; written_by: the version of FluxTrain that wrote it, empty where it does not say."""
        by = f"FluxTrain {written_by}" if written_by else "a later FluxTrain"
        cure = f"'fluxtrain>={written_by}'" if written_by else "-U fluxtrain"
        return cls(
            f"{what} was written by {by} in format {found}, and this one reads {reads} at most: "
            f"update it with `pip install {cure}`"
        )


class Busy(BadInput):
    """What is asked for is in use now; the same may be done later."""


class UnsupportedModel(BadInput):
    """`wrap` cannot train this model correctly, and says why."""


class MisusedModel(BadInput, RuntimeError):
    """A wrapped model was used in a way that would give wrong gradients or weights."""


class DoesNotFit(FluxTrainError, MemoryError):
    """The model, batch or checkpoint needs more memory than there is."""

    exit_code = EXIT_DOES_NOT_FIT


class Diverged(FluxTrainError, ArithmeticError):
    """The loss or the gradient norm is not finite."""

    exit_code = EXIT_DIVERGED


class NoSpace(FluxTrainError, OSError):
    """The disk of the run directory is full or its quota is used up."""

    exit_code = EXIT_NO_SPACE


class ScratchLost(NoSpace):
    """The disk of optimizer states is full: room there later does not bring back what was to be
    written."""


class Disagrees(FluxTrainError):
    """An exported model does not compute what was trained."""

    exit_code = EXIT_DISAGREES


class DeviceFailed(FluxTrainError, RuntimeError):
    """A GPU or its driver failed while it was used."""

    exit_code = EXIT_DEVICE_FAILED


class RankLost(FluxTrainError, RuntimeError):
    """Another process of the run ended, so this one cannot go on."""

    exit_code = EXIT_DEVICE_FAILED


class ReadFailed(FluxTrainError, OSError):
    """A file that a run needs could not be read, or its scratch not be written, also after several
    attempts."""

    exit_code = EXIT_READ_FAILED


class Interrupted(FluxTrainError):
    """The run was stopped from outside; its checkpoint is written. 130 or 143."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, message: str, exit_code: int = EXIT_INTERRUPTED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __str__(self) -> str:
        """Return the message whole: it has the command that goes on, with a path that is there."""
        return str(self.args[0])


def system_error(error: BaseException, path: object = None) -> OSError | None:
    """Return what the system refused a library in Rust, which has the error's number in its words
    alone; None for another error. `path` names the file in question."""
    number = re.search(r"\(os error (\d{1,4})\)", str(error))
    if number is None or isinstance(error, OSError | FluxTrainError):
        return None
    filename = None if path is None else str(path)
    return OSError(int(number[1]), os.strerror(int(number[1])), filename)


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust panicked. `except Exception` does not catch it, and its
    class cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def panics_refused(what: str, cure: str) -> Iterator[None]:
    """Raise BadInput, which names `what` and the cure, where a library in Rust panics inside."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error) or "ThreadPool" in str(error):
            raise
        words = str(error).strip().splitlines()
        raise BadInput(f"{what} failed ({words[0] if words else 'no message'}): {cure}") from error


def native_end(lines: Iterable[str]) -> str | None:
    """Say how native code ended a process, by the last lines that it printed; None if it did not.

    Python's faulthandler writes `Fatal Python error: Aborted` and a trace when a signal comes.
    """
    for line in lines:
        if line.startswith(_FATAL):
            return (
                f"native code ended the process ({line.removeprefix(_FATAL).strip()}): most often "
                "the system refused it memory or a thread, a mapped file was cut off, or a file of "
                "the model's tokenizer is damaged; `--resume auto` goes on from the last checkpoint"
            )
    return None
