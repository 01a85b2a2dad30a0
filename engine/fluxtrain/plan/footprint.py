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
Of a head on the host it has all, or with `head` slices two of them and a sum of one
(`plan/heads.py`).

On the host, but for those of the last `activations_on_device` blocks and of what follows them.
The first `blocks_without_recompute` of the blocks whose weights are on the device keep their
activations and compute nothing again. Beside them the device has what a step needs: fp32 sums of
gradients, staging for their way home, the blocks' inputs, and the workspace of the phase that takes
most (see `_workspace`). Without a GPU the "device" is a buffer in host memory, so its bytes count
as the host's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain

from fluxtrain.plan.depths import ring_depth, staging_depth, sum_depth
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
from fluxtrain.plan.heads import HeadSlices, comes_apart, head_slices, logits_bytes
from fluxtrain.plan.spread import DeviceFirst
from fluxtrain.plan.tables import TableRows

SLOTS: dict[Offload, int] = {"none": 0, "optimizer": 0, "weights": 3, "max": 2}
# Of tensors as large as a boundary, beside what a block holds of a chunk. On a GPU as
# `tests/engine/test_live_tensors.py` counts them; without one the heap keeps more than is there.
BOUNDARIES_IN_FLIGHT = 2  # with the boundaries on the host: a block's own, and the next one's
HEAP_BOUNDARIES = 3
HIDDEN_AT_LOSS = 2  # what goes into the head, and its gradient
HIDDEN_AT_EDGE = 2  # its gradient, and a boundary that came back while the copy home still has it
HEAP_HIDDEN = 4
SAVED_FILE_BYTES = 4_000_000_000  # of a saved model (models/export.py), or one larger weight
# A processor's heap keeps as much of what was freed, at most: device/heap.py sees to that; tensors
# above 32 MiB are mapped by themselves.
HEAP_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run the model."""

    offload: Offload
    device_groups: int = 0  # with `none` all, whatever is said here
    device_first: DeviceFirst = "embedding"  # which ones those are: see `parted`
    resident_blocks: int = 0  # of those on the host; with `optimizer` all
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
        """Are gradients of several backward passes added up?"""
        return self.passes > 1

    @property
    def offloads_activations(self) -> bool:
        """Return whether the inputs of blocks wait on the host."""
        return self.offload == "max" or self.activations == "host"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Predicted peaks; the device's by what takes them."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    boundaries_bytes: int
    workspace_bytes: int  # recomputed activations, logits, gradients on their way to the sums
    kept_bytes: int = 0  # activations that are not recomputed
    arena_bytes: int  # weights, states and gradients on the host
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        """All of the device's."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.boundaries_bytes
            + self.workspace_bytes
            + self.kept_bytes
        )

    def shown_device_bytes(self, *, has_gpu: bool) -> int:
        """As it is told and compared with what is measured: without a GPU the workspace and kept
        activations are in the heap of the process, so the device's buffers are all the rest."""
        in_the_heap = 0 if has_gpu else self.workspace_bytes + self.kept_bytes
        return self.device_bytes - in_the_heap


def footprint(facts: ModelFacts, layout: Layout, *, has_gpu: bool) -> Footprint:
    """Peaks of `layout`. Without a GPU the host's include the device's."""
    at_device, at_home = homes(facts, layout)
    by_rows, sliced = rows_of_table(facts, layout, at_home), sliced_head(facts, layout, at_home)
    late = shared = FP32_BYTES * facts.shared.trained  # sums that begin after the loss
    if by_rows is not None and by_rows.in_slices:
        late, shared = 0, shared + by_rows.kept_bytes - by_rows.table.sum_bytes
    scratch = _scratch(facts, by_rows, sliced)
    staging = _staging(facts, layout, at_home, by_rows, sliced)
    if by_rows is not None:
        shared += by_rows.sum_bytes(layout.passes - 1)
        shared += by_rows.kept_bytes * (by_rows.in_slices and layout.accumulates)
    kept_gradients = at_device.gradient_bytes(accumulates=layout.accumulates)
    kept_weights = at_device.weight_bytes + facts.loose_bytes
    device = {
        "weights_bytes": kept_weights
        + _weights_from_home(facts, layout, at_home, by_rows, sliced)
        + max(group.dense_bytes for group in facts.groups),
        "gradients_bytes": kept_gradients + scratch + shared + staging,
        "optimizer_bytes": at_device.state_bytes,
        "boundaries_bytes": _boundaries_on_device(facts, layout, has_gpu=has_gpu),
        "workspace_bytes": _workspace(facts, layout, late, by_rows, sliced, has_gpu=has_gpu),
        "kept_bytes": kept_count(facts, layout) * kept_block_bytes(facts, layout),
    }
    arenas = at_home.weight_bytes + at_home.state_bytes
    arenas += _gradients_at_home(at_home, layout)
    arenas += by_rows.host_bytes(layout.passes) if by_rows is not None else 0
    host = arenas + boundaries_on_host(facts, layout)
    return Footprint(
        **device,
        arena_bytes=arenas,
        host_bytes=host if has_gpu else host + sum(device.values()),
    )


def _gradients_at_home(at_home: Groups, layout: Layout) -> int:
    if not layout.optimizer_in_backward:
        return at_home.gradient_bytes(accumulates=layout.accumulates)
    rings: Counter[tuple[tuple[int, int, int], int]] = Counter()
    for g, count in at_home.alike:
        rings[(g.trained_bf16, g.trained_fp16, g.trained_fp32), g.rounded_bytes] += count
    return sum(min(count, ring_depth(size)) * size for (_, size), count in rings.items())


def homes(facts: ModelFacts, layout: Layout) -> tuple[Groups, Groups]:
    """The groups that live on the device, and those on the host."""
    count = len(facts.groups) if layout.offload == "none" else layout.device_groups
    return facts.homes(count, layout.device_first)


def saving_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Host memory of weights whose home is a GPU while the model is saved: those of one file."""
    sizes = [group.weight_bytes for group in homes(facts, layout)[0]]
    return min(sum(sizes) + facts.loose_bytes, max([SAVED_FILE_BYTES, *sizes]))


def keepable_count(facts: ModelFacts, layout: Layout) -> int:
    """Blocks whose weights stay on the device, so that they can keep their activations."""
    return facts.layers - streamed_count(facts, layout)


def kept_count(facts: ModelFacts, layout: Layout) -> int:
    """Blocks that keep their activations."""
    return min(layout.blocks_without_recompute, keepable_count(facts, layout))


def kept_block_bytes(facts: ModelFacts, layout: Layout) -> int:
    """Of the activations that one block keeps, beside its input."""
    return 0 if facts.row is None else layout.batch_rows * facts.row.kept_bytes


def slot_count(facts: ModelFacts, layout: Layout) -> int:
    """Device slots that the blocks which are not resident share."""
    streamed = streamed_count(facts, layout)
    wanted = SLOTS[layout.offload] if layout.slots is None else layout.slots
    return min(max(wanted, facts.groups_at_once + 1), streamed)


def streamed_count(facts: ModelFacts, layout: Layout) -> int:
    """Blocks whose weights come through slots."""
    return len(streamed(layout, homes(facts, layout)[1]))


def streamed(layout: Layout, at_home: Groups) -> Groups:
    """Blocks on the host whose weights come through slots."""
    every = layout.offload == "optimizer"
    return at_home.streamed(len(at_home) if every else layout.resident_blocks)


def rows_of_table(facts: ModelFacts, layout: Layout, at_home: Groups) -> TableRows | None:
    """What the embedding's rows take where only those are copied."""
    table = facts.table
    if layout.embedding != "rows" or table is None or table not in at_home:
        return None
    in_slices = layout.head == "chunks" and table.users > 1 and comes_apart(facts)
    return TableRows.of(table, facts.row, layout.batch_rows, in_slices=in_slices)


def embedding_copied(facts: ModelFacts, layout: Layout) -> Embedding:
    """What of the embedding is copied to the device; one that lives there is whole."""
    by_rows = rows_of_table(facts, layout, homes(facts, layout)[1])
    return "whole" if by_rows is None else "rows"


def sliced_head(facts: ModelFacts, layout: Layout, at_home: Groups) -> HeadSlices | None:
    """What the head's slices take where it comes in slices."""
    by_rows = rows_of_table(facts, layout, at_home) is not None
    return head_slices(facts, layout.head, at_home, by_rows=by_rows)


def head_copied(facts: ModelFacts, layout: Layout) -> Head:
    """How the head is copied to the device; one that lives there is whole."""
    return "whole" if sliced_head(facts, layout, homes(facts, layout)[1]) is None else "chunks"


def _scratch(facts: ModelFacts, by_rows: TableRows | None, sliced: HeadSlices | None) -> int:
    """The largest sum of gradients of a group that no other part computes with."""
    alone = (g for g, _ in facts.blocks.alike if g.users == 1)
    edges = (g for g in _summed_edges(facts, by_rows, sliced) if g.users == 1)
    slices = 0 if sliced is None else sliced.sum_bytes
    return max(slices, *(g.sum_bytes for g in (*alone, *edges)), 0)


def _summed_edges(
    facts: ModelFacts, by_rows: TableRows | None, sliced: HeadSlices | None
) -> list[GroupFacts]:
    """Edges whose gradients need a sum of their own. Beside rows the head's does not: the loss
    makes it, and the buffer that a whole embedding would leave behind is not there. Nor does one in
    slices, whose sum is that of one of them."""
    edges = [g for g in facts.edges if sliced is None or g is not sliced.group]
    if by_rows is None or by_rows.tied:
        return edges
    return [g for g in edges if g is not by_rows.table and not _is_head(facts, g)]


def _is_head(facts: ModelFacts, edge: GroupFacts) -> bool:
    return edge.trained == facts.head_parameters and edge.users == 1


def _weights_from_home(
    facts: ModelFacts,
    layout: Layout,
    at_home: Groups,
    by_rows: TableRows | None,
    sliced: HeadSlices | None,
) -> int:
    """Device copies of weights whose home is the host."""
    passing = streamed(layout, at_home)
    kept = at_home.weight_bytes - passing.weight_bytes
    if by_rows is not None:
        kept += by_rows.device_bytes - (0 if by_rows.tied else by_rows.table.weight_bytes)
    if sliced is not None:
        kept += sliced.on_device_bytes - sliced.group.weight_bytes
    return kept + slot_count(facts, layout) * passing.largest_weight_bytes


def _staging(
    facts: ModelFacts,
    layout: Layout,
    at_home: Groups,
    by_rows: TableRows | None,
    sliced: HeadSlices | None,
) -> int:
    """Rounded gradients on their way home: a ring for each size that there is. Sums of several
    passes go up and home through the same, those of a head in slices through one of fp32."""
    apart = [] if by_rows is None or by_rows.tied else [by_rows.table.unnamed]
    apart += [] if sliced is None else [sliced.group.unnamed]
    dense = [g for g, count in at_home.alike if count > apart.count(g)]
    sizes = set(chain.from_iterable(g.segment_bytes for g in dense))
    if by_rows is not None:
        sizes.add(by_rows.gradient_bytes)
    if sliced is not None:
        sizes.add(sliced.gradient_bytes)
        sizes |= {sliced.sum_bytes} if layout.accumulates else set()
    deep = set(chain.from_iterable(g.segment_bytes for g, _ in facts.blocks.alike))
    deep &= sizes if layout.accumulates else set()
    shallow = sum(staging_depth(size) * size for size in sizes - deep)
    return shallow + sum(sum_depth(size, is_block=True) * size for size in deep)


def _boundaries_on_device(facts: ModelFacts, layout: Layout, *, has_gpu: bool) -> int:
    """Inputs of the blocks and of the last norm, but for those that are away on the host."""
    if facts.row is None:
        return 0
    one = layout.batch_rows * facts.row.boundary_bytes
    flying = BOUNDARIES_IN_FLIGHT if has_gpu else HEAP_BOUNDARIES
    away_bytes = max(0, boundaries_on_host(facts, layout) - flying * one)
    return (facts.layers + 1) * one - away_bytes


def boundaries_on_host(facts: ModelFacts, layout: Layout) -> int:
    """Bytes of those that wait there."""
    if facts.row is None or not layout.offloads_activations:
        return 0
    norms = int(not layout.activations_on_device)
    return (offloading_blocks(facts, layout) + norms) * layout.batch_rows * facts.row.boundary_bytes


def offloading_blocks(facts: ModelFacts, layout: Layout) -> int:
    """Count the blocks whose inputs wait on the host: not the blocks without recompute, which keep
    their inputs too, nor the last ones, whose inputs stay on the device."""
    here = kept_count(facts, layout) + layout.activations_on_device
    return max(0, facts.layers - here) if layout.offloads_activations else 0


def _workspace(
    facts: ModelFacts,
    layout: Layout,
    shared_sums: int,
    by_rows: TableRows | None,
    sliced: HeadSlices | None,
    *,
    has_gpu: bool,
) -> int:
    """The most that one phase of a step needs for itself.

    loss: the head's fp32 weight gradient, a chunk of logits, without a GPU one chunk's product in
    the weights' dtype; sums of shared groups do not exist yet. After the loss: that gradient is
    handed over, and what stands between head and blocks is computed again, the whole batch at once;
    a head in slices has logits of one slice at a time, and the hidden states' gradient in fp32;
    a block is recomputed, then its gradients in the weights' dtypes are all there at once, and
    beside the gradient that arrives those of the chunks before; last come the embedding's.

    Without a GPU the heap keeps some of what one phase freed, in pieces that the next one's tensors
    do not fit into. An evaluation is one more phase there: its logits come between two steps.
    """
    head_sum = FP32_BYTES * facts.head_parameters if sliced is None else 0
    product = facts.head_dtype_bytes * facts.head_parameters
    product = product if sliced is None else sliced.gradient_bytes
    boundary = edge = activations = chunk = evaluated = 0
    if facts.row is not None:
        boundary = layout.batch_rows * facts.row.boundary_bytes
        edge = layout.batch_rows * facts.row.edge_bytes
        every_block_keeps = kept_count(facts, layout) == facts.layers
        saved = facts.row.kept_bytes if every_block_keeps else 0  # counted as kept
        activations = layout.chunk_rows * max(0, facts.row.activation_bytes - saved)
        words = facts.row.vocabulary if sliced is None else sliced.words
        chunk = logits_bytes(facts.row, layout.batch_rows, words, product, has_gpu=has_gpu)
        evaluated = logits_bytes(facts.row, layout.batch_rows, words, 0, has_gpu=has_gpu)
        if sliced is not None:
            chunk += boundary // facts.row.dtype_bytes * FP32_BYTES
    at_loss, at_edge, at_block = _hidden_tensors(layout, boundary, has_gpu=has_gpu)
    loss = head_sum + chunk + at_loss
    edges = [g.rounded_bytes for g in _summed_edges(facts, by_rows, sliced)]
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


def _hidden_tensors(layout: Layout, boundary: int, *, has_gpu: bool) -> tuple[int, int, int]:
    """Bytes of tensors as large as a boundary (`boundary`) at the loss, behind the blocks, and in a
    block, there with the gradients of its input that earlier chunks gave."""
    if not has_gpu:
        return HEAP_HIDDEN * boundary, 0, HEAP_HIDDEN * boundary
    chunks = -(-layout.batch_rows // max(1, layout.chunk_rows))
    before = boundary * (chunks - 1) // max(1, chunks)
    return HIDDEN_AT_LOSS * boundary, HIDDEN_AT_EDGE * boundary, boundary + before


def _becomes_the_sum(facts: ModelFacts) -> bool:
    """Is the head's weight all of a shared group? Its gradient then becomes the sum itself."""
    shared = (g.trained for g in facts.shared)
    return facts.head_parameters > 0 and facts.head_parameters in shared
