"""Parameters of one dtype that are adjacent in memory, and their optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from fluxtrain.core.device.arena import aligned
from fluxtrain.core.device.disk import WeightsFile
from fluxtrain.core.memory.states_on_disk import (
    GRADIENT,
    WEIGHTS,
    OnDisk,
    StatesOnDisk,
    Wanted,
)
from fluxtrain.core.quantization.layout import PackedLayout, padded
from fluxtrain.plan.states import STATE_BLOCK, StateFormat, StorageFormat

MASTERS = ("lo", "master")  # what completes the weights to fp32 masters
SCALES = ("m_scale", "v_scale")
_MOMENT_DTYPES: dict[StateFormat, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "8bit": torch.uint8,
}


@dataclass(eq=False)
class Member:
    """One parameter of a group: its place, and the state of its gradient and updates."""

    parameter: nn.Parameter
    name: str
    segment: Segment
    count: int
    shape: torch.Size
    index: int  # position in Group.members
    offset: int = 0  # elements from the segment's start; set by `Segment.lay_out`
    step: int = 0  # optimizer steps taken
    write_version: int = 0  # parameter._version when its bytes were last known
    has_gradient: bool = False
    gradient_scale: float = 1.0  # not yet applied to the stored gradient
    fingerprint: int | None = None  # of the bytes, while code outside may write to them

    @property
    def trained(self) -> bool:
        return self.segment.trained

    def slice(self, flat: Tensor) -> Tensor:
        """Return this member's range of a flat tensor of its segment, in its own shape."""
        return flat[self.offset : self.offset + self.count].view(self.shape)

    @property
    def home(self) -> Tensor:
        """Return the member's weights where they live, in its shape; of weights on disk:
        `OnDisk`."""
        there = self.segment.on_disk
        if there is not None and there.has(WEIGHTS):
            stop = self.offset + self.count
            return there.of_range(WEIGHTS, self.offset, stop, self.shape)
        assert self.segment.weights is not None
        return self.slice(self.segment.weights)

    @property
    def gradient(self) -> Tensor:
        """Return the member's gradient as stored in its group's memory (its scale not applied), in
        its shape."""
        return self.slice(self.segment.gradient)

    def states(self) -> dict[str, Tensor]:
        """Return views of this member's optimizer state by name: `lo` or `master`, `m`, `v` in its
        shape, and the scales of 8-bit moments (blocks,); empty before the first step. Of states on
        disk they are `OnDisk`."""
        if self.segment.on_disk is not None:
            stop = self.offset + self.count
            return dict(self.segment.on_disk.handles(self.offset, stop, self.shape))
        first, stop = self.offset // STATE_BLOCK, -(-(self.offset + self.count) // STATE_BLOCK)
        return {
            name: flat[first:stop] if name in SCALES else self.slice(flat)
            for name, flat in self.segment.states().items()
        }


@dataclass(eq=False)
class Segment:
    """Adjacent members of one dtype, one format of optimizer states, and one storage format."""

    dtype: torch.dtype
    trained: bool
    format: StateFormat = "fp32"  # of the moments
    storage: StorageFormat = "plain"  # of the weights: other formats are packed, and frozen
    seed: int = 0  # of the moments' random rounding
    offset_bytes: int = 0
    elements: int = 0  # with padding between members
    members: list[Member] = field(default_factory=list)
    by_offset: list[Member] = field(default_factory=list)  # in memory order: set by `lay_out`
    weights: Tensor | None = None  # (elements,) in the group's tier: `hi`, or the fp32 master;
    # of a packed segment (size_bytes,) uint8
    file: WeightsFile | None = None  # with the weights, which are on disk where `weights` is None
    lo: Tensor | None = None  # (elements,) int16
    master: Tensor | None = None  # (elements,) fp32, of fp16 weights
    m: Tensor | None = None  # (elements,) fp32, bf16, or 8-bit codes
    v: Tensor | None = None
    m_scale: Tensor | None = None  # (blocks,) fp32, of 8-bit codes
    v_scale: Tensor | None = None
    on_disk: StatesOnDisk | None = None  # all of these states, which are None then, and what
    # else of the segment lives on disk: weights, gradients
    rounded: Tensor | None = None  # (elements,) gradients in the segment's dtype
    wide: Tensor | None = None  # the same in fp32, once a second backward pass has added to them
    is_wide: bool = False  # which of the two holds this step's gradients

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the weights as they are stored."""
        packed = self.packed
        return self.dense_bytes if packed is None else packed.size_bytes

    @property
    def dense_bytes(self) -> int:
        """Return the bytes of the weights in their computing dtype."""
        return self.elements * self.dtype.itemsize

    @property
    def stored(self) -> tuple[torch.dtype, int]:
        """Return the dtype and the count of the weights' flat tensor."""
        if self.packed is None:
            return self.dtype, self.elements
        return torch.uint8, self.size_bytes

    @cached_property
    def packed(self) -> PackedLayout | None:
        """Return the layout of packed weights, once all members are added; None for plain ones."""
        if self.storage == "plain":
            return None
        return PackedLayout.of(self.storage, [member.shape for member in self.members])

    @property
    def has_values(self) -> bool:
        """Return whether its parameters have values outside of a block's computation: not where
        they are packed, or on disk."""
        return self.packed is None and self.weights is not None

    def stored_weights(self) -> Tensor:
        """Return the weights as they are stored, read from their file where they are on disk."""
        if self.weights is not None:
            return self.weights
        if (there := self.weights_on_disk) is not None:
            return there.load()
        assert self.file is not None, "the weights have no home yet"
        return self.file.read_all().view(self.stored[0])

    @property
    def split(self) -> bool:
        """Return whether the weights are the upper halves of fp32 masters."""
        return self.dtype == torch.bfloat16

    @property
    def has_state(self) -> bool:
        """Return whether there are moments, in memory or on disk."""
        return self.m is not None or (self.on_disk is not None and self.on_disk.begun)

    @property
    def weights_on_disk(self) -> OnDisk | None:
        """Return the trained weights (elements,) that live on disk; None where they do not."""
        there = self.on_disk
        return there.whole(WEIGHTS) if there is not None and there.has(WEIGHTS) else None

    @property
    def gradient_on_disk(self) -> OnDisk | None:
        """Return where on disk this step's gradients (elements,) go; None for memory."""
        there = self.on_disk
        return there.whole(GRADIENT) if there is not None and there.has(GRADIENT) else None

    def states(self) -> dict[str, Tensor]:
        """Return the optimizer state by name; empty before the first step. On disk: `OnDisk`."""
        if self.on_disk is not None:
            return dict(self.on_disk.handles(0, self.elements))
        named = {name: getattr(self, name) for name in (*MASTERS, "m", "v", *SCALES)}
        return {name: flat for name, flat in named.items() if flat is not None}

    def live_on_disk(self, there: StatesOnDisk | None) -> None:
        """Move the states there, out of memory; None: they were copied to memory from the disk."""
        if there is not None:
            there.begun = True
            for name, state in there.handles(0, self.elements).items():
                state.copy_(getattr(self, name))
                setattr(self, name, None)
        elif self.on_disk is not None:
            self.on_disk.give_back()
        self.on_disk = there

    def masters_are_weights(self, member: Member | None = None) -> None:
        """Set the masters of `member` (None: of all) from its weights, which were written to."""
        states = self.states() if member is None else member.states()
        if "lo" in states:
            states["lo"].zero_()
        if "master" in states:
            weights = self.stored_weights()
            states["master"].copy_(weights if member is None else member.slice(weights))

    def wanted_on_disk(self, *, weights: bool, gradient: bool) -> Wanted:
        """Return the arrays of a segment whose states live on disk, with its weights or its
        gradients."""
        own = {WEIGHTS: (self.dtype, self.elements)} if weights else {}
        rest = {GRADIENT: (self.dtype, self.elements)} if gradient else {}
        return {**own, **self.wanted_states(), **rest}

    def wanted_states(self) -> dict[str, tuple[torch.dtype, int]]:
        """Return the dtype and element count of each array of the optimizer state, by name."""
        n, dtype = self.elements, _MOMENT_DTYPES[self.format]
        wanted = {"m": (dtype, n), "v": (dtype, n)}
        if self.split:
            wanted["lo"] = (torch.int16, n)
        elif self.dtype == torch.float16:
            wanted["master"] = (torch.float32, n)
        if self.format == "8bit":
            wanted |= dict.fromkeys(SCALES, (torch.float32, -(-n // STATE_BLOCK)))
        return wanted

    def lay_out(self) -> None:
        """Give each member its offset. Vectors (norms, biases) follow all matrices: users exempt
        vectors from weight decay, so that each kind is one range with equal hyperparameters."""
        self.by_offset = sorted(self.members, key=lambda member: len(member.shape) < 2)
        offset = 0
        for member in self.by_offset:
            member.offset = offset
            offset += self.allot(self.dtype.itemsize, member.count)

    def allot(self, itemsize: int, count: int) -> int:
        """Return the elements that a member of `count` elements takes, with its padding."""
        if self.storage != "plain":
            return padded(count)
        if self.format == "8bit":  # a block of states belongs to one parameter
            return -(-count // STATE_BLOCK) * STATE_BLOCK
        return aligned(count * itemsize) // itemsize

    @property
    def gradient(self) -> Tensor:
        """Return this step's gradients (elements,), where the group stores them."""
        flat = self.wide if self.is_wide else self.rounded
        assert flat is not None, "no gradient has arrived yet"
        return flat
