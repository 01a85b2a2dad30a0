"""What a placement is decided from: a model's sizes, a machine's room, a user's request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from fluxtrain.plan.spread import DeviceFirst, parted, spread_out
from fluxtrain.plan.states import MomentFormat, StateFormat, StorageFormat, moment_bytes

Offload = Literal["none", "optimizer", "weights", "max"]
InputsOn = Literal["device", "host"]
Embedding = Literal["whole", "rows"]  # what of it is copied to the device
Head = Literal["whole", "chunks"]  # how its weight is copied to the device
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights", "max")  # least offload first

FP32_BYTES = 4
HALF_BYTES = 2  # of a value in bf16 or fp16

# Beside a bf16 weight its optimizer state keeps the lower half of the fp32 master.
LOW_HALF_BYTES = 2
# What one decoder block holds for its backward pass, in tensors of (tokens, hidden): two norms with
# their fp32 copies (8), attention (5), residuals (3); and of (tokens, intermediate): the four
# that a gated MLP saves and three gradients of them. An estimate, until it is measured.
HIDDEN_TENSORS = 16
INTERMEDIATE_TENSORS = 7


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """One group of weights that moves as one: a block, or a module outside the blocks (an edge).
    Counts are of elements in memory, with the padding between parameters."""

    name: str
    kind: Literal["block", "edge"]
    weight_bytes: int  # trained and frozen
    trained_bf16: int = 0
    trained_fp32: int = 0
    trained_fp16: int = 0
    users: int = 1  # parts that compute with it: a tied embedding has two
    states: MomentFormat = "fp32"  # how the moments of `narrow` elements are kept
    narrow: int = 0  # trained elements of large parameters; the others' moments are always fp32
    table_rows: int = 0  # of an embedding whose rows can be looked up a few at a time
    masters: bool = True  # in fp32, whatever the weights' dtype; other packages' optimizers: none
    frozen: int = 0  # elements that are not trained
    storage: StorageFormat = "plain"  # of the packed ones among them
    packed_bytes: int = 0  # of the weights, as they are stored
    dense_bytes: int = 0  # of packed weights while a block computes: they are unpacked for it
    file_bytes: int = 0  # of frozen weights, which files on disk can hold where it is a block

    @cached_property
    def unnamed(self) -> GroupFacts:
        """Return the group without its name; groups that differ only in their names share one
        object."""
        return _one_of_all(replace(self, name=""))

    @cached_property
    def trained(self) -> int:
        """Count the trained elements of all dtypes."""
        return self.trained_bf16 + self.trained_fp16 + self.trained_fp32

    @cached_property
    def moment_bytes(self) -> int:
        """Count the bytes of both AdamW moments."""
        wide = self.trained - self.narrow
        return moment_bytes(self.states, self.narrow) + moment_bytes("fp32", wide)

    @cached_property
    def state_bytes(self) -> int:
        """Return the bytes of optimizer states. A bf16 weight takes 10 (fp32 moments), 6 (bf16) or
        4 (8 bits); an fp16 one two more, for its whole fp32 master."""
        if not self.masters:
            return self.moment_bytes
        masters = LOW_HALF_BYTES * self.trained_bf16 + FP32_BYTES * self.trained_fp16
        return masters + self.moment_bytes

    @cached_property
    def update_bytes(self) -> int:
        """Return the bytes that one update reads and writes: masters and moments twice, gradients
        and weights rounded to fp16 once."""
        masters = FP32_BYTES * self.trained
        rounded = self.rounded_bytes + HALF_BYTES * self.trained_fp16
        return 2 * (masters + self.moment_bytes) + rounded

    @cached_property
    def pass_bytes(self) -> int:
        """Return the bytes that each of the update's two passes (weights, then moments) reads and
        writes; 0 where it has only one. Fp32 moments of bf16 and fp32 weights can be updated
        later."""
        if self.states != "fp32" or self.trained_fp16 or not self.masters:
            return 0
        return self.update_bytes - self.moment_bytes

    @cached_property
    def rounded_bytes(self) -> int:
        """Count the bytes of gradients in the weights' dtypes."""
        halves = self.trained_bf16 + self.trained_fp16
        return HALF_BYTES * halves + FP32_BYTES * self.trained_fp32

    @cached_property
    def frozen_bytes(self) -> int:
        """Count the bytes of weights that are neither trained nor packed, with the padding."""
        if not self.frozen:
            return 0
        return max(0, self.weight_bytes - self.rounded_bytes - self.packed_bytes)

    @cached_property
    def segment_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of gradients in bf16, fp16 and fp32, as they are downloaded."""
        halves = HALF_BYTES * self.trained_bf16, HALF_BYTES * self.trained_fp16
        return *halves, FP32_BYTES * self.trained_fp32

    @cached_property
    def sum_bytes(self) -> int:
        """Count the bytes of the fp32 sum in which gradients are collected on the device."""
        return FP32_BYTES * self.trained

    def gradient_bytes(self, *, accumulates: bool) -> int:
        """Count the bytes of gradients on the host; several backward passes a step add up in
        fp32."""
        wide = FP32_BYTES * (self.trained_bf16 + self.trained_fp16) if accumulates else 0
        return self.rounded_bytes + wide

    def host_bytes(self, *, accumulates: bool = False) -> int:
        """Return the bytes of weights, states and gradients: 14 a trained bf16 parameter, 16 an
        fp16 or fp32 one; with 8-bit states 8 and 10."""
        return self.weight_bytes + self.state_bytes + self.gradient_bytes(accumulates=accumulates)


@lru_cache(maxsize=4096)
def _one_of_all(unnamed: GroupFacts) -> GroupFacts:
    """Return the same object for equal groups, so that they can be compared by identity."""
    return unnamed


class Groups:
    """Some groups of one model in forward order, with sums that plans use again and again; each is
    computed once."""

    def __init__(self, groups: Iterable[GroupFacts]) -> None:
        self._groups = tuple(groups)
        self._streamed: dict[int, Groups] = {}

    def __iter__(self) -> Iterator[GroupFacts]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group: object) -> bool:
        """Return whether exactly this object is one of the groups."""
        return id(group) in self._ids

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(id(group) for group in self._groups)

    def named(self, name: str) -> GroupFacts | None:
        """Return the group of this name, or None."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, GroupFacts]:
        return {group.name: group for group in self._groups}

    @cached_property
    def blocks(self) -> Groups:
        """Return the groups that are blocks."""
        return Groups(group for group in self._groups if group.kind == "block")

    def streamed(self, resident: int) -> Groups:
        """Return the blocks that stream if the weights of `resident` blocks stay on the device."""
        count = min(resident, len(self.blocks))
        if count not in self._streamed:
            self._streamed[count] = Groups(spread_out(tuple(self.blocks), count)[1])
        return self._streamed[count]

    @cached_property
    def alike(self) -> tuple[tuple[GroupFacts, int], ...]:
        """Count equal groups: return each kind of group with its number."""
        kinds = {id(group.unnamed): group.unnamed for group in self._groups}
        found: Counter[GroupFacts] = Counter()
        for kind, count in Counter(id(group.unnamed) for group in self._groups).items():
            found[kinds[kind]] += count
        return tuple(found.items())

    @cached_property
    def trained(self) -> int:
        """Count the trained elements."""
        return sum(group.trained for group in self._groups)

    @cached_property
    def weight_bytes(self) -> int:
        """Count the bytes of trained and frozen weights."""
        return sum(group.weight_bytes for group in self._groups)

    @cached_property
    def largest_weight_bytes(self) -> int:
        """Return the most bytes of weights that one group has."""
        return max((group.weight_bytes for group in self._groups), default=0)

    @cached_property
    def state_bytes(self) -> int:
        """Count the bytes of optimizer states."""
        return sum(group.state_bytes for group in self._groups)

    @cached_property
    def rounded_bytes(self) -> int:
        """Count the bytes of gradients in the weights' dtypes."""
        return sum(group.rounded_bytes for group in self._groups)

    @cached_property
    def largest_rounded_bytes(self) -> int:
        """Return the most bytes of gradients that one group has in the weights' dtypes."""
        return max((group.rounded_bytes for group in self._groups), default=0)

    def gradient_bytes(self, *, accumulates: bool) -> int:
        """Count the bytes of gradients on the host."""
        return sum(n * g.gradient_bytes(accumulates=accumulates) for g, n in self.alike)


def activation_estimate(
    hidden: int, intermediate: int, sequence_length: int, dtype_bytes: int
) -> int:
    """Estimate `RowFacts.activation_bytes` of a decoder block that was not measured yet."""
    elements = HIDDEN_TENSORS * hidden + INTERMEDIATE_TENSORS * intermediate
    return elements * sequence_length * dtype_bytes


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """One row (sequence) of a language model's data, and its memory in the model."""

    hidden: int
    vocabulary: int
    sequence_length: int
    dtype_bytes: int  # of activations: 2 (bf16, fp16) or 4 (fp32)
    activation_bytes: int  # of one block, recomputed in the backward pass
    saved_bytes: int | None = None  # of one block that keeps them; None: not measured
    edge_bytes: int = 0  # of what stands behind the blocks, in its backward pass; 0: not measured

    @property
    def block_input_bytes(self) -> int:
        """Count the bytes of a block's input: (sequence_length, hidden)."""
        return self.sequence_length * self.hidden * self.dtype_bytes

    def of_length(self, sequence_length: int) -> RowFacts:
        """Return the facts of a row with `sequence_length` tokens."""
        activation_bytes = self.activation_bytes * sequence_length // self.sequence_length
        saved = self.saved_bytes
        return replace(
            self,
            sequence_length=sequence_length,
            activation_bytes=activation_bytes,
            edge_bytes=self.edge_bytes * sequence_length // self.sequence_length,
            saved_bytes=None if saved is None else saved * sequence_length // self.sequence_length,
        )

    @property
    def kept_bytes(self) -> int:
        """Count the bytes of activations that a block keeps without recompute: measured, or else
        an upper bound."""
        return self.activation_bytes if self.saved_bytes is None else self.saved_bytes


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """The last linear layer's weight (vocabulary, hidden), which can be cut into ranges of rows."""

    group: str  # that it is in
    vocabulary: int
    row_bytes: int  # of one row of the weight
    dtype_bytes: int
    trained: bool
    tied: bool  # another part computes with it too


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a model; `row` is None where the data is not known yet."""

    groups: tuple[GroupFacts, ...]  # in forward order
    head_parameters: int = 0  # trained ones of the head's weight, tied or not
    head_dtype_bytes: int = 2
    head: HeadFacts | None = None  # None: there is none, or none that comes apart
    loose_bytes: int = 0  # of parameters in no group, which live on the device in every layout
    groups_at_once: int = 1  # that one part computes with
    processes: int = 1  # that add up their gradients
    parts: int = 1  # of the host's states and gradients, of which a process has one
    adds_on_host: bool = False  # where the gradients of processes are added
    row: RowFacts | None = None
    fuses_loss: bool = False  # on a GPU a resident head makes no logits of all tokens
    loss_bytes: int = 0  # workspace of a loss that is computed here with another card's head

    @cached_property
    def blocks(self) -> Groups:
        """Return the groups that are blocks."""
        return Groups(group for group in self.groups if group.kind == "block")

    @cached_property
    def edges(self) -> Groups:
        """Return the groups outside the blocks."""
        return Groups(group for group in self.groups if group.kind == "edge")

    @cached_property
    def shared(self) -> Groups:
        """Return the groups that several modules compute with."""
        return Groups(group for group in self.groups if group.users > 1)

    @cached_property
    def weight_bytes(self) -> int:
        """Count the bytes of all weights."""
        return sum(group.weight_bytes for group in self.groups) + self.loose_bytes

    @cached_property
    def trained_bytes(self) -> int:
        """Count the bytes of all trained weights in their dtypes, also those outside of groups."""
        return sum(group.rounded_bytes for group in self.groups) + self.loose_bytes

    @cached_property
    def packed_bytes(self) -> int:
        """Count the bytes of all packed weights."""
        return sum(group.packed_bytes for group in self.groups)

    @cached_property
    def dense_bytes(self) -> int:
        """Return the largest size of a group's packed weights once unpacked."""
        return max(group.dense_bytes for group in self.groups)

    @cached_property
    def frozen_bytes(self) -> int:
        """Count the bytes of all frozen weights that are not packed."""
        return sum(group.frozen_bytes for group in self.groups)

    @cached_property
    def layers(self) -> int:
        """Count the blocks."""
        return len(self.blocks)

    def by_tier(self, count: int, first: DeviceFirst) -> Mapping[str, Groups]:
        """Return the groups of each tier where `count` groups live on the device, as `parted`
        chooses them. The answer is cached."""
        found = self._by_tier.get((count, first))
        if found is None:
            device, host = parted(self.groups, count, first)
            found = self._by_tier[count, first] = {"device": Groups(device), "host": Groups(host)}
        return found

    @cached_property
    def _by_tier(self) -> dict[tuple[int, DeviceFirst], Mapping[str, Groups]]:
        return {}

    @cached_property
    def table(self) -> GroupFacts | None:
        """Return the largest embedding that can be looked up by rows, or None."""
        tables = (group for group in self.groups if group.table_rows)
        return max(tables, key=lambda group: group.weight_bytes, default=None)

    @cached_property
    def has_masters(self) -> bool:
        """Return whether there are fp32 masters; optimizers of other packages have none, and
        need a GPU."""
        return all(group.masters for group in self.groups)

    @cached_property
    def scales_its_loss(self) -> bool:
        """Return whether gradients are fp16: a step may then overflow, and only its end
        shows it."""
        return any(group.trained_fp16 for group in self.groups)

    def with_states(self, states: StateFormat) -> ModelFacts:
        """Return the model with FluxTrain's own optimizer and states in this format."""
        changed = (replace(g, states=states, masters=True) for g in self.groups)
        return replace(self, groups=tuple(changed))

    def without_masters(self, states: MomentFormat) -> ModelFacts:
        """Return the model with another package's optimizer."""
        changed = (replace(g, states=states, masters=False) for g in self.groups)
        return replace(self, groups=tuple(changed))

    @cached_property
    def host_bytes(self) -> int:
        """Count the host bytes of weights, states and gradients of the whole model."""
        return sum(group.host_bytes() for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The machine's memory now."""

    device_free_bytes: int | None  # None: no GPU, the device is a buffer in host memory
    host_available_bytes: int | None  # None: unknown, taken as enough

    @property
    def has_gpu(self) -> bool:
        """Return whether the device has memory of its own."""
        return self.device_free_bytes is not None
