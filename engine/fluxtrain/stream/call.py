"""One forward of a unit: its chunks, their graphs, and what runs them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.boundary import Parked
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.stream.argument_writes import WRITES_TO_A_LEAF, ArgumentWrites, new_tensor
from fluxtrain.stream.arguments import Tree, argument_name, batch_rows, flatten, piece, splits
from fluxtrain.stream.buffers import Copies, as_before, put_back
from fluxtrain.stream.capture import Capture
from fluxtrain.stream.checks import Sums, checksum, sums_of
from fluxtrain.stream.escapes import copied_out, refuse_strangers
from fluxtrain.stream.output_alias import OutputAlias, find_aliases, merged_aliases
from fluxtrain.stream.recompute import CannotRefill, Saved, Tape, aliased_leaf, gradient_ends
from fluxtrain.stream.rng import Autocast, RandomState
from fluxtrain.stream.shared_memory import version_counter, version_of

if TYPE_CHECKING:
    from fluxtrain.stream.block import Unit


class Call:
    """One forward of a unit: what its backward needs besides the saved tensors."""

    def __init__(self, unit: Unit, tree: Tree, capture: Capture) -> None:
        self.unit = unit
        self.tree = tree
        self.capture = capture
        self.autocast = Autocast.now(unit.engine.device.torch_device)
        self.training = unit.module.training
        self.versions = {g: g.version for g in unit.groups}
        self.spans: list[tuple[int, int]] = [(0, 1)]
        self.split: tuple[bool, ...] = ()
        self.needs: tuple[bool, ...] = ()  # which inputs ask for a gradient
        self.random: list[RandomState] = []
        self.out_tree: Tree | None = None
        self.out_rows: list[list[int]] = []  # per chunk and output: rows of the output
        self.verifies = False  # what is computed again is compared
        self.sums: list[Sums] = []
        self.boundary_bytes = 0
        self.parked: dict[int, Parked] = {}  # inputs that wait on the host
        self.buffers: Copies = {}  # before the forward, of those that it wrote to
        self.tapes: list[tuple[Tape, Saved]] = []  # a chunk each
        self.kind = (self.training, tree.structure())
        self.explores = self.kind not in unit.written_arguments  # the first call of this kind
        self.writes: ArgumentWrites | None = None  # watches the arguments during the forward pass
        self.copies: Mapping[int, Tensor] = {}  # of arguments before the block wrote to them
        self.keeps = unit.keeps
        self.aliases: list[list[OutputAlias]] = []  # of each output; by chunk
        self.returned: list[int] = []  # which results leave the autograd function
        self.results = 0  # how many there are
        self.watched: list[tuple[int, Tensor, int]] = []  # arguments, and their versions
        self.trained: list[tuple[Group, Member]] = []
        self.ends: list[GradientEdge] = []  # where the gradients of `trained` arrive

    def cut(self, tensors: Sequence[Tensor]) -> None:
        """Decide on the chunks of this call."""
        rows = batch_rows(tensors)
        engine = self.unit.engine
        self.split = tuple(False for _ in tensors)
        self.spans = [(0, rows or 1)]
        self.needs = tuple(t.requires_grad for t in tensors)
        if rows is None or not engine.chunks(self.unit, rows, self.tree, tensors):
            return
        self.spans = spans(rows, engine.chunk_rows)
        self.split = splits(tensors, rows)

    def watch_writes(self, tensors: Sequence[Tensor]) -> None:
        """Before the block runs: note its arguments, which it may write to."""
        unit = self.unit
        known = unit.written_arguments.get(self.kind)
        self.writes = ArgumentWrites(unit.name, unit.original, self.tree, tensors, known)

    def finish_forward(self, tensors: Sequence[Tensor], results: int) -> None:
        """All chunks have run: note what leaves the autograd function, and what the block did."""
        assert self.writes is not None
        self.copies, self.writes = self.writes.finish(tensors, self.split), None
        if self.explores:
            self.unit.note_kind(self.kind, frozenset(self.copies))
            self.unit.draws_on_host |= any(r.host and r.host.has_moved() for r in self.random)
        self.aliases = [merged_aliases(self.aliases)]
        self.returned = sorted({a.result for a in self.aliases[0] if a.result is not None})
        self.results = results

    def boundary(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the backward pass computes with again, but for what waits on the host: the inputs as
        they were before the block wrote to them."""
        for i, tensor in enumerate(tensors):
            if i not in self.copies:
                self.watched.append((i, version_counter(tensor), version_of(tensor)))
        return [self.copies.get(i, t) for i, t in enumerate(tensors) if i not in self.parked]

    def refuse_changed_arguments(self) -> None:
        """Raise MisusedModel when an argument was written to after the forward pass."""
        for i, counter, version in self.watched:
            if version_of(counter) != version:
                name = self._name(i)
                raise MisusedModel(
                    f"the tensor that {self.unit.name} was given as {name} was changed in place "
                    "after its forward pass, and the backward pass computes with it again: "
                    f"{new_tensor(name)} there, or hand the block a copy (.clone())"
                )

    def hand_out(self, flat: Sequence[Tensor], arguments: Sequence[Tensor]) -> Any:
        """The block's outputs and captured tensors as its caller sees them."""
        results = dict(zip(self.returned, flat, strict=True))
        assert self.out_tree is not None
        return self.out_tree.fill([alias.take(results, arguments) for alias in self.aliases[0]])

    def gradients_of_results(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """By result of the block: None where it did not leave the autograd function."""
        found = dict(zip(self.returned, gradients, strict=True))
        return [found.get(i) for i in range(self.results)]

    def brought_back(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of this call: those that stayed, and those that waited on the host."""
        stayed = iter(saved)
        park, parked = self.unit.engine.park, self.parked
        return [
            park.fetch(parked[i]) if i in parked else next(stayed) for i in range(len(self.needs))
        ]

    def inputs(
        self, tensors: Sequence[Tensor], span: tuple[int, int], *, again: bool = True
    ) -> list[Tensor]:
        """Inputs of one chunk, cut off, that ask for gradients where the caller's do. Computed
        again, a block writes to copies."""
        parts = piece(tensors, self.split, *span)
        if again and self.copies:
            parts = [part.clone() if i in self.copies else part for i, part in enumerate(parts)]
        with torch.enable_grad():
            return [
                aliased_leaf(part) if needed else part.detach()
                for part, needed in zip(parts, self.needs, strict=True)
            ]

    def find_ends(self) -> None:
        """Where the weights' gradients will arrive, while the weights are on the device: torch
        makes other ends once a parameter's data is in another device's memory."""
        self.trained = [(g, m) for g, m in self.unit.members if m.parameter.requires_grad]
        self.ends = gradient_ends([m.parameter for _, m in self.trained])

    def record(self, inputs: Sequence[Tensor], span: tuple[int, int]) -> list[Tensor]:
        """Run the block on one chunk for its results, which outputs and captured tensors are made
        of. Its graph is kept, and what it saves only if that is wanted."""
        before = sums_of(inputs) if self.verifies else []
        try:
            results = self._record(inputs, span)
        except RuntimeError as error:
            if self.writes is None or WRITES_TO_A_LEAF not in str(error):
                raise
            self.writes.refuse_write_to_leaf(self.needs, error)
        if self.explores:
            refuse_strangers(self.unit, inputs, results, self.ends)
        if self.verifies:
            self.sums.append(Sums(before, checksum(results)))
        return results

    def _record(self, inputs: Sequence[Tensor], span: tuple[int, int]) -> list[Tensor]:
        results = None if self.unit.records_again else self._record_to_refill(inputs, span)
        if results is None:
            with torch.enable_grad(), self.autocast.again():
                results = self._compute(inputs, nullcontext)
        return results

    def _begin_again(self, inputs: Sequence[Tensor], span: tuple[int, int]) -> None:
        """Let everything be as before the chunk under way."""
        assert self.writes is not None
        self.writes.undo(inputs, slice(*span), self.split)
        self.random[-1].restore(self.unit.engine.device.torch_device)
        put_back(self.unit.module, self.buffers)

    def _record_to_refill(
        self, inputs: Sequence[Tensor], span: tuple[int, int]
    ) -> list[Tensor] | None:
        """As `record`; None, with everything as before, for a block that has to be recorded again
        in the backward pass."""
        saved = Saved(self.unit.name, keeps=self.keeps)
        try:
            with torch.enable_grad(), self.autocast.again():
                results = self._compute(inputs, saved.recording)
        except (CannotRefill, RuntimeError) as error:
            # what torch.func computes refuses hooks, ours and those of torch.utils.checkpoint
            if isinstance(error, RuntimeError) and "saved tensor hooks" not in str(error):
                raise
            self.unit.record_again_whole()
            self._begin_again(inputs, span)
            return None
        self.tapes.append((Tape(inputs, results), saved))
        return results

    def backward(
        self,
        index: int,
        span: tuple[int, int],
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Give one chunk's weight gradients to the engine; its gradients of the inputs `wanted`.

        gradients: of the loss by each output, of the whole batch.
        """
        arriving = [
            None if gradient is None else self._rows_of(gradient, index, position)
            for position, gradient in enumerate(gradients)
        ]
        found, module = None, self.unit.module
        if not self.unit.records_again:
            with as_before(module, {} if self.keeps else self.buffers):
                found = self._backward_refilled(index, span, tensors, wanted, arriving)
        if found is None:
            with as_before(module, self.buffers):
                found = self._backward_recorded_again(index, span, tensors, wanted, arriving)
        arrived = zip(self.trained, found[len(wanted) :], strict=True)
        self.unit.engine.gradients.add_all(
            (group, member, gradient)
            for (group, member), gradient in arrived
            if gradient is not None
        )
        parts = piece(tensors, self.split, *span)
        return [
            g if g is not None else torch.zeros_like(parts[i])
            for i, g in zip(wanted, found[: len(wanted)], strict=True)
        ]

    def _backward_refilled(
        self,
        index: int,
        span: tuple[int, int],
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        arriving: Sequence[Tensor | None],
    ) -> list[Tensor | None] | None:
        """By the graph of the forward pass; None if that cannot be, now and from now on."""
        tape, saved = self.tapes[index]
        self._refill(index, span, tensors)
        try:
            with saved.giving():
                return tape.backward(arriving, wanted, self.ends, again=True)
        except (CannotRefill, RuntimeError) as error:
            # a compiled block may overwrite what it saved unless its graph ends with this pass
            if isinstance(error, RuntimeError) and "donated buffers" not in str(error):
                raise
        self.unit.record_again_whole()
        return None

    def _backward_recorded_again(
        self,
        index: int,
        span: tuple[int, int],
        tensors: Sequence[Tensor],
        wanted: Sequence[int],
        arriving: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """By a second graph, recorded from the beginning of the block to its end."""
        device = self.unit.engine.device.torch_device
        after = RandomState.now(device, host=self.random[index].host is not None)
        self.random[index].restore(device)
        inputs = self.inputs(tensors, span)
        self.find_ends()
        with torch.enable_grad(), self.autocast.again():
            results = self._compute(inputs, nullcontext)
        after.restore(device)
        if index < len(self.sums):
            self.sums[index].compare(self.unit, self.tree, inputs, results)
        return Tape(inputs, results).backward(arriving, wanted, self.ends, again=False)

    def _name(self, argument: int) -> str:
        return argument_name(self.unit.original, self.tree, argument)

    def _rows_of(self, gradient: Tensor, chunk: int, output: int) -> Tensor:
        """This chunk's rows of the gradient of one output."""
        if len(self.spans) == 1:
            return gradient
        start = sum(rows[output] for rows in self.out_rows[:chunk])
        return gradient[start : start + self.out_rows[chunk][output]]

    def _refill(self, index: int, span: tuple[int, int], tensors: Sequence[Tensor]) -> None:
        """Compute one chunk again, as far as its backward needs, with the random state it had."""
        device, saved = self.unit.engine.device.torch_device, self.tapes[index][1]
        verifies = index < len(self.sums)
        if saved.is_full() and not verifies:
            return
        after = RandomState.now(device, host=self.random[index].host is not None)
        self.random[index].restore(device)
        inputs = self.inputs(tensors, span)

        def run() -> None:
            with torch.enable_grad(), self.autocast.again():
                results = self._compute(inputs, saved.again)
            if verifies:
                self.sums[index].compare(self.unit, self.tree, inputs, results)

        saved.fill(run, to_the_end=verifies)
        after.restore(device)
        saved.check()

    def _compute(
        self,
        inputs: Sequence[Tensor],
        hooks: Callable[[], AbstractContextManager[None]],
    ) -> list[Tensor]:
        """Run the block on one chunk; its results (see `record`)."""
        arguments = self.tree.fill(inputs)
        with hooks(), self.capture.collecting() as extra:
            out = run_with(self.unit.original, arguments)
        if self.writes is not None:
            self.writes.refuse_change(arguments, inputs, self.needs)
        out_tree, outputs = flatten((out, extra))
        outputs = copied_out(self.unit, outputs)
        aliases, results = find_aliases(outputs, inputs, whole=len(self.spans) == 1)
        if self.writes is not None:  # in the forward pass
            self.out_tree = out_tree
            self.aliases.append(aliases)
        return results


def spans(rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """[start, stop) of chunks of `chunk_rows`; the last may be shorter."""
    return [(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]


def run_with(
    function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> Any:
    """Call it with flattened-and-filled positional and keyword arguments."""
    args, kwargs = arguments
    return function(*args, **kwargs)
