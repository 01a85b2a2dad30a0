"""The memory of a group: for each kind of bytes (weights, gradients, optimizer state) its tier, its
allocations there, and its move to another tier. This is where another tier plugs in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import copy

import torch
from torch import Tensor, nn

from fluxtrain.core.device.arena import HostArena, aligned, device_flat, own_storage_view
from fluxtrain.core.device.disk import FilePart, WeightsFile
from fluxtrain.core.device.spill import Spill
from fluxtrain.core.memory.group_layout import GroupLayout
from fluxtrain.core.memory.mapped import drop
from fluxtrain.core.memory.packed import KeptWeights, pack_segment, placeholder, put_in_file
from fluxtrain.core.memory.segment import MASTERS, SCALES, Member, Segment
from fluxtrain.core.memory.states_on_disk import OnDisk, StatesOnDisk, record_sizes
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.group_placement import KINDS, GroupPlacement, Kind, Tier
from fluxtrain.units import bytes_text

_LEAST_DROPPED_BYTES = 1 << 20  # a smaller weight is not worth a look at the memory map
_TENSORS: dict[Kind, tuple[str, ...]] = {  # of a segment, besides its weights
    "weights": (),
    "state": (*MASTERS, "m", "v", *SCALES),
    "gradients": ("rounded", "wide"),
}

Span = tuple[torch.dtype, int, int]  # of a flat tensor: dtype, elements, offset in bytes


def refuse_tiers(rows: Iterable[GroupPlacement], *, on_disk: Collection[str] = ()) -> None:
    """Raise BadInput for rows with tiers that no code can move bytes to or from.

    Frozen weights of blocks can be on disk, optimizer states next to weights and gradients on
    the host, and of blocks with states there gradients and weights, too. on_disk: names of the
    groups whose weights files can hold.
    """
    for row in rows:
        may_follow = row.is_on("disk", "state") and row.kind == "block"
        if row.is_on("disk", "gradients") and not may_follow:
            raise BadInput(
                f"{row.name}: gradients cannot live on disk here: that needs a block whose "
                "optimizer states are there: use device or host"
            )
        if row.is_on("disk") and row.name not in on_disk and not may_follow:
            raise BadInput(
                f"{row.name}: weights cannot live on disk here: that needs a block with frozen "
                "weights, and the cache of a run with model.packed_cache=true, or one whose "
                "optimizer states are there: use device or host"
            )
        tiers = {"host" if row.is_on("disk", kind) else row.tier_of(kind) for kind in KINDS}
        if len(tiers) > 1:
            raise BadInput(
                f"{row.name}: weights on {row.weights}, state on {row.state} and gradients on "
                f"{row.gradients} cannot be apart yet: use one tier for all three"
            )


class GroupMemory:
    """A group's memory by kind, on the tiers of `placement`. Of weights on disk the frozen ones
    have none: they come from files whenever a slot is filled. States on disk are in `spill`.

    pin: lock the host's weights and gradients in memory, for a GPU that copies from and to them;
    with `shares`, the ranges that this process owns.
    """

    def __init__(
        self,
        layout: GroupLayout,
        placement: GroupPlacement,
        device: torch.device,
        *,
        pin: bool,
        spill: Spill | None = None,
        shares: Shares | None = None,
    ) -> None:
        self.placement, self.pin, self._spill, self._shares = placement, pin, spill, shares
        self.flat_weights: Tensor | None = None  # (weight_bytes,) uint8, where the weights live
        self.views: list[Tensor] = []  # of the weights there, by member index
        self._name, self._members, self._segments = layout.name, layout.members, layout.segments
        self._weight_bytes = layout.weight_bytes
        self._beside_files_bytes = layout.beside_files_bytes
        self._in_files = layout.file_segments
        self._device = device
        self._arenas: dict[Kind, list[HostArena]] = {kind: [] for kind in KINDS}

    @property
    def _trained(self) -> list[Segment]:
        return [segment for segment in self._segments if segment.trained]

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arenas in self._arenas.values() for arena in arenas)

    def allocate(
        self, kind: Kind, size_bytes: int, spans: list[Span]
    ) -> tuple[Tensor, list[Tensor]]:
        """Take zeroed memory where the group has this kind of bytes; return all of it (bytes,) and
        a flat tensor for each span. A forked process can read weights and nothing else."""
        if self.placement.is_on("device", kind) and self._device.type == "cuda":
            flat = device_flat(self._device, size_bytes)
            flat.zero_()
            views = [flat[o : o + n * t.itemsize].view(t) for t, n, o in spans]
            return flat, views
        pin, shares, memory = self.pin and kind != "state", self._shares, None
        of_all = shares is None or self.placement.kind != "block"
        if shares is not None and shares.memory is not None and kind == "weights":
            memory, of_all = shares.memory.take(size_bytes), True
        forks = kind == "weights"
        arena = HostArena(size_bytes, pin=pin and of_all, for_forks=forks, shared=memory)
        self._arenas[kind].append(arena)
        flats = [arena.tensor(t, n, o) for t, n, o in spans]
        if pin and shares is not None and kind == "gradients" and not of_all:
            for flat in flats:
                arena.lock_parts(shares.own_parts(flat, len(flat)))
        return arena.tensor(torch.uint8, max(size_bytes, 1), 0), flats

    def _allocate_one(self, kind: Kind, dtype: torch.dtype, count: int) -> Tensor:
        return self.allocate(kind, aligned(dtype.itemsize * count), [(dtype, count, 0)])[1][0]

    # -- weights -----------------------------------------------------------------------------------

    def take_weights(self, *, kept: KeptWeights | None = None, drops: bool = False) -> None:
        """Move the parameters' weights into memory of the group; packed ones may be `kept` from an
        earlier start. `drops`: give back the pages of files that the weights came from, of a model
        that nothing else reads."""
        self.flat_weights, weights = self._allocate_weights()
        memory = None if self._shares is None else self._shares.memory
        fills = memory is None or memory.mates.is_first
        if self.trained_on_disk or self.placement.is_on("disk", "gradients"):
            for segment in self._trained:
                segment.on_disk = self._states_on_disk(segment)
        for segment in self._in_files if self.placement.is_on("disk") else ():
            assert kept is not None, "refuse_tiers lets no weights on disk without a cache"
            put_in_file(segment, self._name, kept, drops=drops)
        for segment, flat in weights:
            segment.weights = flat
            if segment.packed is not None and fills:
                pack_segment(segment, self._name, kept, drops=drops)
        for member in self._members:
            view = self._view_of(member)
            has_values = member.segment.has_values or member.segment.weights_on_disk is not None
            if has_values and fills:
                with torch.no_grad():
                    (member.home if self.trained_on_disk else view).copy_(member.parameter.detach())
                if drops and member.parameter.nbytes >= _LEAST_DROPPED_BYTES:
                    drop(member.parameter.detach(), from_cache=False)
            self.views.append(view)
            member.parameter.__dict__.pop("_fluxtrain_packed", None)
            member.parameter.data = view
            member.write_version = member.parameter._version

    def _allocate_weights(self) -> tuple[Tensor, list[tuple[Segment, Tensor]]]:
        """Allocate memory for the weights; return it, and each of its segments with its part."""
        there, size = self._segments, self._weight_bytes
        if self.trained_on_disk:
            there, size = [], 0
        elif self.placement.is_on("disk"):
            there = [s for s in there if s not in self._in_files]
            size = self._beside_files_bytes
        flat, flats = self.allocate("weights", size, [(*s.stored, s.offset_bytes) for s in there])
        return flat, list(zip(there, flats, strict=True))

    def bring_weights_home(self) -> None:
        """Give the parameters of trained weights on disk values in memory, for good."""
        for segment in self._trained:
            segment.weights = segment.stored_weights()
            for member in segment.members:
                member.parameter.data = member.slice(segment.weights)

    @property
    def files(self) -> list[tuple[int, WeightsFile]]:
        """Return the files of frozen weights, with the offsets of their bytes in the group."""
        return [(s.offset_bytes, s.file) for s in self._in_files if s.file is not None]

    @property
    def sources(self) -> list[FilePart]:
        """Return all weights on disk, with the offsets of their bytes in the group."""
        trained = [
            (segment.offset_bytes + offset, piece)
            for segment in self._trained
            if segment.on_disk is not None
            for offset, piece in segment.on_disk.files()
        ]
        return [*self.files, *trained]

    @property
    def weight_bytes(self) -> dict[Tier, int]:
        """Return the bytes of the weights on each tier."""
        if not self.placement.is_on("disk") or self.trained_on_disk:
            return {self.placement.weights: self._weight_bytes}
        beside = self._beside_files_bytes
        return {"host": beside, "disk": self._weight_bytes - beside}

    def _view_of(self, member: Member) -> Tensor:
        """Return the member's weights where they live, in its shape, with a separate storage; a
        placeholder without values for packed ones, and those on disk."""
        if not member.segment.has_values:
            return placeholder(member)
        assert self.flat_weights is not None
        dtype = member.segment.dtype
        offset = member.segment.offset_bytes + member.offset * dtype.itemsize
        if self.flat_weights.device.type == "cuda":
            flat = own_storage_view(self.flat_weights, dtype, member.count, offset)
        else:
            flat = self._arenas["weights"][0].tensor(dtype, member.count, offset)
        return flat.view(member.shape)

    # -- optimizer state ---------------------------------------------------------------------------

    def ensure_state(self) -> list[Tensor]:
        """Allocate the optimizer state, with zero moments, on first use; return its unwritten
        tensors on the host."""
        unwritten = list[Tensor]()
        for segment in self._trained:
            if segment.has_state:
                continue
            if self.placement.is_on("disk", "state"):
                segment.on_disk = segment.on_disk or self._states_on_disk(segment)
                segment.on_disk.begun = True
                segment.masters_are_weights()
                continue
            wanted = segment.wanted_states()
            spans, total = list[Span](), 0
            for dtype, count in wanted.values():
                spans.append((dtype, count, total))
                total += aligned(dtype.itemsize * count)
            _, flats = self.allocate("state", total, spans)
            for name, flat in zip(wanted, flats, strict=True):
                setattr(segment, name, flat)
                if name != "master" and flat.device.type == "cpu":
                    unwritten.append(flat)
            if segment.master is not None:
                segment.masters_are_weights()
        return unwritten

    def records_to_make(self, row: GroupPlacement | None = None) -> list[int]:
        """Return the size in bytes of each record of optimizer states that has yet to be made on
        disk, by the present placement or by that of `row`."""
        if self._spill is None or not (row or self.placement).is_on("disk", "state"):
            return []
        size, later = self._spill.record_bytes, [s for s in self._trained if s.on_disk is None]
        return [
            one
            for s in later
            if row is None or s.has_state
            for one in record_sizes(s.wanted_states(), s.elements, size)
        ]

    def _states_on_disk(self, segment: Segment) -> StatesOnDisk:
        assert self._spill is not None, "states on disk need a scratch file"
        wanted = segment.wanted_on_disk(
            weights=self.trained_on_disk, gradient=self.placement.is_on("disk", "gradients")
        )
        return StatesOnDisk(wanted, segment.elements, self._spill)

    @property
    def trained_on_disk(self) -> bool:
        """Return whether the trained weights live on disk: frozen ones go there before them."""
        return self.placement.is_on("disk") and not self._in_files

    def forget_others(self, shares: Shares) -> None:
        """Free the host memory of weights and states that other processes are home to."""
        kinds: list[Kind] = ["weights", "state"] if shares.memory is None else ["state"]
        arenas = [arena for kind in kinds for arena in self._arenas[kind]]
        for segment in self._segments:
            weights = [segment.weights] if shares.memory is None else []
            for flat in (*weights, *segment.states().values()):
                assert flat is not None, "groups with bytes on disk are not shared"
                for start, stop in shares.others(flat, segment.stored[1]):
                    any(arena.forget_within(flat, start, stop) for arena in arenas)

    def lock_own(self) -> None:
        """Page-lock the weights that this process is home to, where it does not have all."""
        shares, (arena,) = self._shares, self._arenas["weights"]
        if not self.pin or shares is None or shares.memory is not None:
            return
        flats = [(s.weights, s.stored[1]) for s in self._segments if s.weights is not None]
        arena.lock_parts(part for flat, n in flats for part in shares.own_parts(flat, n))

    # -- gradients ---------------------------------------------------------------------------------

    def ensure_gradient(self) -> None:
        """Allocate the gradients' memory in each segment's dtype."""
        for segment in self._trained:
            if segment.rounded is None:
                segment.rounded = self._allocate_one("gradients", segment.dtype, segment.elements)

    @property
    def holds_gradients(self) -> bool:
        """Return whether memory for the gradients is allocated."""
        return all(segment.rounded is not None for segment in self._trained)

    def give_up_gradients(self) -> list[int]:
        """Leave the gradients without memory; return its addresses."""
        held = [segment.rounded for segment in self._trained if segment.rounded is not None]
        for segment in self._trained:
            segment.rounded = None
        return [flat.data_ptr() for flat in held]

    def drop_gradient_arenas(self, addresses: set[int]) -> None:
        """Free the host arenas of gradients that begin at these addresses."""
        arenas = self._arenas["gradients"]
        self._arenas["gradients"] = [arena for arena in arenas if arena.address not in addresses]

    def take_gradients_of(self, other: GroupMemory) -> None:
        """Take over the used-up gradients' memory of a group with segments of the same sizes."""
        for mine, theirs in zip(self._trained, other._trained, strict=True):
            mine.rounded, theirs.rounded = theirs.rounded, None

    def widen_gradient(self, segment: Segment) -> None:
        """Keep this step's gradients of the segment in fp32 (several backward passes a step)."""
        if segment.is_wide or segment.dtype == torch.float32:
            return
        rounded = segment.gradient
        self.take_wide_gradient(segment)
        segment.gradient.copy_(rounded)

    def take_wide_gradient(self, segment: Segment) -> None:
        """Make fp32 memory the home of this step's gradients; the caller copies them."""
        if segment.dtype == torch.float32:
            return
        if segment.wide is None:
            segment.wide = self._allocate_one("gradients", torch.float32, segment.elements)
        segment.is_wide = True

    # -- moving ------------------------------------------------------------------------------------

    def prepare_move(self, placement: GroupPlacement, *, pin: bool) -> Callable[[], GroupMemory]:
        """Take memory on the tiers of `placement` for the kinds that change theirs; calling what is
        returned copies them there, every bit, and returns the memory to use from then on.

        Raises DoesNotFit; this memory stays as it is then.
        """
        there = copy(self)
        there.placement, there.pin = placement, pin
        moving = [k for k in KINDS if placement.tier_of(k) != self.placement.tier_of(k)]
        if moving:
            self._refuse_move(placement)
        there._arenas = {kind: [] if kind in moving else self._arenas[kind] for kind in KINDS}
        weights: list[tuple[Segment, Tensor]] = []
        to_disk = "state" in moving and placement.is_on("disk", "state")
        try:
            if "weights" in moving:
                there.flat_weights, weights = there._allocate_weights()
            held = [
                (s, name, there._allocate_one(kind, flat.dtype, flat.numel()))
                for kind in moving
                if kind != "state" or not to_disk
                for s, name, flat in self._held(kind)
            ]
            on_disk = {
                s: there._states_on_disk(s) for s in self._trained if to_disk and s.has_state
            }
        except DoesNotFit:
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            flats = [flat for kind in moving for _, _, flat in self._held(kind)]
            need = self._weight_bytes + sum(flat.nbytes for flat in flats)
            raise DoesNotFit(f"{bytes_text(need)} of {self._name} find no room: {error}") from error

        def move() -> GroupMemory:
            with torch.no_grad():
                for segment, name, to in held:
                    flat = segment.states().get(name, getattr(segment, name))
                    flat.load_into(to) if isinstance(flat, OnDisk) else to.copy_(flat)
                    setattr(segment, name, to)
                for segment in self._trained if "state" in moving else ():
                    segment.live_on_disk(on_disk.get(segment))
            if "weights" in moving:
                there._move_weights(weights)
            self.flat_weights, self.views, self._arenas = None, [], {}  # freed before other moves
            return there

        return move

    def _refuse_move(self, placement: GroupPlacement) -> None:
        if any(self._is_record(one) for one in (self.placement, placement)):
            raise DoesNotFit(
                f"{self._name} is trained on disk, weights or gradients too: what moves it is the "
                "plan of the next start"
            )
        if self._shares is not None:
            raise DoesNotFit(f"{self._name} is shared by several processes: it stays on the host")
        if placement.is_on("disk") and any(s.file is None for s in self._in_files):
            raise DoesNotFit(f"{self._name} has no file on disk: it can be on device or host")

    def _is_record(self, placement: GroupPlacement) -> bool:
        """Return whether trained weights or gradients are on disk, in the records of the states."""
        weights = placement.is_on("disk") and not self._in_files
        return weights or placement.is_on("disk", "gradients")

    def _move_weights(self, weights: list[tuple[Segment, Tensor]]) -> None:
        """Copy the weights here from where they were, and make them the parameters' own data;
        `weights` are the segments' parts of this memory. Files stay the home of frozen ones that
        came from there, so that these can go back."""
        with torch.no_grad():
            for segment, flat in weights:
                flat.copy_(segment.stored_weights())
        for segment in self._in_files:
            segment.weights = None
        for segment, flat in weights:
            segment.weights = flat
        self.views = [self._view_of(member) for member in self._members]
        for member, view in zip(self._members, self.views, strict=True):
            parameter, kind = member.parameter, member.parameter.__class__
            parameter.__class__ = nn.Parameter  # a wrapped one at rest notes what reads its data
            parameter.data = view
            parameter.__class__ = kind
            member.write_version = parameter._version
            member.fingerprint = None

    def _held(self, kind: Kind) -> list[tuple[Segment, str, Tensor]]:
        """Return the tensors of a kind that the segments have besides weights, with their names."""
        if kind == "state":
            return [(s, *named) for s in self._segments for named in s.states().items()]
        held = [(s, name, getattr(s, name)) for s in self._segments for name in _TENSORS[kind]]
        return [one for one in held if one[2] is not None]
