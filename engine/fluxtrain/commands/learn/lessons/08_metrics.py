"""Task 8: metrics from a journal."""

import json
from pathlib import Path


def exposition(journal: Path, job: str) -> str:
    """Return the newest step's loss, tokens and stalls in Prometheus' text format."""
    raise NotImplementedError
