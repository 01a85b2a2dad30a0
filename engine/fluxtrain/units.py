"""Formats bytes, rates and durations for people, as short text with a unit. Needs no package."""

from __future__ import annotations

import math
from collections.abc import Iterable

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

UNKNOWN = "-"


def bytes_text(count: float | None) -> str:
    """Write a binary size with three significant digits: 512 B, 1.50 KiB, 21.1 GiB; "-" when
    unknown."""
    if count is None or not math.isfinite(count):
        return UNKNOWN
    return _in_units(count, (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)), " B")


def rate_text(bytes_per_s: float | None) -> str:
    """Write a decimal transfer rate, as drives and buses are rated: 21.4 GB/s, 350 MB/s."""
    if bytes_per_s is None or not math.isfinite(bytes_per_s):
        return UNKNOWN
    return _in_units(bytes_per_s, (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)), " B/s")


def count_text(count: float | None) -> str:
    """Write a count of parameters or tokens: 812, 4.21 M, 1.54 B."""
    if count is None or not math.isfinite(count):
        return UNKNOWN
    return _in_units(count, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)))


def _in_units(value: float, units: Iterable[tuple[str, float]], one: str = "") -> str:
    """Write a number in the first unit that it fills, or as it is with the unit `one`."""
    for unit, scale in units:
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value:.0f}{one}"


def loss_text(loss: float | None) -> str:
    """Write a loss, everywhere with the same four decimals; a large one with five digits."""
    if loss is None:
        return UNKNOWN
    if not math.isfinite(loss):
        return str(loss)
    return f"{loss:.4f}" if abs(loss) < 999.99995 else f"{loss:.5g}"


def number_text(value: float | None, digits: int = 4) -> str:
    """Write a number with `digits` significant digits; "-" when unknown."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    return (
        f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else _fixed(value, digits)
    )


def _fixed(value: float, digits: int) -> str:
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


def power_text(value: float | None) -> str:
    """Return a small number in the notation of learning rates: 3.00e-4."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(power)}" if value else "0"


def speed_text(gain: float | None) -> str:
    """Write a change's effect on a step's time, of which `gain` is the saved share: faster by
    6.0%, slower by 3.0%."""
    if gain is None or not math.isfinite(gain * 100):
        return UNKNOWN
    told = f"{abs(gain):.1%}"
    if told == "0.0%":
        return "as fast as before"
    return f"{'faster' if gain > 0 else 'slower'} by {told}"


def duration_text(seconds: float | None) -> str:
    """Write a duration with two units at most: 350 ms, 5.90 s, 2m 06s, 7h 44m, 3d 02h."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
    if seconds < 59.995:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


# How far the time that a block's timing or nothing but rates of the machine tells may be off.
_RANGES = {"disturbed": (0.2, 1.5), "assumed": (0.5, 10.0)}


def predicted_text(seconds: float | None, timing: str) -> str:
    """Write a predicted duration as precisely as it is known: "about 17 s" where a block was timed
    (`timing` is `measured`), "8 s to 3 min" among other programs (`disturbed`) or without a timing
    (`assumed`)."""
    if seconds is None or timing not in _RANGES:
        return UNKNOWN if seconds is None else f"about {rough_text(seconds, 2)}"
    low, high = (rough_text(seconds * factor, 1) for factor in _RANGES[timing])
    return f"{low} to {high}"


def rough_text(seconds: float | None, digits: int) -> str:
    """Write a duration in one unit and so many digits: 20 ms, 9.4 s, 2.8 min."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    units = (("ms", 1e-3, 1.0), ("s", 1.0, 90.0), ("min", 60.0, 5400.0), ("h", 3600.0, 129600.0))
    name, size = next(((name, size) for name, size, end in units if seconds < end), ("d", 86400.0))
    value = float(f"{seconds / size:.{digits}g}")
    return f"{value:,.0f} {name}" if value >= 10 else f"{value:g} {name}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
