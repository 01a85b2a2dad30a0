"""The flat tensors that one AdamW step works on, and their formats."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fluxtrain.core.adamw.reference import Rounding, States8
from fluxtrain.plan.states import STATE_BLOCK, StateFormat

_WORD = 0xFFFFFFFF
_HALVES = (torch.bfloat16, torch.int16, torch.uint16)
_WIDE = (torch.float32,)
_GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
_STATE_FORMATS: dict[torch.dtype, StateFormat] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.uint8: "8bit",
}


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

    def check(self) -> None:
        """Assert that the tensors fit together: with unequal lengths a kernel would write out of
        bounds."""
        n, device = self.weights.numel(), self.weights.device
        for name, flat, dtypes in (
            ("weights", self.weights, self._weight_dtypes),
            ("lo", self.lo, _HALVES),
            ("master", self.master, _WIDE),
            ("m", self.m, tuple(_STATE_FORMATS)),
            ("v", self.v, (self.m.dtype,)),
            ("m_scale", self.m_scale, _WIDE),
            ("v_scale", self.v_scale, _WIDE),
            ("gradient", self.gradient, _GRADIENTS),
        ):
            if flat is not None:
                count = -(-n // STATE_BLOCK) if name.endswith("_scale") else n
                assert flat.dtype in dtypes, f"{name} is {flat.dtype}"
                assert flat.numel() == count, f"{name} has {flat.numel()} elements, not {count}"
                assert flat.device == device and flat.is_contiguous(), f"{name} lies elsewhere"
        assert self.state_format != "8bit" or None not in (self.m_scale, self.v_scale)
        assert self.state_format != "bf16" or self.rounding is not None

    @property
    def _weight_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.lo is not None:
            return _HALVES
        return _WIDE if self.master is None else (torch.float16,)
