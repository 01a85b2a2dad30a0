"""A group of parameters that moves as one: its layout, its arenas and its optimizer state.

A group is one block (or one part outside the blocks, such as the embedding). Its weights are one
contiguous range of bytes, which moves to the device as it is, split into segments:

    [ trained bf16 | trained fp16 | trained fp32 | frozen, any dtype | frozen, packed ]

and each segment into its matrices and, behind them, its vectors (norms, biases).

A trained bf16 segment is the `hi` half of fp32 masters: `lo`, `m` and `v` complete it to 12 bytes a
parameter, a bf16 gradient to 14; with moments in 8 bits these are 6 and 8, and parameters of few
elements lie in segments of their own with fp32 moments. A trained fp32 segment is its own master.
fp16 weights are no half of anything: their fp32 masters lie beside them whole (14 and 16 bytes),
and the weights are what the masters round to.

Large frozen weights may be packed in 4 or 8 bits (`frozen`). Their parameters on the host are
placeholders; on the device they are views of the scratch that they are unpacked into.
"""

from __future__ import annotations

import zlib
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fluxtrain.device.arena import HostArena, aligned, device_flat, own_storage_view
from fluxtrain.device.worker import Job
from fluxtrain.errors import UnsupportedModel
from fluxtrain.memory.mapped import drop
from fluxtrain.memory.packed import Kept, dense_parts, pack_segment, packed_source, placeholder
from fluxtrain.memory.segment import MASTERS, Member, Segment
from fluxtrain.plan import states as state_formats
from fluxtrain.plan.group_placement import GroupPlacement, Tier
from fluxtrain.plan.states import StateFormat, StorageFormat

if TYPE_CHECKING:
    from fluxtrain.memory.rows import RowBuffers

_LEAST_DROPPED_BYTES = 1 << 20  # a smaller weight is not worth a look at the memory map
TRAINED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Group:
    """Parameters that are copied, computed with and updated together."""

    def __init__(
        self,
        name: str,
        kind: Literal["block", "edge"],
        states: StateFormat = "fp32",
        frozen: StorageFormat = "plain",
    ) -> None:
        self.name, self.kind, self.states = name, kind, states
        self.frozen = frozen  # how large frozen weights are stored
        self.placement = GroupPlacement(name=name, kind=kind)
        self.lane = 0  # of its card's compute streams, for its unit
        self.members: list[Member] = []
        self.segments: list[Segment] = []
        self.flat_weights: Tensor | None = None  # (weight_bytes,) uint8 on the host
        self.weight_bytes = 0
        self.version = 0  # counts changes of the weights
        self.frozen_version = 0  # counts changes of the frozen ones
        self.users = 0  # units that compute with this group
        self.by_rows = False  # one embedding and nothing else: norms are taken row by row
        self.rows: RowBuffers | None = None  # what its rows pass through, in place of a slot
        self.pending: Future[None] | None = None  # an update under way: its weights
        self.moments: Job | None = None  # what of an update comes after its weights
        self.saving: Future[None] | None = None  # a copy for a checkpoint, before the next update
        self.home_views: list[Tensor] = []  # by member index
        self._arenas: list[HostArena] = []
        self._pin = False
        self._device = torch.device("cpu")

    @property
    def trained(self) -> list[Segment]:
        return [s for s in self.segments if s.trained]

    @property
    def trained_count(self) -> int:
        """Trained parameters, one by one."""
        return sum(m.count for s in self.trained for m in s.members)

    @property
    def trained_elements(self) -> int:
        """The same with the padding between members."""
        return sum(s.elements for s in self.trained)

    @property
    def low_bit_elements(self) -> int:
        """Trained elements whose moments may be kept in fewer bits than fp32."""
        members = [(s, m) for s in self.trained for m in s.members]
        return sum(
            s.allot(s.dtype.itemsize, m.count)
            for s, m in members
            if m.count >= state_formats.LEAST_LOW_BIT
        )

    @property
    def count(self) -> int:
        """Parameters, one by one, trained or not."""
        return sum(m.count for m in self.members)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained weights, which lie before all others."""
        frozen = (s.offset_bytes for s in self.segments if not s.trained)
        return min(frozen, default=self.weight_bytes)

    @property
    def packed_segments(self) -> list[Segment]:
        """Segments whose weights are unpacked before they are computed with."""
        return [s for s in self.segments if s.packed is not None]

    @property
    def dense_bytes(self) -> int:
        """Bytes of the packed weights while they are unpacked."""
        return sum(aligned(s.dense_bytes) for s in self.packed_segments)

    @property
    def has_gradient(self) -> bool:
        return any(m.has_gradient for m in self.members)

    @property
    def has_state(self) -> bool:
        """Was it ever updated, so that it has moments?"""
        return any(s.m is not None for s in self.trained)

    @property
    def state_bytes(self) -> int:
        """What completes the masters, and the moments; 0 before the first step."""
        return sum(flat.nbytes for s in self.trained for flat in s.states().values())

    @property
    def gradient_bytes(self) -> int:
        return sum(t.nbytes for s in self.trained for t in (s.rounded, s.wide) if t is not None)

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena in self._arenas)

    @property
    def under_way(self) -> bool:
        """Is an update of this group, or its moments, not done?"""
        return any(job is not None and not job.done() for job in (self.pending, self.moments))

    def wait(self) -> None:
        """Block until no update of this group is under way, nor its moments; raises what made one
        fail. From then on nothing reads or writes its weights, states and gradients on the host."""
        moments = self.moments
        self.wait_for_weights()
        if moments is not None:
            try:
                moments.result()
            finally:  # an interrupted wait (Ctrl-C) leaves the job to whoever waits next
                if self.moments is moments and moments.done():
                    self.moments = None

    def wait_for_weights(self) -> None:
        """The same, but moments that come later, which touch no weights, may go on."""
        pending = self.pending
        if pending is not None:
            try:
                pending.result()
            finally:
                if self.pending is pending and pending.done():
                    self.pending = None

    def weights_changed(self, *, frozen: bool) -> None:
        """Make copies on the device stale; `frozen`: those of the frozen weights too."""
        self.version += 1
        self.frozen_version += frozen

    def add(self, parameter: nn.Parameter, name: str, *, shared: bool = False) -> Member:
        """Take a parameter in; the layout is fixed by `settle`. `shared`: other parts compute with
        it too, so that it is not packed."""
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
        """How this parameter's weights are stored: as another package has packed them; large frozen
        matrices of a block as asked; others as they are."""
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

    def settle(
        self,
        placement: GroupPlacement,
        device: torch.device,
        *,
        pin: bool,
        kept: Kept | None = None,
        drops: bool = False,
    ) -> None:
        """Fix the layout, allocate the weights' memory and move the weights into it; packed ones
        may be `kept` from an earlier start. `drops`: pages of files that weights were are given
        back, for a model that nothing else reads."""
        self.placement, self._device, self._pin = placement, device, pin
        order = {dtype: place for place, dtype in enumerate(TRAINED_DTYPES)}
        self.segments.sort(
            key=lambda s: (
                not s.trained,
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
        self.flat_weights, weights = self.allocate_weights(
            self.segments, self.weight_bytes, pin=pin
        )
        for segment, flat in zip(self.segments, weights, strict=True):
            segment.weights = flat
        for segment in self.packed_segments:
            pack_segment(segment, self.name, kept, drops=drops)
        for member in self.members:
            view = self.own_view(member)
            if member.segment.packed is None:
                with torch.no_grad():
                    view.copy_(member.parameter.detach())
                if drops and member.parameter.nbytes >= _LEAST_DROPPED_BYTES:
                    drop(member.parameter.detach(), from_cache=False)
            self.home_views.append(view)
            member.parameter.data = view
            member.write_version = member.parameter._version

    def own_view(self, member: Member) -> Tensor:
        """The member's weights on the host, in its shape, with a storage of its own; a placeholder
        without values for packed ones."""
        if member.segment.packed is not None:
            return placeholder(member)
        assert self.flat_weights is not None
        offset = member.segment.offset_bytes + member.offset * member.segment.dtype.itemsize
        dtype = member.segment.dtype
        if self.flat_weights.device.type == "cuda":
            return own_storage_view(self.flat_weights, dtype, member.count, offset).view(
                member.shape
            )
        return self._arenas[0].tensor(dtype, member.count, offset).view(member.shape)

    def device_views(self, flat: Tensor, dense: Tensor | None = None) -> list[Tensor]:
        """Every member's weights in a device copy `flat` (weight_bytes,) of the group, by index;
        the packed ones in `dense` (dense_bytes,), where `unpack` puts them."""
        flats = {
            id(s): flat[s.offset_bytes : s.offset_bytes + s.size_bytes].view(s.dtype)
            for s in self.segments
            if s.packed is None
        }
        if dense is not None:
            for segment, part in dense_parts(self.segments, dense):
                flats[id(segment)] = part
        return [m.slice(flats[id(m.segment)]) for m in self.members]

    def ensure_state(self) -> list[Tensor]:
        """Allocate the optimizer state, moments of zero, on first use; what of it is on the host
        and was never written."""
        unwritten = list[Tensor]()
        for segment in self.trained:
            if segment.m is not None:
                continue
            wanted = segment.wanted_states()
            spans, total = [], 0
            for kind, count in wanted.values():
                spans.append((kind, count, total))
                total += aligned(kind.itemsize * count)
            _, flats = self.allocate(self.placement.state, total, spans, pin=False)
            for name, flat in zip(wanted, flats, strict=True):
                setattr(segment, name, flat)
                if name != "master" and flat.device.type == "cpu":
                    unwritten.append(flat)
            if segment.master is not None:
                segment.masters_are_weights()
        return unwritten

    def forget_moments(self, member: Member) -> None:
        """Its optimizer state starts anew; the master stays (updates must be done)."""
        member.step = 0
        for name, view in member.states().items():
            if name not in MASTERS:
                view.zero_()

    def ensure_gradient(self) -> None:
        """Allocate the gradients' memory on the host in each segment's dtype."""
        for segment in self.trained:
            if segment.rounded is None:
                span = [(segment.dtype, segment.elements, 0)]
                size = aligned(segment.size_bytes)
                _, flats = self.allocate(self.placement.gradients, size, span, pin=self._pin)
                segment.rounded = flats[0]

    @property
    def holds_gradient_memory(self) -> bool:
        """Is there memory on the host for its gradients?"""
        return all(segment.rounded is not None for segment in self.trained)

    def give_up_gradient_memory(self) -> list[int]:
        """Gradients have no memory any more; the addresses where they had it."""
        held = [segment.rounded for segment in self.trained if segment.rounded is not None]
        for segment in self.trained:
            segment.rounded = None
        return [flat.data_ptr() for flat in held]

    def drop_arenas(self, addresses: set[int]) -> None:
        """Let go of the host arenas that begin there."""
        self._arenas = [arena for arena in self._arenas if arena.address not in addresses]

    def take_gradient_memory(self, other: Group) -> None:
        """That of a group with segments of the same sizes, whose gradients are used up."""
        for mine, theirs in zip(self.trained, other.trained, strict=True):
            mine.rounded, theirs.rounded = theirs.rounded, None

    def widen_gradient(self, segment: Segment) -> None:
        """Keep this step's gradients of the segment in fp32 (several backward passes a step)."""
        if segment.is_wide or segment.dtype == torch.float32:
            return
        rounded = segment.gradient
        self.take_wide_memory(segment)
        segment.gradient.copy_(rounded)

    def take_wide_memory(self, segment: Segment) -> None:
        """This step's gradients are in fp32 from now on; whoever calls puts them there."""
        if segment.dtype == torch.float32:
            return
        if segment.wide is None:
            span = [(torch.float32, segment.elements, 0)]
            size = aligned(4 * segment.elements)
            _, flats = self.allocate(self.placement.gradients, size, span, pin=self._pin)
            segment.wide = flats[0]
        segment.is_wide = True

    def _segment(
        self, dtype: torch.dtype, trained: bool, states: StateFormat, storage: StorageFormat
    ) -> Segment:
        kind = dtype, trained, states, storage
        for segment in self.segments:
            if (segment.dtype, segment.trained, segment.format, segment.storage) == kind:
                return segment
        self.segments.append(Segment(*kind))
        return self.segments[-1]

    def allocate_weights(
        self, segments: list[Segment], size_bytes: int, *, pin: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Memory for the weights of these segments, and a flat tensor for each; a forked process
        gets it too."""
        spans = [(*s.stored, s.offset_bytes) for s in segments]
        return self.allocate(self.placement.weights, size_bytes, spans, pin=pin, for_forks=True)

    def allocate(
        self,
        tier: Tier,
        size_bytes: int,
        spans: list[tuple[torch.dtype, int, int]],
        *,
        pin: bool,
        for_forks: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Zeroed memory in a tier, and flat tensors (dtype, count, offset) over it."""
        if tier == "device" and self._device.type == "cuda":
            flat = device_flat(self._device, size_bytes)
            flat.zero_()
            views = [flat[o : o + n * t.itemsize].view(t) for t, n, o in spans]
            return flat, views
        arena = HostArena(size_bytes, pin=pin, for_forks=for_forks)
        self._arenas.append(arena)
        return arena.tensor(torch.uint8, max(size_bytes, 1), 0), [
            arena.tensor(t, n, o) for t, n, o in spans
        ]
