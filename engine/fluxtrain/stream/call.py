"""One forward of a unit: its chunks, their graphs, and what runs them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.boundary import Parked
from fluxtrain.memory.group import Group, Member
from fluxtrain.stream.arguments import Tree, batch_rows, flatten, piece, splits
from fluxtrain.stream.buffers import Copies
from fluxtrain.stream.capture import Capture
from fluxtrain.stream.recompute import AskedTwice, Saved, Tape
from fluxtrain.stream.rng import Autocast, RandomState

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
        self.checksums: list[Tensor] = []
        self.boundary_bytes = 0
        self.parked: dict[int, Parked] = {}  # inputs that wait on the host
        self.buffers: Copies = {}  # before the forward, of those that it wrote to
        self.tapes: list[Tape] = []  # a chunk each
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

    def brought_back(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of this call: those that stayed, and those that waited on the host."""
        stayed = iter(saved)
        park, parked = self.unit.engine.park, self.parked
        return [
            park.fetch(parked[i]) if i in parked else next(stayed) for i in range(len(self.needs))
        ]

    def inputs(self, tensors: Sequence[Tensor], span: tuple[int, int]) -> list[Tensor]:
        """Detached inputs of one chunk that ask for gradients where the caller's do."""
        parts = piece(tensors, self.split, *span)
        return [
            part.detach().requires_grad_(needed)
            for part, needed in zip(parts, self.needs, strict=True)
        ]

    def find_ends(self) -> None:
        """Where the weights' gradients will arrive, while the weights are on the device: torch
        makes other ends once a parameter's data is in another device's memory."""
        members = self.unit.members()
        self.trained = [(g, m) for g, m in members if m.parameter.requires_grad]
        self.ends = [get_gradient_edge(m.parameter) for _, m in self.trained]

    def record(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the block on one chunk for its outputs and captured tensors, flattened; its graph is
        kept, and what it saves only if the unit keeps that."""
        saved = Saved(keeps=self.unit.keeps, gives_away=not self.unit.reads_twice)
        with torch.enable_grad(), self.autocast.again():
            self.out_tree, outputs = self._compute(inputs, saved.recording)
            self.tapes.append(Tape(saved, inputs, outputs))
        return outputs

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
        tape = self.tapes[index]
        arriving = [
            None if gradient is None else self._rows_of(gradient, index, position)
            for position, gradient in enumerate(gradients)
        ]
        self._refill(index, span, tensors)
        try:
            found = tape.backward(arriving, wanted, self.ends)
        except AskedTwice:
            self.unit.reads_twice, tape.saved.gives_away = True, False
            self._refill(index, span, tensors)
            found = tape.backward(arriving, wanted, self.ends)
        tape.saved.clear()
        for (group, member), gradient in zip(self.trained, found[len(wanted) :], strict=True):
            if gradient is not None:
                self.unit.engine.gradients.add(group, member, gradient)
        parts = piece(tensors, self.split, *span)
        return [
            g if g is not None else torch.zeros_like(parts[i])
            for i, g in zip(wanted, found[: len(wanted)], strict=True)
        ]

    def _rows_of(self, gradient: Tensor, chunk: int, output: int) -> Tensor:
        """This chunk's rows of the gradient of one output."""
        if len(self.spans) == 1:
            return gradient
        start = sum(rows[output] for rows in self.out_rows[:chunk])
        return gradient[start : start + self.out_rows[chunk][output]]

    def _refill(self, index: int, span: tuple[int, int], tensors: Sequence[Tensor]) -> None:
        """Compute one chunk again, as far as its backward needs, with the random state it had."""
        device, saved = self.unit.engine.device.torch_device, self.tapes[index].saved
        to_the_end = index < len(self.checksums)
        if saved.is_full() and not to_the_end:
            return
        after = RandomState.now(device)
        self.random[index].restore(device)
        inputs = self.inputs(tensors, span)

        def run() -> None:
            with torch.enable_grad(), self.autocast.again():
                _, outputs = self._compute(inputs, saved.again)
                self._check(index, outputs)

        saved.fill(run, to_the_end=to_the_end)
        after.restore(device)
        saved.check(self.unit.name)

    def _compute(
        self, inputs: Sequence[Tensor], hooks: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Tree, list[Tensor]]:
        """Run the block on one chunk; outputs and captured tensors, flattened."""
        given = [i.clone() for i in inputs] if self.unit.writes_inputs else inputs
        try:
            with hooks(), self.capture.collecting() as extra:
                out = run_with(self.unit.original, self.tree.fill(given))
        except RuntimeError as error:
            if self.unit.writes_inputs or "leaf Variable that requires grad" not in str(error):
                raise
            self.unit.writes_inputs = True
            self.random[-1].restore(self.unit.engine.device.torch_device)
            return self._compute(inputs, hooks)
        return flatten((out, extra))

    def _check(self, index: int, outputs: Sequence[Tensor]) -> None:
        """In the first steps: does the recomputed chunk equal the forward's?"""
        if index >= len(self.checksums):
            return
        before, now = float(self.checksums[index]), float(checksum(outputs))
        if abs(before - now) > 1e-3 * max(abs(before), 1e-6):
            raise MisusedModel(
                f"{self.unit.name} computed something else in the backward pass (checksum "
                f"{now:.6g}) than in the forward pass ({before:.6g}): was it switched between "
                "train and eval, or were adapters toggled, in between? Keep the model as it is "
                "from forward to backward"
            )


def spans(rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """[start, stop) of chunks of `chunk_rows`; the last may be shorter."""
    return [(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]


def checksum(outputs: Sequence[Tensor]) -> Tensor:
    """A scalar (float64) that changes when any output does."""
    floats = [
        torch.linalg.vector_norm(o.detach(), 1, dtype=torch.float64)  # without a copy in float64
        for o in outputs
        if o.is_floating_point()
    ]
    return torch.stack(floats).sum() if floats else torch.zeros((), dtype=torch.float64)


def run_with(
    function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> Any:
    """Call it with flattened-and-filled positional and keyword arguments."""
    args, kwargs = arguments
    return function(*args, **kwargs)
