"""Numbers for people keep three digits, never jump a unit early, and never raise."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    predicted_text,
    rate_text,
)

WRITERS = (bytes_text, rate_text, count_text, duration_text)
SCALES = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_known_is_a_dash(write: object, value: float | None) -> None:
    assert callable(write)
    assert write(value) == "-"


@given(st.floats(min_value=0, max_value=1e16))
def test_a_size_reads_back_within_half_a_percent(count: float) -> None:
    number, unit = bytes_text(count).split(" ")
    assert float(number) * SCALES[unit] == pytest.approx(count, rel=0.0051, abs=0.51)


@given(st.floats(min_value=0, max_value=1e15), st.floats(min_value=0, max_value=1e15))
def test_a_longer_duration_never_reads_shorter(a: float, b: float) -> None:
    def seconds(text: str) -> float:
        scales = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}
        parts = re.findall(r"([\d.]+) ?(us|ms|s|m|h|d)\b", text)
        return sum(float(number) * scales[unit] for number, unit in parts)

    low, high = sorted((a, b))
    assert seconds(duration_text(low)) <= seconds(duration_text(high)) * (1 + 1e-12)


def test_the_documented_examples_hold() -> None:
    assert bytes_text(512) == "512 B"
    assert bytes_text(1536) == "1.50 KiB"
    assert bytes_text(21.1 * GIB) == "21.1 GiB"
    assert bytes_text(1024 * 1024 - 1) == "1.00 MiB", "1024 KiB is a MiB once rounded"
    assert rate_text(21.4e9) == "21.4 GB/s"
    assert rate_text(350e6) == "350 MB/s"
    assert count_text(812) == "812"
    assert count_text(4.21e6) == "4.21 M"
    assert duration_text(0.35) == "350 ms"
    assert duration_text(5.9) == "5.90 s"
    assert duration_text(126) == "2m 06s"
    assert duration_text(7 * 3600 + 44 * 60) == "7h 44m"
    assert duration_text(3 * 86400 + 2 * 3600) == "3d 02h"


def test_a_predicted_duration_has_the_digits_that_it_deserves() -> None:
    assert predicted_text(17.04, "measured") == "about 17 s"
    assert predicted_text(170.0, "measured") == "about 2.8 min"
    assert predicted_text(17.04, "assumed") == "9 s to 3 min"
    assert predicted_text(0.283, "disturbed") == "60 ms to 400 ms"
    assert predicted_text(3e6, "measured") == "about 35 d"
    assert predicted_text(None, "assumed") == UNKNOWN
