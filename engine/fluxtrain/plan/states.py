"""How AdamW's two moments and frozen weights are kept, and what moments take. Pure arithmetic."""

from __future__ import annotations

from typing import Literal

StateFormat = Literal["fp32", "bf16", "8bit"]
MomentFormat = Literal["fp32", "bf16", "8bit", "4bit"]  # with those of other packages
STATE_FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "8bit")

PackedFormat = Literal["nf4", "nf4-double", "int8"]  # of frozen weights (quantization/layout.py)
StorageFormat = Literal["plain", "nf4", "nf4-double", "int8"]  # plain: in the parameters' dtypes
PACKED_FORMATS: tuple[PackedFormat, ...] = ("nf4", "nf4-double", "int8")
LEAST_PACKED = 65536  # elements: smaller frozen weights stay in their dtype

STATE_BLOCK = 256  # elements of 8-bit states that share one scale
# Parameters with fewer elements keep fp32 states in every format: norms and biases are a
# thousandth of a model and train badly in 8 bits (bitsandbytes' min_8bit_size).
LEAST_LOW_BIT = 4096
_SCALE_BYTES = 4
_BLOCK_4BIT = 128  # elements of torchao's 4-bit states that share one scale

OptimizerName = Literal["adamw", "bnb-adamw-8bit", "bnb-paged-adamw-8bit", "torchao-adamw-4bit"]

# How other packages keep their moments. They update the weights as they are, without masters.
THIRD_PARTY_FORMATS: dict[str, MomentFormat] = {
    "bnb-adamw-8bit": "8bit",
    "bnb-paged-adamw-8bit": "8bit",
    "torchao-adamw-4bit": "4bit",
}


def moment_bytes(states: MomentFormat, elements: int) -> int:
    """Count the bytes of both moments of `elements` elements."""
    if states == "4bit":
        return elements + 2 * _SCALE_BYTES * -(-elements // _BLOCK_4BIT)
    if states == "8bit":
        return 2 * (elements + _SCALE_BYTES * -(-elements // STATE_BLOCK))
    return elements * (4 if states == "bf16" else 8)
