"""One unit of computation: a block whose weights are on the device only while it runs.

The forward pass keeps the inputs and drops everything else; the backward pass brings the weights
in again, recomputes, and hands the weights' gradients to the engine. A batch is cut into chunks of
rows: the weights are loaded once, each chunk runs in turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.errors import Diverged, MisusedModel
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.memory.slices import WeightSlices
from fluxtrain.stream.arguments import (
    Tree,
    ambiguous,
    batch_rows,
    flatten,
    has_cache,
    piece,
    refuse_hidden_gradients,
    splits,
    to_device,
    without_caches,
)
from fluxtrain.stream.buffers import WrittenBuffers
from fluxtrain.stream.call import Call, run_with, spans
from fluxtrain.stream.capture import Capture, active_collector
from fluxtrain.stream.escapes import BoundWeights
from fluxtrain.stream.head import LazyLogits
from fluxtrain.stream.head_slices import sliced_logits
from fluxtrain.stream.in_place import Habits, chunk_outputs, write_back
from fluxtrain.stream.rng import RandomState
from fluxtrain.stream.rows import look_up

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine

_CHECKED_RECOMPUTES = 3
_KEPT_TRIALS = 256  # a dict with other keys each time has no end of them


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
        self.slices: WeightSlices | None = None  # of a head at home that is never copied whole
        self.chunkable: dict[tuple[Any, ...], bool] = {}  # by mode, what carries the batch, choices
        self.written = WrittenBuffers()
        self.keeps = False  # what its backward needs stays on the device: nothing is recomputed
        self.parks = False  # its inputs wait on the host
        self.records_again = False  # its graph cannot be filled again (see recompute.py)
        self.traced: set[bool] = set()  # modes in which its graph was looked at for strangers
        self.draws_on_host = False  # from Python's or numpy's generators
        self.habits = Habits()  # which arguments it writes to: x.add_(...), ReLU(inplace=True)
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

    @cached_property
    def groups(self) -> list[Group]:
        return [g for g in (self.group, *self.borrowed) if g.members]

    @property
    def copied(self) -> list[Group]:
        """Those that it needs on the device whole: not the table that it looks rows up in, nor what
        comes in slices."""
        if self.in_slices:
            return []
        return [g for g in self.groups if g.rows is None or g is not self.group]

    @property
    def in_slices(self) -> bool:
        """Is this a head that computes with two slices of its weight at a time?"""
        return self.slices is not None and self.slices.group.placement.weights != "device"

    @cached_property
    def members(self) -> list[tuple[Group, Member]]:
        """Every parameter that this unit computes with."""
        borrowed = [(group, m) for group, members in self.borrowed.items() for m in members]
        return [*((self.group, m) for m in self.group.members), *borrowed]

    def members_of(self, group: Group) -> list[Member]:
        return group.members if group is self.group else self.borrowed[group]

    def check_identity(self) -> None:
        """Raise when a parameter was replaced by another object since `wrap`."""
        for module, name, member in self.places:
            if module._parameters.get(name) is not member.parameter:
                raise MisusedModel(
                    f"{self.name}: the parameter {member.name} was replaced after fluxtrain.wrap "
                    "(load_state_dict(assign=True), adapters or resizing: do that before wrap, or "
                    "fluxtrain.unwrap(model), change it and wrap again), or for this call alone "
                    "(torch.func.functional_call and what is built on it: use a model that is not "
                    "wrapped)"
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
        try:
            return self._run(args, kwargs, materialise=materialise)
        except Diverged:
            self.engine.updates.forget_refused()
            raise

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, materialise: bool) -> Any:
        engine = self.engine
        self._refuse_nesting()
        engine.before(self)
        if self.group.rows is not None and self.group.placement.weights != "device":
            found = look_up(self, args, kwargs)
            if found is not None:
                return found
        (args, kwargs), moved = to_device((args, kwargs), engine.device.torch_device)
        if self.is_head and not materialise and not kwargs and len(args) == 1:
            autocast = torch.is_autocast_enabled(engine.device.torch_device.type)
            if (torch.is_grad_enabled() or engine.lazy_without_gradients) and not autocast:
                linear = self.module
                dtype = torch.promote_types(args[0].dtype, linear.weight.dtype)  # type: ignore[arg-type]
                return LazyLogits.of(self, args[0], dtype, self.group_of_weight().version)
        if self.in_slices:
            logits = sliced_logits(self, args, kwargs)
            if logits is not None:
                return logits
        run = self._with_gradients if torch.is_grad_enabled() else self._without_gradients
        out = run(args, kwargs)
        write_back(moved)
        return out

    def _refuse_nesting(self) -> None:
        if self.members and type(self.members[0][1].parameter) is nn.Parameter:  # as while bound
            raise MisusedModel(
                f"{self.name} was called inside of its own forward pass, as torch.utils.checkpoint "
                "does around a block that computes gradients in its forward: leave the checkpoint "
                "out, wrapped blocks are computed again without it"
            )

    def _with_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = without_caches(self.name, args, kwargs)
        tree, tensors = flatten((args, kwargs), once=True)
        refuse_hidden_gradients(self.name, tree)
        collector = active_collector()
        call = Call(self, tree, Capture.of(collector))
        call.cut(tensors)
        flat = _Streamed.apply(call, self.engine.anchor, *tensors)  # type: ignore[no-untyped-call]
        out, extra = call.hand_out(flat, tensors)
        call.capture.put_back(collector, extra)
        return out

    def group_of_weight(self) -> Group:
        """The group that holds the head's weight (the embedding's, when tied)."""
        return next(g for g, m in self.members if m.parameter is self.module.weight)

    def _without_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self.engine
        tree, tensors = flatten((args, kwargs), once=True)
        rows = batch_rows(tensors)
        whole = (
            has_cache(args, kwargs)
            or rows is None
            or active_collector() is not None
            or not engine.chunks(self, rows, tree, tensors)
        )
        with engine.bound(self):
            weights = BoundWeights(self)
            if whole:
                out = self.original(*args, **kwargs)
                weights.refuse_writes()
                return out
            assert rows is not None
            split = splits(tensors, rows)
            pieces = [piece(tensors, split, a, b) for a, b in spans(rows, engine.chunk_rows)]
            outs = [flatten(run_with(self.original, tree.fill(given))) for given in pieces]
            weights.refuse_writes()
        return outs[0][0].fill(chunk_outputs([out for _, out in outs], pieces, tensors))

    def record_again_whole(self) -> None:
        """From now on its backward pass records the block anew, from its beginning to its end."""
        self.records_again = True
        self.engine.say(
            f"blocks of {type(self.module).__name__} are computed again to their end in the "
            "backward pass: they keep views of weights, or their graph cannot be filled twice"
        )

    def note_ever_other_arguments(self) -> None:
        """Each structure of arguments is looked at anew, and there seems to be no end of them."""
        self.engine.say(
            f"blocks of {type(self.module).__name__} are called with arguments of ever other "
            "structure (a dict with other keys, a longer list): all of them are copied in each "
            "such call, because what a block writes to them is not known. Pass what changes as "
            "values, not as keys"
        )

    def try_chunks(self, tree: Tree, tensors: Sequence[Tensor], rows: int) -> bool:
        """Do chunks give what the whole gives? Tried once for each mode, each way to cut, and each
        structure and choice of the arguments: with another one it may compute something else."""
        name = ambiguous(self.original, tree, tensors, rows)
        if name is not None:
            self.engine.say(
                f"the argument {name} of {self.name} is {rows} x {rows} where the batch has {rows} "
                "rows, and may be a mask or one row for each: it runs on the whole batch. Another "
                "number of rows or tokens a row runs in chunks"
            )
            return False
        key = (self.module.training, splits(tensors, rows), tree.choices())
        if key not in self.chunkable:
            if len(self.chunkable) >= _KEPT_TRIALS:
                self.chunkable.clear()
            from fluxtrain.stream.chunking import chunks_agree

            with self.engine.bound(self, "probe"):
                self.chunkable[key] = chunks_agree(self, tree, tensors)
            if not self.chunkable[key]:
                self.engine.say(
                    f"{self.name} gives other results for chunks than for the whole batch: it "
                    "runs on the whole batch"
                )
        return self.chunkable[key]


class _Streamed(torch.autograd.Function):
    """Forward without keeping activations, backward with recomputation."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        unit, engine = call.unit, call.unit.engine
        engine.begin_forward(ctx, call)
        ctx.set_materialize_grads(False)
        call.parked = {}
        if unit.parks and not unit.keeps:
            call.parked = engine.park.park(tensors, call.needs)
        call.verifies = unit.checked < _CHECKED_RECOMPUTES and not call.keeps
        parts: list[list[Tensor]] = []
        with engine.bound(unit):
            weights = BoundWeights(unit)
            call.buffers = buffers = unit.written.before(unit.module)
            call.find_ends()
            for span in call.spans:
                host = call.explores or unit.draws_on_host
                call.random.append(RandomState.now(engine.device.torch_device, host=host))
                parts.append(call.record(call.inputs(tensors, span)))
            weights.refuse_writes()
            if not unit.keeps and weights.are_referred_to():
                unit.record_again_whole()
                call.tapes.clear()
            call.buffers = unit.written.after(unit.module, buffers)
        engine.after_forward(unit)
        call.settle(tensors, len(parts[0]))
        ctx.save_for_backward(*call.boundary(tensors))
        call.boundary_bytes = sum(
            t.nbytes for i, t in enumerate(tensors) if call.needs[i] and i not in call.parked
        )
        ctx.boundary = engine.hold_boundary(call.boundary_bytes)
        call.out_rows = [[o.shape[0] if o.dim() else 1 for o in part] for part in parts]
        results = [[part[i] for part in parts] for i in call.returned]
        differentiable = [any(chunk.requires_grad for chunk in chunks) for chunks in results]
        merged = [
            (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).detach() for chunks in results
        ]
        del parts, results
        ctx.mark_non_differentiable(
            *(o for o, d in zip(merged, differentiable, strict=True) if not d)
        )
        return tuple(merged)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        unit, engine = call.unit, call.unit.engine
        engine.begin_backward(ctx)
        call.refuse_changed_arguments()
        arriving = call.gradients_of_results(gradients)
        tensors = call.brought_back(ctx.saved_tensors)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        sums: list[Tensor | None] = [None] * len(tensors)
        pieces: dict[int, list[Tensor]] = {i: [] for i in wanted}
        with engine.bound(unit, "backward"):
            for index, span in enumerate(call.spans):
                found = call.backward(index, span, tensors, wanted, arriving)
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
