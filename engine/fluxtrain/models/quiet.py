"""Silences transformers and diffusers, which write reports and bars to stderr, over our output."""

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


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Turn the progress bars and warnings of diffusers and transformers off for a while. Raises
    ImportError where diffusers is not installed."""
    with quiet_transformers():
        from diffusers.utils import logging as of_diffusers

        level = of_diffusers.get_verbosity()
        of_diffusers.set_verbosity_error()
        of_diffusers.disable_progress_bar()
        try:
            yield
        finally:
            of_diffusers.set_verbosity(level)
            of_diffusers.enable_progress_bar()
