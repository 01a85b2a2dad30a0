"""Writes engine.log: everything the run prints, its warnings and its tracebacks, in one file."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from fluxtrain.files.atomic import storage_error
from fluxtrain.files.folders import leads_to
from fluxtrain.files.opening import open_to_write

_OWN = "fluxtrain.run"  # lines of the run itself; not passed to `tell`
_OTHERS = ("fluxtrain", "py.warnings", "transformers", "torch")


class RunLog:
    """Appends to engine.log, also Python's warnings and log records of this process.

    If the app started the trainer, standard output is engine.log already; then printed lines are
    not written a second time.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = open(  # noqa: SIM115 - `close` does
                path, "a", encoding="utf-8", errors="backslashreplace", opener=open_to_write
            )
        except OSError as error:
            raise storage_error(path, error) from error
        self._handler = logging.StreamHandler(self._file)
        self.path = path
        self.is_standard_output = leads_to(path, 1)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._handler.handleError = self._lost  # type: ignore[method-assign, assignment]
        self._teller: logging.Handler | None = None
        self._logger = logging.getLogger(_OWN)
        own = (self._logger, logging.getLogger("fluxtrain"))
        self._before = [(logger, logger.level, logger.propagate) for logger in own]
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        for name in (_OWN, *_OTHERS):
            logging.getLogger(name).addHandler(self._handler)
        shows = warnings.showwarning
        logging.captureWarnings(True)
        self._captures = warnings.showwarning is not shows  # else the program did so itself
        self._told_crashes = faulthandler.is_enabled()
        faulthandler.enable(self._file)  # a crash in native code leaves its place here

    def tell(self, warn: Callable[[str], None]) -> None:
        """Pass the engine's own warnings on to `warn` as well."""
        self._teller = _Teller(warn)
        logging.getLogger("fluxtrain").addHandler(self._teller)
        logging.getLogger("fluxtrain").propagate = False

    def printed(self, text: str) -> None:
        """Write a line that was printed."""
        if not self.is_standard_output:
            self._logger.info("%s", text)

    def traceback(self, error: BaseException) -> None:
        """Write the whole traceback of an exception."""
        self._logger.error("%s", error, exc_info=error)

    def close(self) -> None:
        """Stop collecting, and leave logging and warnings as they were."""
        if self._captures:
            logging.captureWarnings(False)
        for name in (_OWN, *_OTHERS):
            logging.getLogger(name).removeHandler(self._handler)
        if self._teller is not None:
            logging.getLogger("fluxtrain").removeHandler(self._teller)
        for logger, level, propagate in self._before:
            logger.setLevel(level)
            logger.propagate = propagate
        if self._told_crashes and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        else:
            faulthandler.disable()
        with contextlib.suppress(OSError):  # a full disk, which raises its own error elsewhere
            self._handler.close()
            self._file.close()

    @staticmethod
    def _lost(_record: logging.LogRecord) -> None:
        """Ignore a failed write: a log line must not end a run; the journal reports the disk."""


class _Teller(logging.Handler):
    """Passes warnings to a function."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(record.getMessage())
