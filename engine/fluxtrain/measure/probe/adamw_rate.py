"""Measures how many parameters a second the native AdamW updates, with all threads. No torch."""

from __future__ import annotations

import ctypes

from fluxtrain import _native
from fluxtrain.events.answers.machine import Rate
from fluxtrain.machine.fresh_memory import fresh
from fluxtrain.measure.probe.rate import TOO_LITTLE, best_rate, sustained_rate

PARAMETERS = 128 << 20  # 1.75 GiB: server processors have caches of half a gigabyte
LEAST_PARAMETERS = 1 << 20
_BYTES = {
    "hi": 2.0,
    "lo": 2.0,
    "m": 4.0,
    "v": 4.0,
    "grad": 2.0,
}  # a parameter's bytes, split master
_SCALE_BYTES = 4 / 256  # one fp32 for each block of 8-bit states
_BYTES_8BIT = {
    "hi": 2.0, "lo": 2.0, "grad": 2.0,
    "m": 1.0, "v": 1.0, "m_scale": _SCALE_BYTES, "v_scale": _SCALE_BYTES,
}  # fmt: skip
PARAMETER_BYTES = int(sum(_BYTES.values()))
_CUT = 1 << 15  # parameters: each part begins on a page


def adamw_rate(
    available_bytes: int | None = None,
    *,
    parameters: int = PARAMETERS,
    limit_s: float = 1.5,
    threads: int | None = None,
    eight_bit: bool = False,
    sustained: bool = False,
) -> Rate:
    """Measure parameters a second of an update in bf16 with fp32 masters: 14 bytes kept, 26 moved
    for each; `eight_bit` with 8-bit states: 8 and 14.

    Takes an eighth of `available_bytes` at most. threads None: all of OpenMP's. `sustained`: the
    rate of all calls together, not of the fastest, which a large cache can serve in part. Raises
    FluxTrainError without the native library.
    """
    if available_bytes is not None:
        parameters = min(parameters, available_bytes // 8 // PARAMETER_BYTES)
    parameters -= parameters % _CUT
    if parameters < LEAST_PARAMETERS:
        return TOO_LITTLE
    sizes = _BYTES_8BIT if eight_bit else _BYTES
    with fresh(int(parameters * sum(sizes.values()))) as memory:
        start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(memory))
        try:
            _native.kernel("zero")(start, len(memory), threads or 0)  # else all pages would be one
            at, offset = {}, 0
            for name, size in sizes.items():
                at[name] = start + offset
                offset += int(size * parameters)
            args = _args(at, parameters, eight_bit=eight_bit, threads=threads or 0)
            rate = (sustained_rate if sustained else best_rate)(
                parameters,
                lambda: _native.adamw(args),
                repeats=20 if sustained else 5,
                limit_s=limit_s,
            )
        finally:
            del anchor  # it keeps the mapping open
    return Rate(rate, f"{parameters >> 20} M parameters, {_native.isa()}")


def _args(
    at: dict[str, int], parameters: int, *, eight_bit: bool, threads: int
) -> _native.AdamWArgs:
    """Describe one call on arrays at the addresses `at`."""
    return _native.AdamWArgs(
        weight_format=_native.WeightFormat.SPLIT_BF16,
        state_format=_native.StateFormat.EIGHT_BIT if eight_bit else _native.StateFormat.F32,
        gradient_format=_native.GradientFormat.BF16,
        pass_=_native.Pass.UPDATE,
        threads=threads,
        n=parameters,
        weights=at["hi"],
        lo=at["lo"],
        m=at["m"],
        v=at["v"],
        m_scale=at.get("m_scale"),
        v_scale=at.get("v_scale"),
        gradient=at["grad"],
        # neither the values nor the coefficients change the time
        step=_native.AdamWStep(1.0, 1.0, 0.9, 0.1, 0.999, 0.001, 1e-4, 1.0, 1e-8),
    )
