"""Calls the host kernels of `native/` with plain addresses. ctypes releases the GIL meanwhile.

Nothing is loaded at import: the library is found and checked when the first kernel is called.
"""

from __future__ import annotations

from fluxtrain._native.args import (
    AdamWArgs,
    AdamWStep,
    DenseFormat,
    GradientFormat,
    PackedFormat,
    PackingArgs,
    Pass,
    RoundingArgs,
    StateFormat,
    WeightFormat,
)
from fluxtrain._native.library import (
    ISA_NAMES,
    ISA_VARIABLE,
    adamw,
    end_threads,
    isa,
    kernel,
    library_path,
    pack,
    refuse_unknown_isa,
    set_isa,
    unpack,
)

__all__ = [
    "ISA_NAMES",
    "ISA_VARIABLE",
    "AdamWArgs",
    "AdamWStep",
    "DenseFormat",
    "GradientFormat",
    "PackedFormat",
    "PackingArgs",
    "Pass",
    "RoundingArgs",
    "StateFormat",
    "WeightFormat",
    "adamw",
    "end_threads",
    "isa",
    "kernel",
    "library_path",
    "pack",
    "refuse_unknown_isa",
    "set_isa",
    "unpack",
]
