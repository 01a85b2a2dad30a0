"""The benchmark of what arithmetic allows: processes that start together, in their own memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import in_cache


def test_every_process_gives_a_plausible_rate() -> None:
    found = in_cache.rates(2, seconds=0.1)
    assert set(found) == set(in_cache.KINDS)
    assert all(1e6 < per_s < 1e12 for per_s in found.values())


def test_a_process_that_comes_too_late_says_so() -> None:
    with pytest.raises(SystemExit, match="s too late: the machine is busy"):
        in_cache.measured(time.time() - 1.0, 0.1)
