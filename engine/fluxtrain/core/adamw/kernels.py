"""One AdamW step of a flat range, for all formats, on host or device; zeros on the host.

All backends give the same bits: those of the oracle (`reference`). The native kernels work in place
and without the GIL; no result depends on the number of threads or on the instruction set. threads
None: all of OpenMP.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain._native import GradientFormat, Pass, StateFormat, WeightFormat
from fluxtrain.core.adamw import dynamic_map, reference, triton_adamw
from fluxtrain.core.adamw.dynamic_map import BLOCK
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Coefficients
from fluxtrain.core.adamw.reference import decode, encode
from fluxtrain.core.ranks.cores import share_of_rank
from fluxtrain.machine.cgroup import quota_cores

Backend = Literal["native", "torch", "triton"]

_SLICE_ELEMENTS = 1 << 18  # a multiple of STATE_BLOCK; so many fp32 gradients stay in the caches
_TORCH_SLICE = 1 << 20  # a multiple of STATE_BLOCK; the oracle takes some 100 bytes for each
FEW_CORES = 4  # with fewer cores all are for the update
_QUANTISED_ELEMENTS = 1 << 20  # at a time on a device; a multiple of the block
_STATES = {
    "fp32": StateFormat.F32,
    "bf16": StateFormat.BF16,
    "8bit": StateFormat.EIGHT_BIT,
}
_GRADIENTS = {torch.float32: GradientFormat.F32, torch.bfloat16: GradientFormat.BF16}


def step_(
    flat: Flat,
    update: AdamWUpdate,
    *,
    part: Pass = Pass.UPDATE,
    backend: Backend | None = None,
    threads: int | None = None,
) -> None:
    """Take one AdamW step in place.

    part: `Pass.WEIGHTS` writes the weights alone, `Pass.MOMENTS` afterwards m and v alone, with the
    same gradient; after both every bit is that of `Pass.UPDATE`. Only where `Flat.has_two_passes`.
    backend None: the native kernels on the host, on a GPU Triton, or torch without Triton.
    threads: of the native kernels; None: all.
    """
    flat.check()
    assert part == Pass.UPDATE or flat.has_two_passes
    backend = backend or backend_for(flat)
    if backend != "triton" and update.clip is not None:
        if not bool(torch.isfinite(update.clip)):
            return
        update = replace(update, scale=float(update.clip) * update.scale, clip=None)
    if flat.master is not None:
        _step_masters_(flat, update, backend, threads)
    else:
        _step_(flat, update, part, backend, threads)


def backend_for(flat: Flat) -> Backend:
    """Choose the backend by the tensors' device."""
    if flat.weights.device.type == "cpu":
        return "native"
    return "triton" if flat.weights.is_cuda and triton_adamw.is_available() else "torch"


def _step_(
    flat: Flat, update: AdamWUpdate, part: Pass, backend: Backend, threads: int | None
) -> None:
    if backend == "native":
        _step_natively_(flat, update, part, threads)
    elif backend == "torch":
        step_by_torch_(flat, update, part=part)
    else:
        assert part == Pass.UPDATE, "the Triton kernels update weights and moments in one pass"
        triton_adamw.step_by_triton_(flat, update)


def _step_masters_(flat: Flat, update: AdamWUpdate, backend: Backend, threads: int | None) -> None:
    """Update the fp32 masters of fp16 weights and round them into the weights: on the host slice by
    slice, because the native kernels take fp32 gradients."""
    assert flat.master is not None
    if flat.weights.device.type != "cpu":
        _step_(flat.of_masters(flat.gradient), update, Pass.UPDATE, backend, threads)
        flat.weights.copy_(flat.master)  # after a skipped step the weights stay the same
        return
    n = flat.weights.numel()
    wide = torch.empty(min(n, _SLICE_ELEMENTS), dtype=torch.float32)
    for start in range(0, n, _SLICE_ELEMENTS):
        some = flat.cut(start, min(start + _SLICE_ELEMENTS, n))
        gradient = some.gradient
        if gradient.dtype is not torch.float32:
            gradient = wide[: gradient.numel()].copy_(gradient)
        masters = some.of_masters(gradient)
        _step_(masters, update, Pass.UPDATE, backend, threads)
        some.weights.copy_(masters.weights)


def _step_natively_(flat: Flat, update: AdamWUpdate, part: Pass, threads: int | None) -> None:
    assert flat.weights.device.type == "cpu"
    rounding = flat.rounding or (0, 0, 0)
    _native.adamw(
        _native.AdamWArgs(
            weight_format=WeightFormat.F32 if flat.lo is None else WeightFormat.SPLIT_BF16,
            state_format=_STATES[flat.state_format],
            gradient_format=_GRADIENTS[flat.gradient.dtype],
            pass_=part,
            threads=threads or 0,
            n=flat.weights.numel(),
            weights=flat.weights.data_ptr(),
            lo=_address(flat.lo),
            m=flat.m.data_ptr(),
            v=flat.v.data_ptr(),
            m_scale=_address(flat.m_scale),
            v_scale=_address(flat.v_scale),
            gradient=flat.gradient.data_ptr(),
            rounding=_native.RoundingArgs(*rounding),
            step=_native.AdamWStep(*update.coefficients()),
        )
    )


def _address(flat: Tensor | None) -> int | None:
    return None if flat is None else flat.data_ptr()


def step_by_torch_(
    flat: Flat,
    update: AdamWUpdate,
    *,
    part: Pass = Pass.UPDATE,
    slice_elements: int = _TORCH_SLICE,
) -> None:
    """Take the step by the oracle on any device, ignoring `clip`, `slice_elements` at a time to
    bound temporary memory."""
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


def update_threads(computation: torch.device) -> int | None:
    """Choose how many threads update on the host. With a GPU an eighth of the cores, or one, is
    left to the threads that queue its work; else these would wait for a core, and the update for
    the core that they took from it. Under a CPU quota no more threads than it keeps running:
    more run for a part of each period and then stand still together. None: all of OpenMP's."""
    quota, cores = quota_cores(), torch.get_num_threads()
    if cores == 1 and (share := share_of_rank(os.environ)) > 1:  # torchrun sets one thread
        quota, cores = share, share + 1
    threads = quota if quota is not None and quota < cores else None
    cores = cores if threads is None else threads
    return threads if computation.type == "cpu" else threads_beside_gpu(cores, threads)


def threads_beside_gpu(cores: int, few: int | None) -> int | None:
    """Return how many of these cores update while others queue a GPU's work; `few` of few cores."""
    return few if cores < FEW_CORES else cores - max(1, cores // 8)


def zero_(x: Tensor, *, threads: int | None = None) -> None:
    """Write zeros, on the host. Fresh memory should be written before it is read: Linux before 6.13
    gives it small pages if it is written after a read."""
    _native.kernel("zero")(x.data_ptr(), x.nbytes, threads or 0)


def quantise(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return fp32 moments `x` (n,) as codes (n,) uint8 and scales (blocks of 256 elements,) fp32,
    on their device. A value that is not finite becomes zero, as after an update."""
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    scales = torch.empty(-(-x.numel() // BLOCK), device=x.device)
    if x.device.type == "cpu":
        assert x.dtype is torch.float32 and x.is_contiguous()
        pointers = (x.data_ptr(), codes.data_ptr(), scales.data_ptr())
        _native.kernel("quantise8")(*pointers, x.numel(), int(signed), 0)
        return codes, scales
    for first in range(0, x.numel(), _QUANTISED_ELEMENTS):
        part = slice(first, first + _QUANTISED_ELEMENTS)
        finite = torch.where(torch.isfinite(x[part]), x[part], 0.0)
        blocks = slice(first // BLOCK, (first + _QUANTISED_ELEMENTS) // BLOCK)
        codes[part], scales[blocks] = dynamic_map.quantise(finite, signed=signed)
    return codes, scales
