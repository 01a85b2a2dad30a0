"""`Call`: one forward of a streamed block, its chunks, their graphs and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fluxtrain.core.block.call_arguments import WRITES_TO_A_LEAF, CallArguments
from fluxtrain.core.block.capture import Capture
from fluxtrain.core.block.chunking import Merging, chunks, chunks_agree, draws, spans
from fluxtrain.core.block.recompute import (
    CannotRefill,
    Saved,
    Tape,
    checksum,
    gradient_ends,
    refuse_other_results,
)
from fluxtrain.core.block.rng import Autocast, RandomState
from fluxtrain.core.block.room import give_back, note_cure, tell
from fluxtrain.core.guards.arguments import Tree, batch_rows, flatten, run_with, slice_rows, splits
from fluxtrain.core.guards.leaks import refuse_foreign_inputs
from fluxtrain.core.guards.output_alias import CallOutputs, own_outputs
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.module_buffers import Copies, as_before, put_back
from fluxtrain.core.memory.segment import Member
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.arrivals import ArgumentArrivals, wait_for_rows
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import UnitCall

_CHECKED_RECOMPUTES = 3


@dataclass(eq=False)
class Chunk:
    """Some rows of a batch, and their graph."""

    span: tuple[int, int]
    random: RandomState | None = None  # before the forward
    tape: Tape | None = None
    saved: Saved | None = None  # what the graph saves; None: the graph is recorded again
    checked: Tensor | None = None  # checksum that the recomputation is compared with
    result_starts: list[int] = field(default_factory=list)  # of its rows in each result
    result_rows: list[int] = field(default_factory=list)
    is_half: bool = False  # of a chunk that ran out of device memory

    def forget_graph(self) -> None:
        """Free what the graph holds: it is recorded again."""
        if self.saved is not None:
            self.saved.clear()
        self.tape = self.saved = None

    def halves(self) -> list[Chunk]:
        """Return two chunks, to be recorded again, with half of the rows each; none where a result
        has other rows than the batch."""
        first, stop = self.span
        if any(rows != stop - first for rows in self.result_rows):
            return []
        middle = (first + stop) // 2
        return [
            Chunk(
                (a, b),
                random=self.random,
                result_starts=[start + a - first for start in self.result_starts],
                result_rows=[b - a] * len(self.result_rows),
                is_half=True,
            )
            for a, b in ((first, middle), (middle, stop))
        ]


class Call(UnitCall):
    """One forward of a block: all that its backward needs besides the saved tensors."""

    awaits_rows = True

    def __init__(
        self,
        context: Context,
        unit: Unit,
        tree: Tree,
        tensors: Sequence[Tensor],
        capture: Capture,
    ) -> None:
        super().__init__(context, unit)
        self._card = context.card_of(unit)
        # may run the block: before its writes count
        spans, cut = _cut(context, unit, tree, tensors)
        self.given = CallArguments(self._card.device, self._card.counts, unit, tree, tensors, cut)
        self.outputs = CallOutputs()
        self.capture = capture
        self.chunks = [Chunk(span) for span in spans]
        self.rows = spans[-1][1]
        self._device, self._first = self._card.torch_device, context.device.torch_device
        self._autocast = Autocast.now(self._device)
        self._recomputes = unit.recomputes
        self._verifies = unit.recomputes and unit.checked_recomputes < _CHECKED_RECOMPUTES
        self._forward = True  # the forward pass is under way
        self._buffers: Copies = {}  # of buffers that the forward wrote to, from before it
        self._trained: list[tuple[Group, Member]] = []
        self._ends: list[GradientEdge] = []  # where the gradients of these arrive

    @property
    def rows_at_once(self) -> int:
        """Return the rows of the largest chunk."""
        return max(stop - first for first, stop in (chunk.span for chunk in self.chunks))

    # -- forward -----------------------------------------------------------------------------------

    def record(self, tensors: Sequence[Tensor], merging: Merging) -> list[bool]:
        """Run the block on all chunks (weights bound) and put their results together, which outputs
        and captured tensors are made of; tell which of them ask for gradients. The graphs are kept;
        their saved tensors only where the block does not recompute."""
        unit, host = self.unit, self.given.explores or self.unit.draws_on_host
        self._buffers = unit.buffers.before(unit.module)
        self._find_ends()
        differentiable: list[bool] = []
        starts: list[int] = []
        arriving = ArgumentArrivals(self._card.device, tensors, self.given.cut)
        for chunk in self.chunks:
            arriving.wait_for(*chunk.span)
            chunk.random = RandomState.now(self._first, host=host)
            with chunk.random.lend(self._first, self._device):
                results = self._record(chunk, self.given.inputs(tensors, chunk.span, again=False))
            chunk.result_starts = starts or [0] * len(results)
            chunk.result_rows = [r.shape[0] if r.dim() else 1 for r in results]
            ends = zip(chunk.result_starts, chunk.result_rows, strict=True)
            starts = [start + rows for start, rows in ends]
            differentiable = differentiable or [False] * len(results)
            for place, result in enumerate(results):
                merging.add(place, chunk.span, result.detach())
                differentiable[place] |= result.requires_grad
        self._buffers = unit.buffers.after(unit.module, self._buffers)
        return differentiable

    def begin_again(self, tensors: Sequence[Tensor]) -> None:
        """Restore everything to before the forward, which ran out of memory, and cut the batch
        into the present chunks."""
        if self.chunks[0].random is not None:
            self.chunks[0].random.restore(self._first)
        self.given.undo(tensors, slice(None))
        put_back(self.unit.module, self._buffers)
        found, cut = _cut(self.context, self.unit, self.given.tree, tensors)
        self.given.cut = cut
        self.outputs = CallOutputs()
        self.chunks = [Chunk(span) for span in found]

    def _await_gradients(self, chunk: Chunk, gradients: Sequence[Tensor | None]) -> None:
        """Let the computation wait for the rows of a chunk that arrive from other cards."""
        if len(self.context.cards) == 1:
            return
        device, is_whole = self._card.device, len(self.chunks) == 1
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                first = chunk.result_starts[place]
                stop = 1 << 62 if is_whole else first + chunk.result_rows[place]
                wait_for_rows(device, gradient, 0 if is_whole else first, stop)

    def finish_forward(self, tensors: Sequence[Tensor]) -> None:
        """Keep the inputs that the backward pass recomputes from, after all chunks have run."""
        self.given.finish_forward(tensors, self._card.activation_offload)
        if self.given.explores:
            states = [chunk.random.host for chunk in self.chunks if chunk.random is not None]
            self.unit.draws_on_host |= any(host and host.has_moved() for host in states)
        self.outputs.finish_forward()
        self._forward = False

    def record_again_whole(self) -> None:
        """Let the backward pass record the whole block anew from now on."""
        self.unit.records_again = True
        for chunk in self.chunks:
            chunk.tape = chunk.saved = None
        self.context.say(
            f"blocks of {type(self.unit.module).__name__} are computed again to their end in the "
            "backward pass: they keep views of weights, or their graph cannot be filled twice"
        )

    def _find_ends(self) -> None:
        """Find the graph nodes where the weights' gradients arrive, while the weights are on the
        device: torch makes other nodes once a parameter's data is in another device's memory."""
        self._trained = [(g, m) for g, m in self.unit.members if m.parameter.requires_grad]
        self._ends = gradient_ends([m.parameter for _, m in self._trained])

    def _record(self, chunk: Chunk, inputs: Sequence[Tensor]) -> list[Tensor]:
        try:
            results = self._record_graph(chunk, inputs)
        except RuntimeError as error:
            if WRITES_TO_A_LEAF not in str(error):
                raise
            self.given.refuse_write_to_leaf(error)
        if self.given.explores:
            refuse_foreign_inputs(self.unit, self.context.anchor, inputs, results, self._ends)
        if self._verifies:
            chunk.checked = checksum(results)
        return results

    def _record_graph(self, chunk: Chunk, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run one chunk so that its graph can be refilled, or plainly for a block whose graph is
        recorded again in the backward pass."""
        if self.unit.records_again:
            return self._compute(inputs, nullcontext)
        saved = Saved(self.unit.name, keeps=not self._recomputes)
        try:
            results = self._compute(inputs, saved.recording)
        except (CannotRefill, RuntimeError) as error:
            # torch.func refuses all saved tensor hooks, also those of torch.utils.checkpoint
            if isinstance(error, RuntimeError) and "saved tensor hooks" not in str(error):
                raise
            self.record_again_whole()
            self._begin_again(chunk, inputs)
            return self._compute(inputs, nullcontext)
        chunk.tape, chunk.saved = Tape(inputs, results), saved
        return results

    def _begin_again(self, chunk: Chunk, inputs: Sequence[Tensor]) -> None:
        """Restore arguments, random state and buffers to what they were before this chunk."""
        self.given.undo(inputs, slice(*chunk.span))
        assert chunk.random is not None
        chunk.random.restore(self._device)
        put_back(self.unit.module, self._buffers)

    # -- backward ----------------------------------------------------------------------------------

    def backward(
        self,
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        gradients: Sequence[Tensor | None],
    ) -> Iterator[tuple[Chunk, list[Tensor]]]:
        """Compute the weights' gradients, for the engine; yield each chunk with the inputs'
        (`wanted`).

        gradients: of the loss with respect to each result, of the whole batch.
        """
        for chunk in self.chunks:
            yield from self._of_chunk(chunk, tensors, wanted, gradients)

    def _of_chunk(
        self,
        chunk: Chunk,
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        gradients: Sequence[Tensor | None],
    ) -> Iterator[tuple[Chunk, list[Tensor]]]:
        """Compute a chunk's gradients. Where device memory runs out, again once inputs of other
        blocks have left it, or in two halves, which are chunks of their own."""
        self._await_gradients(chunk, gradients)
        try:
            found = self._backward(chunk, tensors, wanted, gradients)
        except torch.OutOfMemoryError as error:
            halves_it = self.context.retries_blocks or self.context.partly_updated
            if not (halves_it or self._card.watch.can_evict):
                raise
            ran_out = error.with_traceback(None)  # its frames hold what was computed
        else:
            yield chunk, self._handed(chunk, tensors, wanted, found)
            return
        parts = [chunk] if self._card.watch.ran_out() else []
        chunk.forget_graph()
        give_back(self._device)
        rows = chunk.span[1] - chunk.span[0]
        if not parts:
            try:
                parts = self._halves(chunk, tensors)
            except torch.OutOfMemoryError:  # trying one row found no room either
                parts = []
            if not parts:
                note_cure(self.unit, rows, ran_out)
                raise ran_out
            tell(self.context, self.unit, rows)
        ends = self._ends
        for part in parts:
            yield from self._of_chunk(part, tensors, wanted, gradients)
        self._ends = ends  # of the graphs that the other chunks have recorded

    def _halves(self, chunk: Chunk, tensors: Sequence[Tensor]) -> list[Chunk]:
        """Cut a chunk that ran out of memory in two; none where its halves compute something else:
        blocks that draw random numbers, write to buffers, or work on the whole batch."""
        given, unit = self.given, self.unit
        if self._buffers or chunk.span[1] - chunk.span[0] < 2:
            return []
        with self._autocast.again():
            if not any(given.cut):
                if not chunks_agree(unit, given.tree, tensors):
                    return []
                given.cut = splits(tensors, self.rows)
            if draws(unit, given.tree, slice_rows(tensors, given.cut, 0, 1), self._device):
                return []
        return chunk.halves()

    def _backward(
        self,
        chunk: Chunk,
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the gradients of a chunk's inputs (`wanted`) and of the weights."""
        arriving = [
            None if gradient is None else self._rows_of(gradient, chunk, position)
            for position, gradient in enumerate(gradients)
        ]
        found, module = None, self.unit.module
        if not self.unit.records_again and chunk.saved is not None:
            with as_before(module, self._buffers if self._recomputes else {}):
                found = self._backward_refilled(chunk, tensors, wanted, arriving)
        if found is None:
            with as_before(module, self._buffers):
                found = self._backward_recorded_again(chunk, tensors, wanted, arriving)
        return found

    def _handed(
        self,
        chunk: Chunk,
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        found: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Hand the weights' gradients to the engine; return the inputs'."""
        arrived = zip(self._trained, found[len(wanted) :], strict=True)
        self._card.gradients.add_all(
            (group, member, gradient)
            for (group, member), gradient in arrived
            if gradient is not None
        )
        parts = slice_rows(tensors, self.given.cut, *chunk.span)
        return [
            g if g is not None else torch.zeros_like(parts[i])
            for i, g in zip(wanted, found[: len(wanted)], strict=True)
        ]

    def _backward_refilled(
        self,
        chunk: Chunk,
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        arriving: Sequence[Tensor | None],
    ) -> list[Tensor | None] | None:
        """Run the refilled graph of the forward pass; None if refilling has become impossible."""
        assert chunk.tape is not None and chunk.saved is not None
        self._refill(chunk, chunk.saved, tensors)
        try:
            with chunk.saved.giving():
                return chunk.tape.backward(arriving, wanted, self._ends, again=True)
        except (CannotRefill, RuntimeError) as error:
            # a compiled block may overwrite what it saved unless its graph ends with this pass
            if isinstance(error, RuntimeError) and "donated buffers" not in str(error):
                raise
        self.record_again_whole()
        return None

    def _refill(self, chunk: Chunk, saved: Saved, tensors: Sequence[Tensor]) -> None:
        """Recompute one chunk as far as its backward needs, with its forward's random state."""
        if saved.is_full() and chunk.checked is None:
            return
        after = self._restore_random(chunk)
        inputs = self.given.inputs(tensors, chunk.span, again=True)

        def run() -> None:
            results = self._compute(inputs, saved.again)
            if chunk.checked is not None:
                refuse_other_results(self.unit.name, chunk.checked, results)

        try:
            saved.fill(run, to_the_end=chunk.checked is not None)
        finally:
            after.restore(self._device)
        saved.check()

    def _backward_recorded_again(
        self,
        chunk: Chunk,
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        arriving: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Record a second graph of the whole block, from its beginning, and run it backward."""
        after = self._restore_random(chunk)
        inputs = self.given.inputs(tensors, chunk.span, again=True)
        self._find_ends()
        try:
            results = self._compute(inputs, nullcontext)
        finally:
            after.restore(self._device)
        if chunk.checked is not None:
            refuse_other_results(self.unit.name, chunk.checked, results)
        return Tape(inputs, results).backward(arriving, wanted, self._ends, again=False)

    def _restore_random(self, chunk: Chunk) -> RandomState:
        """Restore the chunk's random state; return the present one, to continue with afterwards."""
        assert chunk.random is not None
        after = RandomState.now(self._device, host=chunk.random.host is not None)
        chunk.random.restore(self._device)
        return after

    def _rows_of(self, gradient: Tensor, chunk: Chunk, result: int) -> Tensor:
        """Take this chunk's rows of the gradient of one result."""
        if chunk is self.chunks[0] and len(self.chunks) == 1:
            return gradient
        start = chunk.result_starts[result]
        return gradient[start : start + chunk.result_rows[result]]

    def _compute(
        self, inputs: Sequence[Tensor], hooks: Callable[[], AbstractContextManager[None]]
    ) -> list[Tensor]:
        """Run the block on one chunk and return its results."""
        with torch.enable_grad(), self._autocast.again():
            arguments = self.given.tree.fill(inputs)
            with hooks(), self.capture.collecting() as extra:
                out = run_with(self.unit.original, arguments)
            tree, outputs = flatten((out, extra))
            results = own_outputs(self.unit, outputs, inputs)
        if self._forward:
            self.given.refuse_change(arguments, inputs)
            self.outputs.note_chunk(tree, results, inputs)
        return results


def _cut(
    context: Context, unit: Unit, tree: Tree, tensors: Sequence[Tensor]
) -> tuple[list[tuple[int, int]], Sequence[bool]]:
    """Choose the rows of each chunk, and which arguments are cut into them."""
    rows = batch_rows(tensors)
    if rows is None or not chunks(context, unit, rows, tree, tensors):
        return [(0, rows or 1)], [False] * len(tensors)
    return spans(rows, context.chunk_rows), splits(tensors, rows)
