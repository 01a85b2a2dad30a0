"""The native kernels of bench_cpu.py over memory as a training has it, and the streams that move as
much as each.

Calls are bare: what Python does around a kernel in a training takes 0.01 ms, but 0.1 behind
another kernel, which leaves none of it in a cache. That is much of a pass of some ms.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.memory.arena import HostArena
from fluxtrain.optim.hyper import Hyper, coefficients
from fluxtrain.optim.reference import rounding
from fluxtrain.optim.split_adamw import encode
from fluxtrain.plan.states import STATE_BLOCK

FP32 = "adamw, fp32 states"
STEP = ctypes.byref(_native.AdamWStep(*coefficients(Hyper(lr=1e-4), 1000)))
ROUNDING = ctypes.byref(_native.Rounding(*rounding(0, 1000, 0)))


def written(values: Tensor) -> Tensor:
    """The same in memory as a training has it: an arena, of huge pages where the system has any."""
    arena = HostArena(values.nbytes, pin=False)
    return arena.tensor(values.dtype, values.numel(), 0).copy_(values)


@dataclass(frozen=True)
class Part:
    """Some elements in every format, with a gradient in both widths: flat tensors of one length,
    but for `m_scale` and `v_scale`, of one element for each block of `m8` and `v8`."""

    tensors: dict[str, Tensor]

    @property
    def n(self) -> int:
        return self.tensors["p"].numel()

    def cut(self, count: int) -> list[Part]:
        """The same memory in so many parts, each but the last of whole blocks."""
        starts = [at * (self.n // STATE_BLOCK // count) for at in range(count)]  # in blocks
        stops = [*starts[1:], -(-self.n // STATE_BLOCK)]
        return [self._blocks(start, stop) for start, stop in zip(starts, stops, strict=True)]

    def _blocks(self, start: int, stop: int) -> Part:
        size = {"m_scale": 1, "v_scale": 1}
        cut = {
            name: tensor[start * size.get(name, STATE_BLOCK) : stop * size.get(name, STATE_BLOCK)]
            for name, tensor in self.tensors.items()
        }
        return Part(cut)

    def addresses(self, names: str) -> list[object]:
        """What kernels take: an address each, and one structure for `states8`."""
        return [self._states8() if name == "states8" else self._at(name) for name in names.split()]

    def _at(self, name: str) -> int:
        return self.tensors[name].data_ptr()

    def _states8(self) -> object:
        return ctypes.byref(_native.States8(*map(self._at, ("m8", "v8", "m_scale", "v_scale"))))


def arena_of(n: int) -> Part:
    """`n` elements in memory as a training has it."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(n, generator=generator) * 0.02
    hi, lo = encode(p)
    grad_f32 = torch.randn(n, generator=generator) * 1e-3
    made = {"p": p, "hi": hi, "lo": lo, "grad_f32": grad_f32, "grad": grad_f32.bfloat16()}
    formats = {"": torch.float32, "16": torch.bfloat16, "8": torch.uint8}
    for bits, dtype in formats.items():
        made |= {f"{name}{bits}": torch.zeros(n, dtype=dtype) for name in "mv"}
    scales = {f"{name}_scale": torch.zeros(-(-n // STATE_BLOCK)) for name in "mv"}
    return Part({name: written(values) for name, values in made.items()} | scales)


@dataclass(frozen=True)
class Row:
    """One kernel: what it moves for each element, its function and what that takes before and
    behind the length, the stream that moves as much, and its kind among those that are measured in
    caches."""

    name: str
    element_bytes: float
    kernel: str
    arrays: str
    more: tuple[object, ...] = ()
    stream: str | None = None
    in_cache: str | None = None

    @property
    def is_stream(self) -> bool:
        return self.kernel.startswith("stream")

    def arguments(self, part: Part, threads: int) -> list[object]:
        """What its function takes to go over a part, which must live as long."""
        return [*part.addresses(self.arrays), part.n, *self.more, threads]


ALL, MOMENTS, ALL16 = "hi lo m v grad", "m v grad", "hi lo m16 v16 grad"
ROWS = (  # each kernel behind its stream, and 8-bit states behind fp32 ones
    Row("stream, fp32 states", 26, "stream_split", ALL),
    Row(FP32, 26, "adamw_split_bf16", ALL, (STEP,), "stream, fp32 states", "fp32"),
    Row(
        "adamw, 8-bit states", 14.06, "adamw8_split_bf16", "hi lo states8 grad", (STEP,),
        "stream, 8-bit states", "8bit",
    ),
    Row("stream, 8-bit states", 14, "stream8", "hi lo m8 v8 grad"),
    Row("stream, weights", 18, "stream_weights", ALL),
    Row(
        "adamw, weights alone", 18, "adamw_weights_split_bf16", ALL, (STEP,), "stream, weights",
        "weights",
    ),
    Row("stream, moments", 18, "stream_moments", MOMENTS),
    Row(
        "adamw, moments alone", 18, "adamw_moments_bf16", MOMENTS, (STEP,), "stream, moments",
        "moments",
    ),
    Row("stream, bf16 states", 18, "stream16", ALL16),
    Row(
        "adamw, bf16 states", 18, "adamw16_split_bf16", ALL16, (ROUNDING, STEP),
        "stream, bf16 states", "bf16",
    ),
    Row("adamw, f32 grad", 28, "adamw_split_f32", "hi lo m v grad_f32", (STEP,)),
    Row("adamw, f32 weights", 28, "adamw_f32", "p m v grad_f32", (STEP,)),
    Row("accumulate bf16", 10, "accumulate_bf16", "p grad"),
    Row("sum of squares bf16", 2, "sum_squares_bf16", "grad"),
)  # fmt: skip
