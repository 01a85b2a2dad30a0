"""AdamW in place over flat arenas: by the native kernels on the host, by torch on a device."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.optim import reference
from fluxtrain.optim.hyper import Coefficients, Hyper, Turns, coefficients
from fluxtrain.optim.reference import decode, encode

__all__ = [
    "Hyper",
    "accumulate_",
    "decode",
    "encode",
    "sum_squares",
    "update_",
    "update_by_torch_",
    "update_f32_",
    "update_moments_",
    "update_on_device_",
    "update_weights_",
    "update_weights_f32_",
]

_SLICE_ELEMENTS = 1 << 22
HALVES = (torch.bfloat16, torch.int16, torch.uint16)
_ALLOWED = {"hi": HALVES, "lo": HALVES, "grad": (torch.bfloat16, torch.float32)}  # else float32


def update_(
    hi: Tensor,
    lo: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    threads: int | None = None,
    turns: Turns | None = None,
) -> None:
    """One AdamW step on split masters on the host, in place, without the GIL.

    hi (bfloat16), lo (int16), m, v (float32) and grad (bfloat16 or float32) are contiguous CPU
    tensors of one length. step counts from 1. threads None: OpenMP's default. The result does not
    depend on threads, on the instruction set, or on how a range is cut into calls. turns: parts
    with another decay.
    """
    flats = {"hi": hi, "lo": lo, "m": m, "v": v, "grad": grad}
    _run(f"adamw_split_{_width(grad)}", flats, hyper, step, grad_scale, threads, turns=turns)


def update_f32_(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    threads: int | None = None,
    turns: Turns | None = None,
) -> None:
    """One AdamW step on fp32 weights on the host, in place; all four float32, else as `update_`."""
    flats = {"p": p, "m": m, "v": v, "grad": grad}
    _run("adamw_f32", flats, hyper, step, grad_scale, threads, turns=turns, fp32=True)


def update_weights_(
    hi: Tensor,
    lo: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    threads: int | None = None,
    turns: Turns | None = None,
) -> None:
    """The weights of `update_` alone, with its arguments: m and v stay as they are.

    With `update_moments_` on the same gradient afterwards, every bit is that of `update_`.
    """
    flats = {"hi": hi, "lo": lo, "m": m, "v": v, "grad": grad}
    _run(
        f"adamw_weights_split_{_width(grad)}", flats, hyper, step, grad_scale, threads, turns=turns
    )


def update_weights_f32_(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    threads: int | None = None,
    turns: Turns | None = None,
) -> None:
    """The weights of `update_f32_` alone, as `update_weights_`."""
    flats = {"p": p, "m": m, "v": v, "grad": grad}
    _run("adamw_weights_f32", flats, hyper, step, grad_scale, threads, turns=turns, fp32=True)


def update_moments_(
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    threads: int | None = None,
) -> None:
    """The moments of `update_` or `update_f32_` alone, with the arguments of the weights' pass."""
    flats = {"m": m, "v": v, "grad": grad}
    _run(f"adamw_moments_{_width(grad)}", flats, hyper, step, grad_scale, threads)


def _run(
    kernel: str,
    flats: dict[str, Tensor],
    hyper: Hyper,
    step: int,
    grad_scale: float,
    threads: int | None,
    *,
    turns: Turns | None = None,
    fp32: bool = False,
) -> None:
    """Call a kernel with its arrays in order, once they are what it takes (`fp32`: all float32)."""
    n = flat_length(flats, {} if fp32 else _ALLOWED)
    call, own = _native.kernel(kernel), by_reference(hyper, step, grad_scale)
    if turns is None:
        call(*(flat.data_ptr() for flat in flats.values()), n, own, threads or 0)
        return
    arrays = [(flat.data_ptr(), flat.itemsize) for flat in flats.values()]
    both = own, by_reference(turns.other(hyper), step, grad_scale)
    for i, (start, stop) in enumerate(turns.parts(n)):
        at = (address + start * itemsize for address, itemsize in arrays)
        call(*at, stop - start, both[i % 2], threads or 0)


def _width(grad: Tensor) -> str:
    return "bf16" if grad.dtype is torch.bfloat16 else "f32"


def update_on_device_(
    hi: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float | Tensor = 1.0,
) -> None:
    """The step of `update_` where the flat tensors are: the same bits on any device.

    lo None: hi is itself an fp32 weight. grad_scale may be a 0-d fp32 tensor on the device; a GPU
    never waits for it. A "device" that is the host runs the native kernels.
    """
    if hi.device.type != "cpu":
        update_by_torch_(hi, lo, m, v, grad, hyper=hyper, step=step, grad_scale=grad_scale)
    elif lo is None:
        update_f32_(hi, m, v, grad, hyper=hyper, step=step, grad_scale=float(grad_scale))
    else:
        update_(hi, lo, m, v, grad, hyper=hyper, step=step, grad_scale=float(grad_scale))


def update_by_torch_(
    hi: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    hyper: Hyper,
    step: int,
    grad_scale: float | Tensor = 1.0,
    slice_elements: int = _SLICE_ELEMENTS,
) -> None:
    """The step of `update_` by the oracle's torch operations, in place, with its arguments.

    Temporaries are bounded: about ten fp32 values for each of `slice_elements`.
    """
    device_scale = grad_scale if isinstance(grad_scale, Tensor) else None
    c = coefficients(hyper, step, 1.0 if isinstance(grad_scale, Tensor) else grad_scale)
    for first in range(0, hi.numel(), slice_elements):
        part = slice(first, first + slice_elements)
        g = grad[part].to(torch.float32)
        if device_scale is not None:
            g = g * device_scale
        p = hi[part] if lo is None else decode(hi[part], lo[part])
        p, m_new, v_new = reference.adamw(p, m[part], v[part], g, c)
        m[part], v[part] = m_new, v_new
        if lo is None:
            hi[part] = p
        else:
            hi[part], lo[part] = encode(p)


def zero_(x: Tensor, *, threads: int | None = None) -> None:
    """Zeros, on the host. What was never written should be, before it is read: Linux before 6.13
    gives it small pages when it is written after that."""
    _native.kernel("zero")(x.data_ptr(), x.nbytes, threads or 0)


def accumulate_(total: Tensor, x: Tensor, *, threads: int | None = None) -> None:
    """total += x on the host; total is flat float32, x flat float32 or bfloat16."""
    n = flat_length({"total": total, "x": x}, {"x": (torch.bfloat16, torch.float32)})
    name = "accumulate_bf16" if x.dtype is torch.bfloat16 else "accumulate_f32"
    _native.kernel(name)(total.data_ptr(), x.data_ptr(), n, threads or 0)


def sum_squares(x: Tensor, *, threads: int | None = None) -> float:
    """Sum of squares of flat host `x` (float32 or bfloat16) in double precision.

    The same bits for any number of threads and any instruction set.
    """
    n = flat_length({"x": x}, {"x": (torch.bfloat16, torch.float32)})
    name = "sum_squares_bf16" if x.dtype is torch.bfloat16 else "sum_squares_f32"
    total: float = _native.kernel(name)(x.data_ptr(), n, threads or 0)
    return total


def by_reference(hyper: Hyper, step: int, grad_scale: float) -> object:
    c: Coefficients = coefficients(hyper, step, grad_scale)
    return ctypes.byref(_native.AdamWStep(*c))


def flat_length(tensors: dict[str, Tensor], dtypes: dict[str, tuple[torch.dtype, ...]]) -> int:
    """The common length; wrong tensors would corrupt memory in C, so they are refused here."""
    n = next(iter(tensors.values())).numel()
    for name, tensor in tensors.items():
        allowed = dtypes.get(name, (torch.float32,))
        if tensor.dtype not in allowed:
            raise TypeError(f"{name} is {tensor.dtype}, not one of {allowed}")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous on the host, not on {tensor.device}")
        if tensor.numel() != n:
            raise ValueError(f"{name} has {tensor.numel()} elements where {n} are expected")
    return n
