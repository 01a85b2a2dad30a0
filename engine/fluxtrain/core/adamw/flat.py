"""The flat tensors that one AdamW step works on, and their formats."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fluxtrain.core.adamw.reference import Rounding, States8
from fluxtrain.plan.states import STATE_BLOCK, StateFormat

_WORD = 0xFFFFFFFF
HALVES = (torch.bfloat16, torch.int16, torch.uint16)
_GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
_STATE_FORMATS: dict[torch.dtype, StateFormat] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.uint8: "8bit",
}

Dtypes = tuple[torch.dtype, ...]


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Flat tensors of one length on one device (scales: one element for each 256)."""

    weights: Tensor  # bfloat16 with `lo`, float16 with `master`, or float32
    lo: Tensor | None = None  # int16, the lower halves of the fp32 masters
    m: Tensor  # float32, bfloat16, or uint8 codes with scales
    v: Tensor
    m_scale: Tensor | None = None
    v_scale: Tensor | None = None
    gradient: Tensor
    rounding: Rounding | None = None  # of bfloat16 moments
    master: Tensor | None = None  # float32

    def cut(self, start: int, stop: int) -> Flat:
        """Return the range [start, stop); `start` is a multiple of STATE_BLOCK for 8-bit states."""
        part, blocks = slice(start, stop), slice(start // STATE_BLOCK, -(-stop // STATE_BLOCK))

        def of(flat: Tensor | None, where: slice) -> Tensor | None:
            return None if flat is None else flat[where]

        rounding = self.rounding
        if rounding is not None:
            rounding = rounding._replace(first_element=rounding.first_element + start & _WORD)
        return Flat(
            weights=self.weights[part],
            lo=of(self.lo, part),
            m=self.m[part],
            v=self.v[part],
            m_scale=of(self.m_scale, blocks),
            v_scale=of(self.v_scale, blocks),
            gradient=self.gradient[part],
            rounding=rounding,
            master=of(self.master, part),
        )

    def of_masters(self, gradient: Tensor) -> Flat:
        """Return the range with the fp32 masters as its weights."""
        assert self.master is not None
        return replace(self, weights=self.master, master=None, gradient=gradient)

    @property
    def state_format(self) -> StateFormat:
        """Return the format of the moments."""
        return _STATE_FORMATS[self.m.dtype]

    @property
    def has_two_passes(self) -> bool:
        """Return whether weights and moments can be updated one after the other. It is not worth
        it for the other formats: their moments are small, or are written with the masters."""
        return self.master is None and self.m.dtype is torch.float32

    @property
    def states8(self) -> States8:
        """Return the 8-bit moments."""
        assert self.m_scale is not None and self.v_scale is not None
        return States8(self.m, self.v, self.m_scale, self.v_scale)

    def check(self) -> int:
        """Return the length; raise TypeError or ValueError for tensors that do not fit together.

        With unequal lengths a kernel would write past the ends.
        """
        flats: list[tuple[str, Tensor, Dtypes]] = [
            ("weights", self.weights, self._weight_dtypes),
            ("m", self.m, tuple(_STATE_FORMATS)),
            ("v", self.v, (self.m.dtype,)),
            ("gradient", self.gradient, _GRADIENTS),
        ]
        if self.lo is not None:
            flats.append(("lo", self.lo, HALVES))
        if self.master is not None:
            flats.append(("master", self.master, (torch.float32,)))
        n = check_flats(flats)
        if self.m.dtype is torch.uint8:
            self._check_scales(n)
        if self.m.dtype is torch.bfloat16 and self.rounding is None:
            raise ValueError("bfloat16 states need the rounding of the step")
        return n

    @property
    def _weight_dtypes(self) -> Dtypes:
        if self.lo is not None:
            return HALVES
        return (torch.float32 if self.master is None else torch.float16,)

    def _check_scales(self, n: int) -> None:
        if self.m_scale is None or self.v_scale is None:
            raise ValueError("8-bit states need the scales of their blocks")
        wide = (torch.float32,)
        blocks = check_flats([("m_scale", self.m_scale, wide), ("v_scale", self.v_scale, wide)])
        if blocks != -(-n // STATE_BLOCK) or self.m_scale.device != self.m.device:
            raise ValueError(
                f"{n} elements on {self.m.device} need {-(-n // STATE_BLOCK)} scales, not {blocks} "
                f"on {self.m_scale.device}"
            )


def check_flats(flats: list[tuple[str, Tensor, Dtypes]]) -> int:
    """Return the common length of named tensors; raise TypeError or ValueError if a dtype,
    device, layout or length is wrong."""
    n, device = flats[0][1].numel(), flats[0][1].device
    for name, tensor, dtypes in flats:
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}, not one of {dtypes}")
        if tensor.device != device or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous on {device}, not on {tensor.device}")
        if tensor.numel() != n:
            raise ValueError(f"{name} has {tensor.numel()} elements where {n} are expected")
    return n
