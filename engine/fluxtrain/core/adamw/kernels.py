"""One AdamW step of a flat range, for all formats, on host or device; sums and zeros on the host.

All backends give the same bits: those of the oracle (`reference`). The native kernels work in place
and without the GIL; no result depends on the number of threads or on the instruction set. threads
None: all of OpenMP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain._native import GradientFormat, Pass, StateFormat, WeightFormat
from fluxtrain.core.adamw import dynamic_map, triton_adamw
from fluxtrain.core.adamw.dynamic_map import BLOCK
from fluxtrain.core.adamw.flat import Flat, check_flats
from fluxtrain.core.adamw.hyper import AdamWUpdate
from fluxtrain.core.adamw.torch_adamw import step_by_torch_
from fluxtrain.machine.cgroup import quota_cores

Backend = Literal["native", "torch", "triton"]
Part = Literal["update", "weights", "moments"]

_PASSES: dict[Part, Pass] = {
    "update": Pass.UPDATE,
    "weights": Pass.WEIGHTS,
    "moments": Pass.MOMENTS,
}
_SLICE_ELEMENTS = 1 << 18  # a multiple of STATE_BLOCK; so many fp32 gradients stay in the caches
FEW_CORES = 4  # with fewer cores all are for the update
_SUMMED = (torch.bfloat16, torch.float32)
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
    part: Part = "update",
    backend: Backend | None = None,
    threads: int | None = None,
) -> None:
    """Take one AdamW step in place.

    part: "weights" writes the weights alone, "moments" afterwards m and v alone, with the same
    gradient; after both every bit is that of "update". Only where `Flat.has_two_passes`.
    backend None: the native kernels on the host, on a GPU Triton, or torch without Triton.
    threads: of the native kernels; None: all. Raises TypeError or ValueError, before anything is
    written, for tensors that do not fit together.
    """
    flat.check()
    if part != "update" and not flat.has_two_passes:
        raise ValueError(f"{flat.state_format} states have no pass over {part} alone")
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
    flat: Flat, update: AdamWUpdate, part: Part, backend: Backend, threads: int | None
) -> None:
    if backend == "native":
        step_natively_(flat, update, part=_PASSES[part], threads=threads)
    elif backend == "torch":
        step_by_torch_(flat, update, part=_PASSES[part])
    elif part == "update":
        triton_adamw.step_by_triton_(flat, update)
    else:
        raise ValueError("the Triton kernels update weights and moments in one pass")


def _step_masters_(flat: Flat, update: AdamWUpdate, backend: Backend, threads: int | None) -> None:
    """Update the fp32 masters of fp16 weights and round them into the weights: on the host slice by
    slice, because the native kernels take fp32 gradients."""
    assert flat.master is not None
    if flat.weights.device.type != "cpu":
        _step_(flat.of_masters(flat.gradient), update, "update", backend, threads)
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
        _step_(masters, update, "update", backend, threads)
        some.weights.copy_(masters.weights)


def step_natively_(
    flat: Flat,
    update: AdamWUpdate,
    *,
    part: Pass = Pass.UPDATE,
    threads: int | None = None,
) -> None:
    """Take the step on tensors that `Flat.check` has passed; ignore `clip`.

    Raises TypeError for gradients that the kernels do not take, ValueError for device tensors.
    """
    if flat.weights.device.type != "cpu":
        raise ValueError(f"native kernels need tensors on the host, not on {flat.weights.device}")
    weights = WeightFormat.F32 if flat.lo is None else WeightFormat.SPLIT_BF16
    gradient = _GRADIENTS.get(flat.gradient.dtype)
    wide_only = weights == WeightFormat.F32 and part != Pass.MOMENTS
    if gradient is None or (wide_only and gradient != GradientFormat.F32):
        raise TypeError(f"gradient is {flat.gradient.dtype} beside {flat.weights.dtype} weights")
    rounding = flat.rounding or (0, 0, 0)
    _native.adamw(
        _native.AdamWArgs(
            weight_format=weights,
            state_format=_STATES[flat.state_format],
            gradient_format=gradient,
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


def update_threads(computation: torch.device) -> int | None:
    """Choose how many threads update on the host. With a GPU an eighth of the cores, or one, is
    left to the threads that queue its work; else these would wait for a core, and the update for
    the core that they took from it. Under a CPU quota no more threads than it keeps running:
    more run for a part of each period and then stand still together. None: all of OpenMP's."""
    quota, cores = quota_cores(), torch.get_num_threads()
    threads = quota if quota is not None and quota < cores else None
    cores = cores if threads is None else threads
    if computation.type == "cpu" or cores < FEW_CORES:
        return threads
    return cores - max(1, cores // 8)


def zero_(x: Tensor, *, threads: int | None = None) -> None:
    """Write zeros, on the host. Fresh memory should be written before it is read: Linux before 6.13
    gives it small pages if it is written after a read."""
    _native.kernel("zero")(x.data_ptr(), x.nbytes, threads or 0)


def accumulate_(total: Tensor, x: Tensor, *, threads: int | None = None) -> None:
    """Add x to total on the host; total is flat float32, x flat float32 or bfloat16."""
    n = _host_length([("total", total, (torch.float32,)), ("x", x, _SUMMED)])
    name = "accumulate_bf16" if x.dtype is torch.bfloat16 else "accumulate_f32"
    _native.kernel(name)(total.data_ptr(), x.data_ptr(), n, threads or 0)


def sum_squares(x: Tensor, *, threads: int | None = None) -> float:
    """Return the sum of squares of flat host `x` (float32 or bfloat16) in double precision."""
    n = _host_length([("x", x, _SUMMED)])
    name = "sum_squares_bf16" if x.dtype is torch.bfloat16 else "sum_squares_f32"
    total: float = _native.kernel(name)(x.data_ptr(), n, threads or 0)
    return total


def quantise(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return fp32 moments `x` (n,) as codes (n,) uint8 and scales (blocks of 256 elements,) fp32,
    on their device. A value that is not finite becomes zero, as after an update."""
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    scales = torch.empty(-(-x.numel() // BLOCK), device=x.device)
    if x.device.type == "cpu":
        n = _host_length([("x", x, (torch.float32,))])
        pointers = (x.data_ptr(), codes.data_ptr(), scales.data_ptr())
        _native.kernel("quantise8")(*pointers, n, int(signed), 0)
        return codes, scales
    for first in range(0, x.numel(), _QUANTISED_ELEMENTS):
        part = slice(first, first + _QUANTISED_ELEMENTS)
        finite = torch.where(torch.isfinite(x[part]), x[part], 0.0)
        blocks = slice(first // BLOCK, (first + _QUANTISED_ELEMENTS) // BLOCK)
        codes[part], scales[blocks] = dynamic_map.quantise(finite, signed=signed)
    return codes, scales


def _host_length(flats: list[tuple[str, Tensor, tuple[torch.dtype, ...]]]) -> int:
    n = check_flats(flats)
    if flats[0][1].device.type != "cpu":
        raise ValueError(f"{flats[0][0]} must be on the host, not on {flats[0][1].device}")
    return n
