"""Silences transformers, which writes reports and progress bars to stderr, over our own output."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Turn peft's and transformers' warnings off for a while."""
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn transformers' progress bars and warnings off for a while; errors still show."""
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
