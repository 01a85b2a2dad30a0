"""The native kernels of bench_cpu.py over memory as a training has it, and the streams that move as
much as each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.memory.arena import HostArena
from fluxtrain.optim.hyper import Hyper
from fluxtrain.optim.narrow_adamw import update8_, update16_
from fluxtrain.optim.reference import States8, rounding
from fluxtrain.optim.split_adamw import (
    accumulate_,
    encode,
    sum_squares,
    update_,
    update_f32_,
    update_moments_,
    update_weights_,
)
from fluxtrain.plan.states import STATE_BLOCK

HYPER = Hyper(lr=1e-4)
FP32 = "adamw, fp32 states"


def written(values: Tensor) -> Tensor:
    """The same in memory as a training has it: an arena, of huge pages where the system has any."""
    arena = HostArena(values.nbytes, pin=False)
    return arena.tensor(values.dtype, values.numel(), 0).copy_(values)


@dataclass
class Part:
    """Some elements in every format, with a gradient in both widths, and the kernels over them."""

    p: Tensor
    hi: Tensor
    lo: Tensor
    m: Tensor
    v: Tensor
    grad_f32: Tensor
    grad: Tensor
    m16: Tensor
    v16: Tensor
    states8: States8
    step: int = 0

    @property
    def n(self) -> int:
        return self.p.numel()

    def cut(self, count: int) -> list[Part]:
        """The same memory in so many parts, each but the last of whole blocks of a scale."""
        blocks = self.n // STATE_BLOCK // count
        starts = [at * blocks * STATE_BLOCK for at in range(count)]
        return [
            self._between(start, stop)
            for start, stop in zip(starts, [*starts[1:], self.n], strict=True)
        ]

    def _between(self, start: int, stop: int) -> Part:
        tensors = (
            self.p,
            self.hi,
            self.lo,
            self.m,
            self.v,
            self.grad_f32,
            self.grad,
            self.m16,
            self.v16,
        )
        first, last = start // STATE_BLOCK, -(-stop // STATE_BLOCK)
        of8 = self.states8
        states8 = States8(
            of8.m[start:stop], of8.v[start:stop], of8.m_scale[first:last], of8.v_scale[first:last]
        )
        return Part(*(tensor[start:stop] for tensor in tensors), states8)

    def stream(self, name: str, m: Tensor, v: Tensor, threads: int) -> None:
        pointers = (x.data_ptr() for x in (self.hi, self.lo, m, v, self.grad))
        _native.kernel(name)(*pointers, self.n, threads)

    def split(self, grad: Tensor, threads: int) -> None:
        self.step += 1
        state = (self.hi, self.lo, self.m, self.v)
        update_(*state, grad, hyper=HYPER, step=self.step, threads=threads)

    def stream_moments(self, threads: int) -> None:
        pointers = (x.data_ptr() for x in (self.m, self.v, self.grad))
        _native.kernel("stream_moments")(*pointers, self.n, threads)

    def weights(self, threads: int) -> None:
        self.step += 1
        state = (self.hi, self.lo, self.m, self.v)
        update_weights_(*state, self.grad, hyper=HYPER, step=self.step, threads=threads)

    def moments(self, threads: int) -> None:
        self.step += 1
        moments = (self.m, self.v)
        update_moments_(*moments, self.grad, hyper=HYPER, step=self.step, threads=threads)

    def split16(self, threads: int) -> None:
        self.step += 1
        update16_(
            self.hi, self.lo, self.m16, self.v16, self.grad, rounding(0, self.step, 0),
            hyper=HYPER, step=self.step, threads=threads,
        )  # fmt: skip

    def split8(self, threads: int) -> None:
        self.step += 1
        update8_(
            self.hi, self.lo, self.states8, self.grad,
            hyper=HYPER, step=self.step, threads=threads,
        )  # fmt: skip

    def f32(self, threads: int) -> None:
        self.step += 1
        state = (self.p, self.m, self.v)
        update_f32_(*state, self.grad_f32, hyper=HYPER, step=self.step, threads=threads)


def arena_of(n: int) -> Part:
    """`n` elements in memory as a training has it."""
    generator = torch.Generator().manual_seed(0)
    p = written(torch.randn(n, generator=generator) * 0.02)
    hi, lo = (written(part) for part in encode(p))
    m, v = (written(torch.zeros(n)) for _ in range(2))
    grad_f32 = written(torch.randn(n, generator=generator) * 1e-3)
    m16, v16 = (written(torch.zeros(n, dtype=torch.bfloat16)) for _ in range(2))
    codes = [written(torch.zeros(n, dtype=torch.uint8)) for _ in range(2)]
    scales = [torch.zeros(-(-n // STATE_BLOCK)) for _ in range(2)]
    grad = written(grad_f32.bfloat16())
    return Part(p, hi, lo, m, v, grad_f32, grad, m16, v16, States8(*codes, *scales))


@dataclass(frozen=True)
class Row:
    """One kernel: what it moves for each element, the stream that moves as much, and its kind among
    those that are measured in caches."""

    name: str
    element_bytes: float
    run: Callable[[Part, int], object]
    stream: str | None = None
    in_cache: str | None = None

    @property
    def is_compared(self) -> bool:
        """A stream, or a kernel that has one."""
        return self.stream is not None or self.name.startswith("stream")


ROWS = (  # each kernel behind its stream, and 8-bit states behind fp32 ones
    Row("stream, fp32 states", 26, lambda a, t: a.stream("stream_split", a.m, a.v, t)),
    Row(FP32, 26, lambda a, t: a.split(a.grad, t), "stream, fp32 states", "fp32"),
    Row("adamw, 8-bit states", 14.06, Part.split8, "stream, 8-bit states", "8bit"),
    Row("stream, 8-bit states", 14, lambda a, t: a.stream("stream8", a.states8.m, a.states8.v, t)),
    Row("stream, weights", 18, lambda a, t: a.stream("stream_weights", a.m, a.v, t)),
    Row("adamw, weights alone", 18, Part.weights, "stream, weights", "weights"),
    Row("stream, moments", 18, Part.stream_moments),
    Row("adamw, moments alone", 18, Part.moments, "stream, moments", "moments"),
    Row("stream, bf16 states", 18, lambda a, t: a.stream("stream16", a.m16, a.v16, t)),
    Row("adamw, bf16 states", 18, Part.split16, "stream, bf16 states", "bf16"),
    Row("adamw, f32 grad", 28, lambda a, t: a.split(a.grad_f32, t)),
    Row("adamw, f32 weights", 28, Part.f32),
    Row("accumulate bf16", 10, lambda a, t: accumulate_(a.p, a.grad, threads=t)),
    Row("sum of squares bf16", 2, lambda a, t: sum_squares(a.grad, threads=t)),
)
