"""The layout of a group: its parameters in one contiguous range of bytes.

A group is one block (or one part outside the blocks, such as the embedding). Its weights move to
the device as they are, split into segments:

    [ trained bf16 | trained fp16 | trained fp32 | frozen, any dtype | frozen, packed ]

(the packed ones, or without such all frozen ones, are what can live in files on disk)

and each segment into its matrices and, behind them, its vectors (norms, biases).

A trained bf16 segment is the `hi` half of fp32 masters: `lo`, `m` and `v` complete it to 12 bytes a
parameter, a bf16 gradient to 14; with moments in 8 bits these are 6 and 8, and parameters of few
elements lie in segments of their own with fp32 moments. A trained fp32 segment is its own master.
fp16 weights are no half of anything: their fp32 masters are stored whole (14 and 16 bytes),
and the weights are what the masters round to.

Large frozen weights may be packed in 4 or 8 bits (`frozen`). Their parameters on the host are
placeholders; on the device they are views of the scratch that they are unpacked into.
"""

from __future__ import annotations

import zlib
from typing import Literal

import torch
from torch import Tensor, nn

from fluxtrain.core.device.arena import aligned
from fluxtrain.core.memory.packed import dense_parts, packed_source
from fluxtrain.core.memory.segment import Member, Segment
from fluxtrain.errors import UnsupportedModel
from fluxtrain.plan import states as state_formats
from fluxtrain.plan.states import StateFormat, StorageFormat

TRAINED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GroupLayout:
    """The members of a group, the segments that they lie in, and the offsets of both."""

    def __init__(
        self,
        name: str,
        kind: Literal["block", "edge"],
        states: StateFormat = "fp32",
        frozen: StorageFormat = "plain",
    ) -> None:
        self.name, self.kind, self.states = name, kind, states
        self.frozen = frozen  # how large frozen weights are stored
        self.members: list[Member] = []
        self.segments: list[Segment] = []
        self.weight_bytes = 0  # set by `lay_out`

    # -- its sizes ---------------------------------------------------------------------------------

    @property
    def trained(self) -> list[Segment]:
        return [s for s in self.segments if s.trained]

    @property
    def trained_count(self) -> int:
        """Count the trained parameters."""
        return sum(m.count for s in self.trained for m in s.members)

    @property
    def trained_elements(self) -> int:
        """Count the trained elements, with the padding between members."""
        return sum(s.elements for s in self.trained)

    @property
    def low_bit_elements(self) -> int:
        """Count the trained elements whose moments may have fewer bits than fp32."""
        members = [(s, m) for s in self.trained for m in s.members]
        return sum(
            s.allot(s.dtype.itemsize, m.count)
            for s, m in members
            if m.count >= state_formats.LEAST_LOW_BIT
        )

    @property
    def count(self) -> int:
        """Count the parameters, trained or not."""
        return sum(m.count for m in self.members)

    @property
    def trained_bytes(self) -> int:
        """Return the bytes of the trained weights, which lie before all others."""
        frozen = (s.offset_bytes for s in self.segments if not s.trained)
        return min(frozen, default=self.weight_bytes)

    @property
    def packed_segments(self) -> list[Segment]:
        """Return the segments that are unpacked before their use."""
        return [s for s in self.segments if s.packed is not None]

    @property
    def file_segments(self) -> list[Segment]:
        """Return the segments in files where the group's weights are on disk; they come last."""
        if self.packed_segments or self.frozen != "plain":
            return self.packed_segments
        return [segment for segment in self.segments if not segment.trained]

    @property
    def beside_files_bytes(self) -> int:
        """Return the bytes of weights that stay on the host even then; they precede those in
        files."""
        return min((s.offset_bytes for s in self.file_segments), default=self.weight_bytes)

    @property
    def dense_bytes(self) -> int:
        """Return the bytes of the packed weights once unpacked."""
        return sum(aligned(s.dense_bytes) for s in self.packed_segments)

    @property
    def state_bytes(self) -> int:
        """Return the bytes that complete the masters, and of the moments; 0 before the
        first step."""
        return sum(flat.nbytes for s in self.trained for flat in s.states().values())

    @property
    def gradient_bytes(self) -> int:
        return sum(t.nbytes for s in self.trained for t in (s.rounded, s.wide) if t is not None)

    # -- making it ---------------------------------------------------------------------------------

    def add(self, parameter: nn.Parameter, name: str, *, shared: bool = False) -> Member:
        """Take a parameter in; `lay_out` fixes its place. `shared`: other modules compute with it
        too, so it is not packed."""
        trained = parameter.requires_grad
        if trained and parameter.dtype not in TRAINED_DTYPES:
            raise UnsupportedModel(
                f"{name} is {parameter.dtype} and trained; bfloat16, float16 and float32 can be: "
                "convert first, model.to(torch.bfloat16); of complex ones torch.view_as_real(...)"
            )
        large = trained and parameter.numel() >= state_formats.LEAST_LOW_BIT
        storage = self._storage(parameter, shared=shared)
        states = self.states if large else "fp32"
        segment = self._segment(parameter.dtype, trained, states, storage)
        member = Member(
            parameter, name, segment, parameter.numel(), parameter.shape, len(self.members)
        )
        segment.members.append(member)
        segment.elements += segment.allot(parameter.dtype.itemsize, parameter.numel())
        self.members.append(member)
        return member

    def _storage(self, parameter: nn.Parameter, *, shared: bool) -> StorageFormat:
        """Choose how this parameter's weights are stored: as another package has packed them; large
        frozen matrices of a block as requested; others as they are."""
        source = packed_source(parameter)
        if source is not None:
            return source.format
        packs = (
            self.kind == "block"
            and not shared
            and not parameter.requires_grad
            and parameter.dtype in TRAINED_DTYPES
            and parameter.dim() > 1
            and parameter.numel() >= state_formats.LEAST_PACKED
        )
        return self.frozen if packs else "plain"

    def _segment(
        self, dtype: torch.dtype, trained: bool, states: StateFormat, storage: StorageFormat
    ) -> Segment:
        kind = dtype, trained, states, storage
        for segment in self.segments:
            if (segment.dtype, segment.trained, segment.format, segment.storage) == kind:
                return segment
        self.segments.append(Segment(*kind))
        return self.segments[-1]

    def lay_out(self) -> None:
        """Fix the order of the segments and every offset; no parameter is added afterwards."""
        order = {dtype: place for place, dtype in enumerate(TRAINED_DTYPES)}
        self.segments.sort(
            key=lambda s: (
                not s.trained,
                s.storage != "plain",
                s.storage,
                order.get(s.dtype, len(order)),
                str(s.dtype),
                s.format,
            )
        )
        for segment in self.segments:
            segment.lay_out()
            segment.seed = zlib.crc32(f"{self.name} {segment.dtype}".encode())
            segment.offset_bytes = self.weight_bytes
            self.weight_bytes += aligned(segment.size_bytes)

    # -- reading it --------------------------------------------------------------------------------

    def device_views(self, flat: Tensor, dense: Tensor | None = None) -> list[Tensor]:
        """Return every member's weights in a device copy `flat` (weight_bytes,) of the group, by
        index; the packed ones in `dense` (dense_bytes,), where `unpack` puts them."""
        flats = {
            id(s): flat[s.offset_bytes : s.offset_bytes + s.size_bytes].view(s.dtype)
            for s in self.segments
            if s.packed is None
        }
        if dense is not None:
            for segment, part in dense_parts(self.segments, dense):
                flats[id(segment)] = part
        return [m.slice(flats[id(m.segment)]) for m in self.members]
