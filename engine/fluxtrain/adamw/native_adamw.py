"""AdamW, sums and zeros on the host by the native kernels, in place and without the GIL.

No result depends on the number of threads or on the instruction set. threads None: all of OpenMP.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain._native import GradientFormat, StateFormat, WeightFormat
from fluxtrain.adamw import dynamic_map
from fluxtrain.adamw.dynamic_map import BLOCK
from fluxtrain.adamw.flat import Flat, check_flats
from fluxtrain.adamw.hyper import AdamWUpdate
from fluxtrain.hardware.cgroup import quota_cores

FEW_CORES = 4  # with fewer cores all are for the update
_SUMMED = (torch.bfloat16, torch.float32)
_QUANTISED_ELEMENTS = 1 << 20  # at a time on a device; a multiple of the block
_STATES = {
    "fp32": StateFormat.F32,
    "bf16": StateFormat.BF16,
    "8bit": StateFormat.EIGHT_BIT,
}
_GRADIENTS = {torch.float32: GradientFormat.F32, torch.bfloat16: GradientFormat.BF16}


def step_natively_(
    flat: Flat,
    update: AdamWUpdate,
    *,
    part: _native.Pass = _native.Pass.UPDATE,
    threads: int | None = None,
) -> None:
    """Take the step on tensors that `Flat.check` has passed; ignore `clip`.

    Raises TypeError for gradients that the kernels do not take, ValueError for device tensors.
    """
    if flat.weights.device.type != "cpu":
        raise ValueError(f"native kernels need tensors on the host, not on {flat.weights.device}")
    weights = WeightFormat.F32 if flat.lo is None else WeightFormat.SPLIT_BF16
    gradient = _GRADIENTS.get(flat.gradient.dtype)
    wide_only = weights == WeightFormat.F32 and part != _native.Pass.MOMENTS
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
            rounding=_native.Rounding(*rounding),
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
