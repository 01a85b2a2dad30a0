"""This machine in a few words, read from `fluxtrain probe --json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def machine_lines(probe: Mapping[str, Any]) -> list[str]:
    """One fact a line, the most telling first; what was not measured is left out."""
    return [str(line) for line in probe.get("lines", ())]
