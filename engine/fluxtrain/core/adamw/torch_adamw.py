"""AdamW by the oracle's torch operations, in place, on any device."""

from __future__ import annotations

from torch import Tensor

from fluxtrain._native import Pass
from fluxtrain.core.adamw import reference
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Coefficients
from fluxtrain.core.adamw.reference import decode, encode

SLICE_ELEMENTS = 1 << 20  # a multiple of the block; the oracle takes some 100 bytes for each


def step_by_torch_(
    flat: Flat,
    update: AdamWUpdate,
    *,
    part: Pass = Pass.UPDATE,
    slice_elements: int = SLICE_ELEMENTS,
) -> None:
    """Take the step, ignoring `clip`, `slice_elements` at a time to bound temporary memory."""
    c, n = update.coefficients(), flat.weights.numel()
    for start in range(0, n, slice_elements):
        _step_slice_(flat.cut(start, min(start + slice_elements, n)), c, part)


def _step_slice_(flat: Flat, c: Coefficients, part: Pass) -> None:
    master = flat.weights if flat.lo is None else decode(flat.weights, flat.lo)
    old = (flat.m, flat.v, flat.gradient)
    if part == Pass.MOMENTS:
        _store_moments(flat, *reference.adamw_moments(*old, c))
    elif part == Pass.WEIGHTS:
        _store_weights(flat, reference.adamw_weights(master, *old, c))
    elif flat.state_format == "8bit":
        master, states = reference.adamw8(master, flat.states8, flat.gradient, c)
        _store_weights(flat, master)
        for to, value in zip(flat.states8, states, strict=True):
            to.copy_(value)
    elif flat.state_format == "bf16":
        assert flat.rounding is not None
        master, m, v = reference.adamw16(master, *old, c, flat.rounding)
        _store_weights(flat, master)
        _store_moments(flat, m, v)
    else:
        master, m, v = reference.adamw(master, *old, c)
        _store_weights(flat, master)
        _store_moments(flat, m, v)


def _store_weights(flat: Flat, master: Tensor) -> None:
    if flat.lo is None:
        flat.weights.copy_(master)
        return
    hi, lo = encode(master)
    flat.weights.copy_(hi)
    flat.lo.copy_(lo)


def _store_moments(flat: Flat, m: Tensor, v: Tensor) -> None:
    flat.m.copy_(m)
    flat.v.copy_(v)
