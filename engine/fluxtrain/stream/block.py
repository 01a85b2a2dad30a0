"""One unit of computation: a block whose weights are on the device only while it runs.

The forward pass keeps the inputs and drops everything else; the backward pass brings the weights
in again, recomputes, and hands the weights' gradients to the engine. A batch is cut into chunks of
rows: the weights are loaded once, each chunk runs in turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.boundary import Parked
from fluxtrain.memory.group import Group, Member
from fluxtrain.stream.arguments import (
    Tree,
    batch_rows,
    flatten,
    has_cache,
    piece,
    refuse_hidden_gradients,
    splits,
    to_device,
    without_caches,
)
from fluxtrain.stream.buffers import Copies, WrittenBuffers, as_before
from fluxtrain.stream.capture import Capture, active_collector
from fluxtrain.stream.head import LazyLogits
from fluxtrain.stream.rng import Autocast, RandomState

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine

_CHECKED_RECOMPUTES = 3


class Unit:
    """A module that computes as one: a block, or an edge such as the embedding."""

    def __init__(
        self, engine: Engine, name: str, module: nn.Module, position: int, group: Group
    ) -> None:
        self._engine = weakref.ref(engine)
        self._module = weakref.ref(module)
        self.name = name
        self.position = position
        self.group = group  # the group it owns
        self.borrowed: dict[Group, list[Member]] = {}  # members of other groups it computes with
        self.places: list[tuple[nn.Module, str, Member]] = []  # where its parameters are registered
        self.original: Callable[..., Any] = module.forward
        self.is_head = False  # its output may stay uncomputed (LazyLogits)
        self.chunkable: dict[tuple[Any, ...], bool] = {}  # by mode and by what carries the batch
        self.written = WrittenBuffers()
        self.writes_inputs = False  # x.add_(...), ReLU(inplace=True): it is given copies
        self.checked = 0

    @property
    def engine(self) -> Engine:
        engine = self._engine()
        assert engine is not None, "the wrapped model is gone"
        return engine

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the wrapped block is gone"
        return module

    @property
    def groups(self) -> list[Group]:
        return [g for g in (self.group, *self.borrowed) if g.members]

    def members(self) -> Iterator[tuple[Group, Member]]:
        """Every parameter that this unit computes with."""
        for member in self.group.members:
            yield self.group, member
        for group, members in self.borrowed.items():
            for member in members:
                yield group, member

    def members_of(self, group: Group) -> list[Member]:
        return group.members if group is self.group else self.borrowed[group]

    def check_identity(self) -> None:
        """Raise when a parameter was replaced by another object since `wrap`."""
        for module, name, member in self.places:
            if module._parameters.get(name) is not member.parameter:
                raise MisusedModel(
                    f"{self.name}: the parameter {member.name} was replaced after fluxtrain.wrap "
                    "(load_state_dict(assign=True), adapters or resizing): do that before wrap, or "
                    "fluxtrain.unwrap(model), change it and wrap again"
                )
            if not member.trained and member.parameter.requires_grad and torch.is_grad_enabled():
                raise MisusedModel(
                    f"{self.name}: {member.name} was frozen when the model was wrapped and asks "
                    "for gradients now: fluxtrain.unwrap(model), thaw it and wrap again"
                )

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, materialise: bool = False
    ) -> Any:
        """What replaces the module's forward."""
        engine = self.engine
        engine.before(self)
        args, kwargs = to_device((args, kwargs), engine.device.torch_device)
        if self.is_head and not materialise and not kwargs and len(args) == 1:
            autocast = torch.is_autocast_enabled(engine.device.torch_device.type)
            if (torch.is_grad_enabled() or engine.lazy_without_gradients) and not autocast:
                linear = self.module
                dtype = torch.promote_types(args[0].dtype, linear.weight.dtype)  # type: ignore[arg-type]
                return LazyLogits.of(self, args[0], dtype, self.group_of_weight().version)
        if not torch.is_grad_enabled():
            return self._without_gradients(args, kwargs)
        args, kwargs = without_caches(self.name, args, kwargs)
        tree, tensors = flatten((args, kwargs))
        refuse_hidden_gradients(self.name, tree)
        collector = active_collector()
        call = Call(self, tree, Capture.of(collector))
        call.cut(tensors)
        flat = _Streamed.apply(call, engine.anchor, *tensors)  # type: ignore[no-untyped-call]
        assert call.out_tree is not None
        out, extra = call.out_tree.fill(flat)
        call.capture.put_back(collector, extra)
        return out

    def group_of_weight(self) -> Group:
        """The group that holds the head's weight (the embedding's, when tied)."""
        return next(g for g, m in self.members() if m.parameter is self.module.weight)

    def _without_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self.engine
        tree, tensors = flatten((args, kwargs))
        rows = batch_rows(tensors)
        whole = (
            has_cache(args, kwargs)
            or rows is None
            or active_collector() is not None
            or not engine.chunks(self, rows, tree, tensors)
        )
        with engine.bound(self):
            if whole:
                return self.original(*args, **kwargs)
            assert rows is not None
            split = splits(tensors, rows)
            outs = [
                flatten(_call(self.original, tree.fill(piece(tensors, split, a, b))))
                for a, b in spans(rows, engine.chunk_rows)
            ]
        merged = [torch.cat(parts) for parts in zip(*(t for _, t in outs), strict=True)]
        return outs[0][0].fill(merged)

    def try_chunks(self, tree: Tree, tensors: Sequence[Tensor], rows: int) -> bool:
        """Do chunks give what the whole gives? Tried once for each mode and each way to cut."""
        key = (self.module.training, splits(tensors, rows))
        if key not in self.chunkable:
            from fluxtrain.stream.chunking import chunks_agree

            with self.engine.bound(self, "probe"):
                self.chunkable[key] = chunks_agree(self, tree, tensors)
            if not self.chunkable[key]:
                self.engine.say(
                    f"{self.name} gives other results for chunks than for the whole batch: it "
                    "runs on the whole batch"
                )
        return self.chunkable[key]


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

    def compute(self, inputs: Sequence[Tensor]) -> tuple[Tree, list[Tensor]]:
        """Run the block on one chunk; outputs and captured tensors, flattened."""
        given = [i.clone() for i in inputs] if self.unit.writes_inputs else inputs
        try:
            with self.capture.collecting() as extra:
                out = _call(self.unit.original, self.tree.fill(given))
        except RuntimeError as error:
            if self.unit.writes_inputs or "leaf Variable that requires grad" not in str(error):
                raise
            self.unit.writes_inputs = True
            self.random[-1].restore(self.unit.engine.device.torch_device)
            return self.compute(inputs)
        return flatten((out, extra))

    def check(self, index: int, outputs: Sequence[Tensor]) -> None:
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


class _Streamed(torch.autograd.Function):
    """Forward without keeping activations, backward with recomputation."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        unit, engine = call.unit, call.unit.engine
        ctx.call, ctx.anchor_node = call, engine.anchor_node
        ctx.set_materialize_grads(False)
        call.parked = engine.park.park(tensors, call.needs) if engine.plan.parks else {}
        ctx.save_for_backward(*(t for i, t in enumerate(tensors) if i not in call.parked))
        verify = unit.checked < _CHECKED_RECOMPUTES
        parts: list[list[Tensor]] = []
        with engine.bound(unit):
            buffers = unit.written.before(unit.module)
            for span in call.spans:
                call.random.append(RandomState.now(engine.device.torch_device))
                with torch.enable_grad(), _nothing_saved(), call.autocast.again():
                    call.out_tree, outputs = call.compute(call.inputs(tensors, span))
                if verify:
                    call.checksums.append(checksum(outputs))
                parts.append(outputs)
            call.buffers = unit.written.after(unit.module, buffers)
        engine.after_forward(unit)
        call.boundary_bytes = sum(
            t.nbytes for i, t in enumerate(tensors) if call.needs[i] and i not in call.parked
        )
        ctx.boundary = engine.hold_boundary(call.boundary_bytes)
        call.out_rows = [[o.shape[0] if o.dim() else 1 for o in part] for part in parts]
        differentiable = [o.requires_grad for o in parts[0]]
        merged = [
            (chunks[0] if len(parts) == 1 else torch.cat(chunks)).detach()
            for chunks in zip(*parts, strict=True)
        ]
        del parts
        ctx.mark_non_differentiable(
            *(o for o, d in zip(merged, differentiable, strict=True) if not d)
        )
        return tuple(merged)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        unit, engine = call.unit, call.unit.engine
        engine.begin_backward(unit, call, ctx.anchor_node)
        tensors = call.brought_back(ctx.saved_tensors)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        sums: list[Tensor | None] = [None] * len(tensors)
        pieces: dict[int, list[Tensor]] = {i: [] for i in wanted}
        with engine.bound(unit, "backward"), as_before(unit.module, call.buffers):
            for index, span in enumerate(call.spans):
                found = _chunk_backward(call, index, span, tensors, wanted, gradients)
                for i, gradient in zip(wanted, found, strict=True):
                    if call.split[i]:
                        pieces[i].append(gradient)
                    else:
                        so_far = sums[i]
                        sums[i] = gradient if so_far is None else so_far + gradient
        for i, chunks in pieces.items():
            if chunks:
                sums[i] = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        ctx.boundary.close()
        engine.after_backward(unit)
        unit.checked += 1
        return (None, None, *sums)


def _chunk_backward(
    call: Call,
    index: int,
    span: tuple[int, int],
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """Recompute one chunk, give its weight gradients to the engine, return its input gradients."""
    unit, engine = call.unit, call.unit.engine
    inputs = call.inputs(tensors, span)
    after = RandomState.now(engine.device.torch_device)
    call.random[index].restore(engine.device.torch_device)
    with torch.enable_grad(), call.autocast.again():
        _, outputs = call.compute(inputs)
    after.restore(engine.device.torch_device)
    call.check(index, outputs)
    pairs = [
        (output, _rows_of(gradient, call, index, position))
        for position, (output, gradient) in enumerate(zip(outputs, gradients, strict=True))
        if gradient is not None and output.requires_grad
    ]
    members = [(g, m) for g, m in unit.members() if m.parameter.requires_grad]
    leaves = [inputs[i] for i in wanted] + [m.parameter for _, m in members]
    if not pairs or not leaves:
        return [torch.zeros_like(inputs[i]) for i in wanted]
    found: Sequence[Tensor | None] = torch.autograd.grad(
        [o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
    )
    for (group, member), gradient in zip(members, found[len(wanted) :], strict=True):
        if gradient is not None:
            engine.gradients.add(group, member, gradient)
    return [
        g if g is not None else torch.zeros_like(inputs[i])
        for i, g in zip(wanted, found[: len(wanted)], strict=True)
    ]


def _rows_of(gradient: Tensor, call: Call, chunk: int, output: int) -> Tensor:
    """This chunk's rows of the gradient of one output."""
    if len(call.spans) == 1:
        return gradient
    start = sum(rows[output] for rows in call.out_rows[:chunk])
    return gradient[start : start + call.out_rows[chunk][output]]


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


@contextmanager
def _nothing_saved() -> Iterator[None]:
    """Autograd records, so that kernels are chosen as in the recompute, but keeps no tensor."""

    def never(_: object) -> Tensor:
        raise AssertionError("a streamed block's forward graph is never run backward")

    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, never):
        yield


def _call(function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = arguments
    return function(*args, **kwargs)
