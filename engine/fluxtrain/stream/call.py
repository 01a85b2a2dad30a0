"""One forward of a unit: its chunks, their graphs, and what runs them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.boundary import Parked
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.stream.arguments import Tree, argument_name, batch_rows, flatten, piece, splits
from fluxtrain.stream.buffers import Copies, as_before, put_back
from fluxtrain.stream.capture import Capture
from fluxtrain.stream.checks import Sums, checksum, sums_of
from fluxtrain.stream.escapes import copied_out, refuse_strangers
from fluxtrain.stream.in_place import (
    Given,
    Source,
    merged_sources,
    new_tensor,
    overlap,
    same_layout_copy,
    sources_of,
    version_counter,
    version_of,
)
from fluxtrain.stream.recompute import CannotRefill, Saved, Tape, aliased_leaf, gradient_ends
from fluxtrain.stream.rng import Autocast, RandomState

if TYPE_CHECKING:
    from fluxtrain.stream.block import Unit

_WRITES_TO_A_LEAF = "leaf Variable that requires grad is being used in an in-place operation"


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
        known = unit.habits.of(self.training, tree)
        self.explores = known is None  # the first call of this kind: all arguments are copied
        self.written = known or frozenset[int]()  # arguments that it may write to in place
        self.did_write = frozenset[int]()
        self.uncounted = frozenset[int]()  # of those, by `.data` and the like
        self.keeps = unit.keeps and not self.explores  # or the copies would be kept
        self.sources: list[list[Source]] = []  # of each output; by chunk
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

    def settle(self, tensors: Sequence[Tensor], results: int) -> None:
        """All chunks have run: what leaves the autograd function, and what its arguments became."""
        for i in sorted(self.did_write):
            if any(j != i and overlap(tensors[i], other) for j, other in enumerate(tensors)):
                raise MisusedModel(
                    f"{self.unit.name} wrote to its argument {self._name(i)} in place, and another "
                    "argument shares memory with it, which would not see that: hand the block "
                    "a copy of one of the two (.clone())"
                )
        if self.explores:
            if self.unit.habits.learn(self.training, self.tree, self.written):
                self.unit.note_ever_other_arguments()
            self.unit.draws_on_host |= any(r.host and r.host.has_moved() for r in self.random)
        self.sources = [merged_sources(self.sources)]
        own = results - len(self.written)
        needed = {s.result for s in self.sources[0] if s.result is not None}
        self.returned = sorted(needed)
        self.returned += [
            own + place for place, i in enumerate(sorted(self.written)) if i in self.did_write
        ]
        self.results = results

    def boundary(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the backward pass computes with again, but for what waits on the host: the inputs,
        and copies of those whose memory is written to next."""
        for i in self.did_write & self.parked.keys():
            self.parked[i].transfer.wait_compute("activations")
        for i, tensor in enumerate(tensors):
            if i not in self.did_write:
                self.watched.append((i, version_counter(tensor), version_of(tensor)))
        return [
            same_layout_copy(tensor) if i in self.did_write else tensor
            for i, tensor in enumerate(tensors)
            if i not in self.parked
        ]

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
        """The block's outputs and captured tensors as its caller sees them; what it wrote to its
        arguments is written to them."""
        changed = sorted(self.did_write)
        for i, values in zip(changed, flat[len(flat) - len(changed) :], strict=True):
            theirs = arguments[i]
            past = i in self.uncounted and theirs.is_leaf and theirs.requires_grad
            (theirs.detach() if past else theirs).copy_(values)  # torch refuses to, with gradients
        results = dict(zip(self.returned, flat, strict=True))
        assert self.out_tree is not None
        return self.out_tree.fill([s.take(results, arguments) for s in self.sources[0]])

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

    def inputs(self, tensors: Sequence[Tensor], span: tuple[int, int]) -> list[Tensor]:
        """Inputs of one chunk, cut off, that ask for gradients where the caller's do."""
        parts = piece(tensors, self.split, *span)
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

    def record(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the block on one chunk for its results: what outputs and captured tensors are made
        of, and the new values of the arguments that it writes to. Its graph is kept, and what it
        saves only if that is wanted."""
        before = sums_of(inputs) if self.verifies else []
        try:
            results = self._record(inputs)
        except RuntimeError as error:
            if self.explores or _WRITES_TO_A_LEAF not in str(error):
                raise
            self.explores, self.keeps = True, False
            self._begin_again()
            results = self._record(inputs)
        if self.training not in self.unit.traced:
            refuse_strangers(self.unit, inputs, results, self.ends)
            self.unit.traced.add(self.training)
        if self.verifies:
            self.sums.append(Sums(before, checksum(results)))
        return results

    def _record(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = None if self.unit.records_again else self._record_to_refill(inputs)
        if results is None:
            with torch.enable_grad(), self.autocast.again():
                results = self._compute(inputs, nullcontext, forward=True)
        return results

    def _begin_again(self) -> None:
        """Everything is as before the chunk under way."""
        self.random[-1].restore(self.unit.engine.device.torch_device)
        put_back(self.unit.module, self.buffers)

    def _record_to_refill(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """As `record`; None, with everything as before, for a block that has to be recorded again
        in the backward pass."""
        saved = Saved(self.unit.name, keeps=self.keeps)
        try:
            with torch.enable_grad(), self.autocast.again():
                results = self._compute(inputs, saved.recording, forward=True)
        except (CannotRefill, RuntimeError) as error:
            # what torch.func computes refuses hooks, ours and those of torch.utils.checkpoint
            if isinstance(error, RuntimeError) and "saved tensor hooks" not in str(error):
                raise
            self.unit.record_again_whole()
            self._begin_again()
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

    def _note_writes(self, written: frozenset[int]) -> None:
        """The chunk under way wrote to these arguments."""
        if self.explores and not self.sources:
            self.written |= written
        name = next((self._name(i) for i in sorted(written - self.written)), None)
        if name is not None:
            raise MisusedModel(
                f"{self.unit.name} wrote to its argument {name} in place for some rows of the "
                f"batch and not for others: {new_tensor(name)} instead"
            )
        shared = [i for i in sorted(written) if len(self.spans) > 1 and not self.split[i]]
        if shared:
            raise MisusedModel(
                f"{self.unit.name} wrote in place to its argument {self._name(shared[0])}, which "
                "all rows of the batch share, and would do so once for each chunk of rows: "
                "compute a new tensor instead"
            )
        self.did_write |= written

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

        saved.fill(run, to_the_end=verifies or bool(self.uncounted))
        after.restore(device)
        saved.check()

    def _compute(
        self,
        inputs: Sequence[Tensor],
        hooks: Callable[[], AbstractContextManager[None]],
        *,
        forward: bool = False,
    ) -> list[Tensor]:
        """Run the block on one chunk; its results (see `record`)."""
        explores = forward and self.explores
        copied = frozenset(range(len(inputs))) if explores else self.written
        given = Given(self.tree, inputs, copied, explores=explores)
        try:
            with hooks(), self.capture.collecting() as extra:
                out = run_with(self.unit.original, given.arguments)
        except RuntimeError as error:
            if _WRITES_TO_A_LEAF in str(error):
                given.refuse_lost(self.unit)
            raise
        given.refuse_lost(self.unit)
        out_tree, outputs = flatten((out, extra))
        outputs = copied_out(self.unit, outputs)
        if forward:
            self.out_tree = out_tree
            uncounted = given.uncounted()
            self.uncounted |= uncounted
            self._note_writes(given.counted() | uncounted)
        sources, results = sources_of(outputs, given.tensors, whole=len(self.spans) == 1)
        if forward:
            self.sources.append(sources)
        return results + [given.tensors[i] for i in sorted(self.written)]


def spans(rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """[start, stop) of chunks of `chunk_rows`; the last may be shorter."""
    return [(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]


def run_with(
    function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> Any:
    """Call it with flattened-and-filled positional and keyword arguments."""
    args, kwargs = arguments
    return function(*args, **kwargs)
