"""transformers draws progress bars on stderr; ours is the screen that reports progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Turn transformers' progress bars off for a while."""
    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()
