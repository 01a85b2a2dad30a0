"""How many bytes a layout of a model takes on the device and on the host. Pure arithmetic.

`device_groups` groups (`parted` says which) live on the device altogether: weights, gradients and
optimizer states (14 bytes a trained bf16 parameter, 16 an fp16 or fp32 one). The other groups
are on the host with all of that, and of their weights the device has

| offload   | edges | blocks                                                | blocks' inputs       |
|-----------|-------|-------------------------------------------------------|----------------------|
| none      |       | (every group lives on the device)                     | see `activations`    |
| optimizer | all   | all                                                   | see `activations`    |
| weights   | all   | `resident_blocks` of them, the others through slots   | see `activations`    |
| max       | all   | as `weights`, with the fewest slots                   | host                 |

Of an embedding on the host the device has all, or with `embedding` rows only those that a batch can
look up (`plan/tables.py`), and sums of their gradients alone; a tied one it has too, for the head.
Of a head on the host it has all, or with `head` chunks two of those and the sum of one
(`plan/heads.py`).

On the host, but for those of the last `activations_on_device` blocks and of what follows them.
The first `blocks_without_recompute` of the blocks whose weights are on the device keep their
activations and compute nothing again. Beside them the device has what a step needs: fp32 sums of
gradients, staging for their downloads, the blocks' inputs, and the workspace of the phase that
takes most (see `_workspace`). Without a GPU the "device" is a buffer in host memory,
so its bytes count as the host's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fluxtrain.plan.depths import (
    DISK_RING_BYTES,
    HOST_SUM_BUFFERS,
    RECORD_BUFFERS,
    RECORD_BYTES,
    ring_depth,
    staging_depth,
    sum_depth,
    sums_at_once,
)
from fluxtrain.plan.facts import (
    FP32_BYTES,
    Embedding,
    GroupFacts,
    Groups,
    Head,
    InputsOn,
    ModelFacts,
    Offload,
)
from fluxtrain.plan.heads import HeadChunks, comes_apart, head_chunks, logits_bytes
from fluxtrain.plan.spread import DeviceFirst, spread
from fluxtrain.plan.tables import TableRows

SLOTS: dict[Offload, int] = {"none": 0, "optimizer": 0, "weights": 3, "max": 2}
# Of tensors as large as a block's input, besides a block's memory for a chunk. On a GPU as
# `tests/engine/test_live_tensors.py` counts them; without one the heap keeps more than is there.
INPUTS_IN_FLIGHT = 2  # with block inputs on the host: a block's own, and the next one's
HEAP_INPUTS = 3
HIDDEN_AT_LOSS = 2  # what goes into the head, and its gradient
HIDDEN_AT_EDGE = 2  # its gradient, and an input uploaded again while its download still has it
HEAP_HIDDEN = 4
# A processor's heap keeps as much of what was freed, at most: device/heap.py sees to that; tensors
# above 32 MiB are mapped by themselves.
HEAP_BYTES = 64 << 20


DISK_COUNTS = ("disk_groups", "disk_states", "disk_gradients", "disk_weights")  # of a `Layout`


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run the model."""

    offload: Offload
    device_groups: int = 0  # with `none` all, whatever is said here
    device_first: DeviceFirst = "embedding"  # which ones those are: see `parted`
    resident_blocks: int = 0  # of those on the host; with `optimizer` all
    disk_groups: int = 0  # of the blocks on the host, those with frozen weights on disk: `on_disk`
    disk_states: int = 0  # of the groups on the host, with optimizer states on disk: `spilled`
    disk_gradients: int = 0  # of the blocks among these, with gradients there, too: `may_follow`
    disk_weights: int = 0  # likewise, with their trained weights
    blocks_without_recompute: int = 0  # of those whose weights are on the device, or all of them
    activations: InputsOn = "device"  # where they wait; with `max` on the host, whatever is said
    activations_on_device: int = 0  # of so many last blocks they stay there all the same
    batch_rows: int = 0  # 0: not known
    chunk_rows: int = 0
    passes: int = 1  # backward passes a step
    # groups are updated as their gradients arrive: those on the host pass through a few buffers
    optimizer_in_backward: bool = False
    embedding: Embedding = "whole"  # what of one on the host is copied to the device
    head: Head = "whole"  # how one on the host is copied to the device
    deferred_moments: bool = False  # AdamW's, of groups on the host: updated after all weights
    slots: int | None = None  # for the blocks that are not resident; None: as `offload` says

    @property
    def accumulates(self) -> bool:
        """Return whether gradients of several backward passes are added up."""
        return self.passes > 1

    @property
    def offloads_activations(self) -> bool:
        """Return whether the inputs of blocks wait on the host."""
        return self.offload == "max" or self.activations == "host"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Predicted memory peaks in bytes; the device's is split by purpose."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    block_inputs_bytes: int
    workspace_bytes: int  # recomputed activations, logits, gradients on their way to the sums
    kept_bytes: int = 0  # activations that are not recomputed
    arena_bytes: int  # weights, states and gradients on the host
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        """Count all bytes on the device."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.block_inputs_bytes
            + self.workspace_bytes
            + self.kept_bytes
        )

    def shown_device_bytes(self, *, has_gpu: bool) -> int:
        """Return the device's peak as users see it and as it is measured. Without a GPU the
        workspace and kept activations are in the heap of the process, so only the device's buffers
        count."""
        in_the_heap = 0 if has_gpu else self.workspace_bytes + self.kept_bytes
        return self.device_bytes - in_the_heap


def footprint(facts: ModelFacts, layout: Layout, *, has_gpu: bool) -> Footprint:
    """Predict the memory peaks of `layout`. Without a GPU those of the host include the
    device's."""
    tiers = by_tier(facts, layout)
    on_device, on_host = tiers["device"], tiers["host"]
    by_rows, chunked = rows_of_table(facts, layout, on_host), chunked_head(facts, layout, on_host)
    late = shared = FP32_BYTES * facts.shared.trained  # sums that begin after the loss
    if by_rows is not None and by_rows.in_vocab_chunks:
        late, shared = 0, shared + by_rows.kept_bytes - by_rows.table.sum_bytes
    scratch = sums_at_once(facts.processes) * _scratch(facts, by_rows, chunked)
    staging = _staging(facts, layout, on_host, by_rows, chunked)
    if by_rows is not None:
        shared += by_rows.sum_bytes(layout.passes - 1)
        shared += by_rows.kept_bytes * (by_rows.in_vocab_chunks and layout.accumulates)
    kept_gradients = on_device.gradient_bytes(accumulates=layout.accumulates)
    kept_weights = on_device.weight_bytes + facts.loose_bytes
    device = {
        "weights_bytes": kept_weights
        + _weights_from_host(facts, layout, on_host, by_rows, chunked)
        + facts.dense_bytes,
        "gradients_bytes": kept_gradients + scratch + shared + staging,
        "optimizer_bytes": on_device.state_bytes,
        "block_inputs_bytes": _inputs_on_device(facts, layout, has_gpu=has_gpu),
        "workspace_bytes": _workspace(facts, layout, late, by_rows, chunked, has_gpu=has_gpu),
        "kept_bytes": kept_count(facts, layout) * kept_block_bytes(facts, layout),
    }
    away = spilled(facts, layout)
    arenas = weights_on_host_bytes(facts, layout) + on_host.state_bytes
    arenas += spill_buffer_bytes(away) - sum(group.state_bytes for group in away)
    arenas += _gradients_on_host(facts, on_host, layout)
    arenas += by_rows.host_bytes(layout.passes) if by_rows is not None else 0
    arenas += DISK_RING_BYTES if layout.disk_groups or layout.disk_weights else 0
    if facts.adds_on_host:
        largest = max((group.trained for group in on_host if group.kind == "block"), default=0)
        arenas += HOST_SUM_BUFFERS * facts.processes * FP32_BYTES * largest
    # the host is taken for what holds the parts of all processes
    host = arenas + facts.parts * block_inputs_on_host_bytes(facts, layout)
    return Footprint(
        **device,
        arena_bytes=arenas,
        host_bytes=host if has_gpu else host + sum(device.values()),
    )


def weights_on_host_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Return the bytes of weights that the host holds: not those on disk."""
    away = sum(group.file_bytes for group in on_disk(facts, layout))
    away += sum(group.weight_bytes for group in trained_on_disk(facts, layout))
    return by_tier(facts, layout)["host"].weight_bytes - away


def on_disk(facts: ModelFacts, layout: Layout) -> list[GroupFacts]:
    """Return the `disk_groups` blocks whose frozen weights live on disk: those with a copy that
    stays on the device come first, as they are read once a run, then others here and there."""
    if not layout.disk_groups:
        return []
    return may_live_on_disk(facts, layout)[: layout.disk_groups]


def may_live_on_disk(facts: ModelFacts, layout: Layout) -> list[GroupFacts]:
    """Return the blocks on the host with frozen weights, in the order in which they go to disk."""
    blocks = [group for group in by_tier(facts, layout)["host"].blocks if group.file_bytes]
    passing = streamed(layout, by_tier(facts, layout)["host"])
    stay = [group for group in blocks if group not in passing]
    stream = [group for group in blocks if group in passing]
    return [*stay, *(stream[at] for at in spread(len(stream)))]


def spilled(facts: ModelFacts, layout: Layout) -> list[GroupFacts]:
    """Return the `disk_states` groups whose optimizer states live on disk."""
    return may_be_spilled(facts, layout)[: layout.disk_states] if layout.disk_states else []


def may_be_spilled(facts: ModelFacts, layout: Layout) -> list[GroupFacts]:
    """Return the groups on the host with optimizer states, in the order in which these go to disk:
    blocks here and there, whose updates hide each other's reads and writes, then the others."""
    trained = [group for group in by_tier(facts, layout)["host"] if group.state_bytes]
    blocks = [group for group in trained if group.kind == "block"]
    edges = [group for group in trained if group.kind == "edge"]
    return [*(blocks[at] for at in spread(len(blocks))), *edges]


def may_follow(facts: ModelFacts, layout: Layout) -> list[GroupFacts]:
    """Return the blocks whose gradients and weights may follow their states to disk, in the order
    in which they do: those without frozen weights."""
    spilled = may_be_spilled(facts, layout)
    return [group for group in spilled if group.kind == "block" and not group.frozen]


def gradients_on_disk(facts: ModelFacts, layout: Layout) -> list[GroupFacts]:
    """Return the blocks whose gradients live on disk."""
    return may_follow(facts, layout)[: layout.disk_gradients] if layout.disk_gradients else []


def trained_on_disk(facts: ModelFacts, layout: Layout) -> list[GroupFacts]:
    """Return the blocks whose trained weights live on disk."""
    return may_follow(facts, layout)[: layout.disk_weights] if layout.disk_weights else []


def spill_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Return the bytes on disk that a step reads and writes, which take as much room there."""
    states = sum(group.state_bytes for group in spilled(facts, layout))
    gradients = sum(group.rounded_bytes for group in gradients_on_disk(facts, layout))
    return states + gradients + sum(g.weight_bytes for g in trained_on_disk(facts, layout))


def spill_buffer_bytes(away: Sequence[GroupFacts]) -> int:
    """Return the bytes of the buffers that these groups' states on disk pass through."""
    largest = max((group.state_bytes for group in away), default=0)
    return RECORD_BUFFERS * min(RECORD_BYTES, largest)


def gradient_ring_bytes(groups: Sequence[GroupFacts]) -> int:
    """Return the bytes of the host buffers that gradients pass through on their way to disk."""
    counts = Counter(group.rounded_bytes for group in groups)
    return sum(min(count, ring_depth(size)) * size for size, count in counts.items())


def _gradients_on_host(facts: ModelFacts, on_host: Groups, layout: Layout) -> int:
    if not layout.optimizer_in_backward:
        away = gradients_on_disk(facts, layout)
        passing = gradient_ring_bytes(away) - sum(group.rounded_bytes for group in away)
        return on_host.gradient_bytes(accumulates=layout.accumulates) + passing
    rings: Counter[tuple[tuple[int, int, int], int]] = Counter()
    for g, count in on_host.alike:
        rings[(g.trained_bf16, g.trained_fp16, g.trained_fp32), g.rounded_bytes] += count
    return sum(min(count, ring_depth(size)) * size for (_, size), count in rings.items())


def by_tier(facts: ModelFacts, layout: Layout) -> Mapping[str, Groups]:
    """Return the groups of each tier: device, host."""
    count = len(facts.groups) if layout.offload == "none" else layout.device_groups
    return facts.by_tier(count, layout.device_first)


def saving_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Count the host bytes of weights on a GPU while the model is saved: one is written while the
    next one comes, and none is larger than its group."""
    sizes = [group.weight_bytes for group in by_tier(facts, layout)["device"]]
    return sum(sorted([*sizes, facts.loose_bytes])[-2:])


def keepable_count(facts: ModelFacts, layout: Layout) -> int:
    """Count the blocks whose weights stay on the device, which can run without recompute."""
    return facts.layers - streamed_count(facts, layout)


def kept_count(facts: ModelFacts, layout: Layout) -> int:
    """Count the blocks that run without recompute."""
    asked = layout.blocks_without_recompute
    return min(asked, keepable_count(facts, layout)) if asked else 0


def kept_block_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Count the bytes of activations that one block keeps besides its input."""
    return 0 if facts.row is None else layout.batch_rows * facts.row.kept_bytes


def slot_count(facts: ModelFacts, layout: Layout) -> int:
    """Count the device slots that streamed blocks share."""
    streamed = streamed_count(facts, layout)
    wanted = SLOTS[layout.offload] if layout.slots is None else layout.slots
    return min(max(wanted, facts.groups_at_once + 1), streamed)


def streamed_count(facts: ModelFacts, layout: Layout) -> int:
    """Count the blocks whose weights stream through slots."""
    return len(streamed(layout, by_tier(facts, layout)["host"]))


def streamed(layout: Layout, on_host: Groups) -> Groups:
    """Return the blocks on the host whose weights stream through slots."""
    every = layout.offload == "optimizer"
    return on_host.streamed(len(on_host) if every else layout.resident_blocks)


def rows_of_table(facts: ModelFacts, layout: Layout, on_host: Groups) -> TableRows | None:
    """Return the memory of the embedding's rows if only rows are copied, else None."""
    table = facts.table
    if layout.embedding != "rows" or table is None or table not in on_host:
        return None
    in_vocab_chunks = layout.head == "chunks" and table.users > 1 and comes_apart(facts)
    return TableRows.of(table, facts.row, layout.batch_rows, in_vocab_chunks=in_vocab_chunks)


def embedding_copied(facts: ModelFacts, layout: Layout) -> Embedding:
    """Return how the embedding is copied to the device; "whole" if it lives on the device."""
    by_rows = rows_of_table(facts, layout, by_tier(facts, layout)["host"])
    return "whole" if by_rows is None else "rows"


def chunked_head(facts: ModelFacts, layout: Layout, on_host: Groups) -> HeadChunks | None:
    """Return the memory and time of a head that is uploaded in vocabulary chunks; None for any
    other."""
    by_rows = rows_of_table(facts, layout, on_host) is not None
    return head_chunks(facts, layout.head, on_host, by_rows=by_rows)


def head_copied(facts: ModelFacts, layout: Layout) -> Head:
    """Return how the head is copied to the device; "whole" if it lives on the device."""
    return (
        "whole" if chunked_head(facts, layout, by_tier(facts, layout)["host"]) is None else "chunks"
    )


def _scratch(facts: ModelFacts, by_rows: TableRows | None, chunked: HeadChunks | None) -> int:
    """Return the bytes of the largest gradient sum of a group that only one module computes
    with."""
    alone = (g for g, _ in facts.blocks.alike if g.users == 1)
    edges = (g for g in _summed_edges(facts, by_rows, chunked) if g.users == 1)
    one_chunk = 0 if chunked is None else chunked.sum_bytes
    return max(one_chunk, *(g.sum_bytes for g in (*alone, *edges)), 0)


def _summed_edges(
    facts: ModelFacts, by_rows: TableRows | None, chunked: HeadChunks | None
) -> list[GroupFacts]:
    """Return the edges whose gradients need a sum of their own.

    With an embedding copied by rows, the head needs none: the loss makes its sum, and no whole
    embedding leaves a buffer behind. Nor does a head in vocabulary chunks, which has one chunk's
    sum.
    """
    edges = [g for g in facts.edges if chunked is None or g is not chunked.group]
    if by_rows is None or by_rows.tied:
        return edges
    return [g for g in edges if g is not by_rows.table and not _is_head(facts, g)]


def _is_head(facts: ModelFacts, edge: GroupFacts) -> bool:
    return edge.trained == facts.head_parameters and edge.users == 1


def _weights_from_host(
    facts: ModelFacts,
    layout: Layout,
    on_host: Groups,
    by_rows: TableRows | None,
    chunked: HeadChunks | None,
) -> int:
    """Count the bytes of device copies of weights that live on the host."""
    passing = streamed(layout, on_host)
    kept = on_host.weight_bytes - passing.weight_bytes
    if by_rows is not None:
        kept += by_rows.device_bytes - (0 if by_rows.tied else by_rows.table.weight_bytes)
    if chunked is not None:
        kept += chunked.on_device_bytes - chunked.group.weight_bytes
    return kept + slot_count(facts, layout) * passing.largest_weight_bytes


def _staging(
    facts: ModelFacts,
    layout: Layout,
    on_host: Groups,
    by_rows: TableRows | None,
    chunked: HeadChunks | None,
) -> int:
    """Count the bytes of rounded gradients on their way to the host: one ring for each size.

    Sums of several passes are uploaded and downloaded through the same ring; those of a head in
    vocabulary chunks through one of fp32.
    """
    apart = [] if by_rows is None or by_rows.tied else [by_rows.table.unnamed]
    apart += [] if chunked is None else [chunked.group.unnamed]
    dense = [g for g, count in on_host.alike if count > apart.count(g)]
    sizes = set(chain.from_iterable(g.segment_bytes for g in dense))
    if by_rows is not None:
        sizes.add(by_rows.gradient_bytes)
    if chunked is not None:
        sizes.add(chunked.gradient_bytes)
        sizes |= {chunked.sum_bytes} if layout.accumulates else set()
    deep = set(chain.from_iterable(g.segment_bytes for g, _ in facts.blocks.alike))
    deep &= sizes if layout.accumulates else set()
    shallow = sum(staging_depth(size) * size for size in sizes - deep)
    return shallow + sum(sum_depth(size, is_block=True) * size for size in deep)


def _inputs_on_device(facts: ModelFacts, layout: Layout, *, has_gpu: bool) -> int:
    """Count inputs of the blocks and of the last norm that wait on the device."""
    if facts.row is None:
        return 0
    one = layout.batch_rows * facts.row.block_input_bytes
    flying = INPUTS_IN_FLIGHT if has_gpu else HEAP_INPUTS
    away_bytes = max(0, block_inputs_on_host_bytes(facts, layout) - flying * one)
    return (facts.layers + 1) * one - away_bytes


def block_inputs_on_host_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Return the bytes of block inputs that wait on the host."""
    if facts.row is None or not layout.offloads_activations:
        return 0
    norms = int(not layout.activations_on_device)
    one_bytes = layout.batch_rows * facts.row.block_input_bytes
    return (offloading_blocks(facts, layout) + norms) * one_bytes


def offloading_blocks(facts: ModelFacts, layout: Layout) -> int:
    """Count the blocks whose inputs wait on the host. Blocks without recompute keep their inputs
    on the device, and so do the last blocks."""
    if not layout.offloads_activations:
        return 0
    return max(0, facts.layers - kept_count(facts, layout) - layout.activations_on_device)


def _workspace(
    facts: ModelFacts,
    layout: Layout,
    shared_sums: int,
    by_rows: TableRows | None,
    chunked: HeadChunks | None,
    *,
    has_gpu: bool,
) -> int:
    """Return the largest workspace of any phase of a step.

    Loss: the head's fp32 weight gradient and a chunk of logits; without a GPU also one chunk's
    product in the weights' dtype. Sums of shared groups do not exist yet.

    After the loss: that gradient is handed over, and the modules between head and blocks are
    computed again for the whole batch. A head in vocabulary chunks has logits of one chunk at a
    time and the hidden states' gradient in fp32.

    Blocks: one is recomputed; then all of its gradients exist at once in the weights' dtypes,
    besides the arriving gradient and those of earlier chunks. The embedding's come last.

    Without a GPU the heap keeps some freed memory in ranges that the next phase's tensors do not
    fit into. An evaluation is one more phase: its logits come between two steps.
    """
    head_sum = FP32_BYTES * facts.head_parameters if chunked is None else 0
    product = facts.head_dtype_bytes * facts.head_parameters
    product = product if chunked is None else chunked.gradient_bytes
    block_input = edge = activations = chunk = evaluated = 0
    if facts.row is not None:
        block_input = layout.batch_rows * facts.row.block_input_bytes
        edge = layout.batch_rows * facts.row.edge_bytes
        every_block_keeps = kept_count(facts, layout) == facts.layers
        saved = facts.row.kept_bytes if every_block_keeps else 0  # counted as kept
        activations = layout.chunk_rows * max(0, facts.row.activation_bytes - saved)
        vocabulary = facts.row.vocabulary if chunked is None else chunked.rows
        chunk = logits_bytes(facts.row, layout.batch_rows, vocabulary, product, has_gpu=has_gpu)
        evaluated = logits_bytes(facts.row, layout.batch_rows, vocabulary, 0, has_gpu=has_gpu)
        if chunked is not None:
            chunk += block_input // facts.row.dtype_bytes * FP32_BYTES
    at_loss, at_edge, at_block = _hidden_tensors(layout, block_input, has_gpu=has_gpu)
    loss = max(head_sum + chunk + at_loss, facts.loss_bytes)
    edges = [g.rounded_bytes for g in _summed_edges(facts, by_rows, chunked)]
    edges += [by_rows.gradient_bytes] if by_rows is not None else []
    if by_rows is not None and layout.accumulates:
        edges.append(by_rows.sum_bytes(layout.passes) + by_rows.sum_bytes(1, at_least=1))
    phases = (
        max(loss - shared_sums, at_loss if _becomes_the_sum(facts) else head_sum + at_loss),
        edge + at_edge,
        activations + facts.blocks.largest_rounded_bytes + at_block,
        max(edges, default=0),
    )
    heap = 0 if has_gpu else min(sum(phases) + evaluated - max(phases), HEAP_BYTES)
    return max(phases) + heap


def _hidden_tensors(layout: Layout, block_input: int, *, has_gpu: bool) -> tuple[int, int, int]:
    """Return the bytes of tensors as large as a block's input (`block_input`): at the loss, behind
    the blocks, and in a block, with its input's gradients from earlier chunks."""
    if not has_gpu:
        return HEAP_HIDDEN * block_input, 0, HEAP_HIDDEN * block_input
    chunks = -(-layout.batch_rows // max(1, layout.chunk_rows))
    before = block_input * (chunks - 1) // max(1, chunks)
    return HIDDEN_AT_LOSS * block_input, HIDDEN_AT_EDGE * block_input, block_input + before


def _becomes_the_sum(facts: ModelFacts) -> bool:
    """Return whether the head's weight is all of a shared group: its gradient then becomes the
    sum."""
    shared = (g.trained for g in facts.shared)
    return facts.head_parameters > 0 and facts.head_parameters in shared


def left_on_device(
    facts: ModelFacts,
    layout: Layout,
    limit_bytes: int,
    *,
    most: int | None = None,
    has_gpu: bool = True,
) -> Layout:
    """Return `layout` with the inputs of as many last blocks on the device, `most` at most, as fit
    within `limit_bytes`. The modules behind the blocks then leave their input on the device too."""
    none = replace(layout, activations_on_device=0)
    waiting = offloading_blocks(facts, none)
    most = waiting if most is None else min(most, waiting)
    if facts.row is None or most < 1:
        return none
    free = limit_bytes - footprint(facts, none, has_gpu=has_gpu).device_bytes
    each = max(1, layout.batch_rows * facts.row.block_input_bytes)
    for count in (most, min(most, free // each - 1)):  # few that leave take no more than all
        some = replace(none, activations_on_device=count)
        if count > 0 and footprint(facts, some, has_gpu=has_gpu).device_bytes <= limit_bytes:
            return some
    return none
