"""One AdamW step of a flat range, for all formats, on host or device.

All backends give the same bits: those of the oracle (`reference`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from fluxtrain._native import Pass
from fluxtrain.adamw import triton_adamw
from fluxtrain.adamw.flat import Flat
from fluxtrain.adamw.hyper import AdamWUpdate
from fluxtrain.adamw.native_adamw import step_natively_
from fluxtrain.adamw.torch_adamw import step_by_torch_

Backend = Literal["native", "torch", "triton"]
Part = Literal["update", "weights", "moments"]

_PASSES: dict[Part, Pass] = {
    "update": Pass.UPDATE,
    "weights": Pass.WEIGHTS,
    "moments": Pass.MOMENTS,
}
_SLICE_ELEMENTS = 1 << 18  # a multiple of STATE_BLOCK; so many fp32 gradients stay in the caches


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
