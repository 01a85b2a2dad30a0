"""The graph of one chunk of a block: recorded in the forward pass, filled again for the backward.

The forward pass lets autograd record the block, but the tensors that it saves are only counted.
Before the backward pass the block runs again on the kept inputs, and the tensors that it saves fill
the counted places. That run ends as soon as the last place is filled: what only the output needs
(the last product of a transformer block, a fifth of its forward) is not computed a second time.
Then the recorded graph runs backward. A chunk may also keep its saved tensors; then nothing is
recomputed.

A block for which this is impossible (`CannotRefill`, and what `Call` and `BoundWeights` find) is
recorded again from its beginning to its end, and that graph runs backward.

The principle is that of torch.utils.checkpoint's non-reentrant variant with early stop (PyTorch 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import (
    GradientEdge,
    _engine_run_backward,
    get_gradient_edge,
    saved_tensors_hooks,
)

from fluxtrain.core.guards.shared_memory import without_memory
from fluxtrain.errors import MisusedModel

_TOLERANCE = 1e-3  # relative, of checksums; other kernels may be chosen the second time


class _Enough(BaseException):
    """Ends a recomputation once all saved tensors are filled. Not an Exception: a block may catch
    those."""


class CannotRefill(BaseException):
    """The graph asks for a missing saved tensor: the block must be recorded again. Not an
    Exception: a block may catch those."""


class Saved:
    """The tensors that autograd saves of one chunk, in the order of saving.

    The recorded graph owns this object through its hooks, so it must not own the graph. Each tensor
    is handed out once, so that its memory is free after its use.
    """

    def __init__(self, name: str, *, keeps: bool) -> None:
        self._name = name  # of the block
        self._keeps = keeps  # from the forward pass on
        self._recording = False
        self._giving = False  # the graph runs backward from the block's own outputs
        self._count = 0  # recorded
        self._filled = 0  # by the last run of `fill`
        self._to_the_end = False
        self._found: dict[int, tuple[Tensor, int]] = {}  # with the version when it was saved

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the tensors that autograd saves inside the context; keep them if this chunk keeps
        its tensors."""
        self._count = 0
        self._found.clear()
        self._recording = True
        try:
            with saved_tensors_hooks(self._record, self._give):
                yield
        finally:
            self._recording = False

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Let the recorded graph run backward inside the context; free unused tensors
        at its end."""
        self._giving = True
        try:
            yield
        finally:
            self._giving = False
            self.clear()

    def is_full(self) -> bool:
        """Return whether every counted tensor was saved."""
        return len(self._found) == self._count

    def fill(self, run: Callable[[], None], *, to_the_end: bool) -> None:
        """Call `run`, which recomputes the chunk under `again`. It ends early, as soon as all
        places are full, unless `to_the_end`."""
        self._to_the_end = to_the_end
        try:
            run()
        except _Enough as enough:
            # Its frames hold activations, and through their callers the whole backward pass. A
            # context manager made of a generator would tie them to themselves until a collection.
            enough.__traceback__ = None

    def again(self) -> saved_tensors_hooks:
        """Return a context in which the tensors that autograd saves fill the counted places."""
        self._filled = 0
        self._found.clear()
        return saved_tensors_hooks(self._fill, _never)

    def check(self) -> None:
        """Raise MisusedModel when `fill` saved another number of tensors than was counted."""
        if self._filled != self._count:
            self.clear()
            raise MisusedModel(
                f"{self._name} computed something else in the backward pass ({self._filled} saved "
                f"tensors) than in the forward pass ({self._count}): does it depend on something "
                "that changed in between, such as a flag, a counter or a random generator of its "
                "own? Keep the model as it is from forward to backward"
            )

    def clear(self) -> None:
        """Free the remaining tensors."""
        self._found.clear()

    def _record(self, tensor: Tensor) -> int:
        place = self._count
        self._count += 1
        if self._keeps:
            self._found[place] = tensor.detach(), tensor._version
        return place

    def _fill(self, tensor: Tensor) -> None:
        self._found[self._filled] = tensor.detach(), tensor._version
        self._filled += 1
        if self._filled == self._count and not self._to_the_end:
            raise _Enough

    def _give(self, place: int) -> Tensor:
        if self._recording:
            raise CannotRefill("the block runs backward inside of its own forward pass")
        if not self._giving:
            raise MisusedModel(
                "a tensor that was computed inside of a wrapped block is part of the loss, but the "
                "block did not return it: return such tensors (of an auxiliary loss, say) from "
                "the block, or .detach() them"
            )
        if place not in self._found:
            raise CannotRefill("a function of the block asks for its saved tensors twice")
        found, version = self._found.pop(place)
        if found._version != version:  # hooks take this check from autograd
            raise MisusedModel(
                f"a tensor that {self._name} computed and needs in its backward pass was changed "
                "in place after that, in the block or by code that got it as an output: compute a "
                "new tensor there (y = y + 1, not y += 1)"
            )
        return found


class Tape:
    """The recorded graph of one chunk: where gradients enter it and where they are wanted."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._outputs = [_edge(output) for output in outputs]
        self._inputs = [_edge(given) for given in inputs]

    def backward(
        self,
        gradients: Sequence[Tensor | None],
        wanted: Sequence[int],
        parameters: Sequence[GradientEdge],
        *,
        again: bool,
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs `wanted` and of the parameters; None if not reached.

        gradients: of the loss with respect to each output. again: the graph may run backward again.
        """
        pairs = [
            (output, gradient)
            for output, gradient in zip(self._outputs, gradients, strict=True)
            if output is not None and gradient is not None
        ]
        edges = [self._inputs[i] for i in wanted]
        ends = [edge for edge in (*edges, *parameters) if edge is not None]
        if not pairs or not ends:
            return [None] * (len(wanted) + len(parameters))
        found = iter(_run_backward(pairs, ends, again=again))
        return [None if edge is None else next(found) for edge in (*edges, *parameters)]


def _run_backward(
    pairs: Sequence[tuple[GradientEdge, Tensor]], ends: Sequence[GradientEdge], *, again: bool
) -> tuple[Tensor | None, ...]:
    """Do what `torch.autograd.grad(..., allow_unused=True)` does, without its checks, which take as
    long as ten nodes of the graph; autograd's engine checks shapes and types itself."""
    outputs, gradients = zip(*pairs, strict=True)
    found: tuple[Tensor | None, ...] = _engine_run_backward(
        outputs, gradients, again, False, tuple(ends), True, accumulate_grad=False
    )
    return found


def checksum(results: Sequence[Tensor]) -> Tensor:
    """Return a scalar (float64) that changes when any result does."""
    floats = [_norm_of(r.detach()) for r in results if r.is_floating_point()]
    return torch.stack(floats).sum() if floats else torch.zeros((), dtype=torch.float64)


def refuse_other_results(name: str, checked: Tensor, results: Sequence[Tensor]) -> None:
    """Raise MisusedModel when a block's recomputed results differ from those whose checksum the
    forward pass has taken."""
    before, now = float(checked), float(checksum(results))
    if abs(before - now) > _TOLERANCE * max(abs(before), 1e-6):
        raise MisusedModel(
            f"{name} computed something else in the backward pass (checksum {now:.6g}) than in the "
            f"forward pass ({before:.6g}): was it switched between train and eval, were adapters "
            "toggled, or was one of its arguments written to in a way that torch does not count "
            "(.data, .numpy())? Keep the model and its inputs as they are from forward to "
            "backward, and compute new tensors (x = x + 1). Or does it draw from a random "
            "generator of its own (torch.Generator, numpy's default_rng)? Only the global ones of "
            "torch, numpy and Python are set back to draw the same again: use these"
        )


def _norm_of(tensor: Tensor) -> Tensor:
    """Compute the norm in fp32, for which a GPU reads 16-bit values directly: for float64 torch
    would first make a copy four times as large as the tensor."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, 1, dtype=dtype)
    return norm.double()


def aliased_leaf(tensor: Tensor) -> Tensor:
    """Make an input for a block's graph: an alias of a leaf whose memory is given up.

    A graph owns its leaves as long as it lives, and must not hold the input's memory. The alias is
    like any other activation: a block that stores it, on `ctx` or on itself, keeps its memory.
    """
    leaf = tensor.detach().requires_grad_()
    alias = leaf.view_as(leaf)
    leaf.data = without_memory(leaf.dtype, leaf.device)
    return alias


def gradient_ends(leaves: Sequence[Tensor]) -> list[GradientEdge]:
    """Return the graph edge where each leaf's gradient arrives. `get_gradient_edge` of each leaf
    takes ten times as long, since it records one node a leaf; here torch's node for late errors
    takes all leaves at once."""
    if len(leaves) < 2:  # of one it returns no tuple
        return [get_gradient_edge(leaf) for leaf in leaves]
    with torch.enable_grad():
        aliases: Any = torch._C._functions.DelayedError("", len(leaves))(*leaves)
    return [GradientEdge(node, place) for node, place in aliases[0].grad_fn.next_functions]


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _never(_: object) -> Tensor:
    raise AssertionError("the graph of a recompute is never run backward")
