"""How AdamW's two moments are kept, and what that takes. Pure arithmetic."""

from __future__ import annotations

from typing import Literal

StateFormat = Literal["fp32", "bf16", "8bit"]
STATE_FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "8bit")

STATE_BLOCK = 256  # elements of 8-bit states that share one scale
# Parameters with fewer elements keep fp32 states in every format: norms and biases are a
# thousandth of a model and train badly in 8 bits (bitsandbytes' min_8bit_size).
LEAST_NARROW = 4096
_SCALE_BYTES = 4


def moment_bytes(states: StateFormat, elements: int) -> int:
    """Both moments of so many elements."""
    if states == "8bit":
        return 2 * (elements + _SCALE_BYTES * -(-elements // STATE_BLOCK))
    return elements * (4 if states == "bf16" else 8)
