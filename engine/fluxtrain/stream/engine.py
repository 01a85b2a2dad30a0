"""The engine of one wrapped model: who is where, what moves next, what has to wait.

One engine belongs to one model and is driven by the thread that runs it (and by autograd's thread
in the backward pass). Copies, downloads and updates run beside it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.boundary import BoundaryPark
from fluxtrain.memory.device import Device
from fluxtrain.memory.gradients import Gradients
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.memory.slices import WeightSlices
from fluxtrain.memory.window import Window
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.prefetch import LOOKS_AHEAD
from fluxtrain.stream.accounts import Accounts, BlockFacts, Boundary, MemoryUse, Residency, Traffic
from fluxtrain.stream.arguments import Tree
from fluxtrain.stream.block import Unit
from fluxtrain.stream.call import Call
from fluxtrain.stream.chunking import saved_row_bytes
from fluxtrain.stream.eager_step import EagerStep, expect_gradients
from fluxtrain.stream.graphs import Graphs
from fluxtrain.stream.head_call import HeadCall
from fluxtrain.stream.loss_scale import LossScale
from fluxtrain.stream.norm import GradNorm, norm_parts
from fluxtrain.stream.parameter import HostParameter, Owner
from fluxtrain.stream.rows import HostIds, Lookup
from fluxtrain.stream.shards import load_state_shard, shard_bytes, state_shards
from fluxtrain.stream.updates import Updates
from fluxtrain.stream.use import Use
from fluxtrain.stream.writes import check_writes, fingerprint
from fluxtrain.telemetry.events import Move

_LOG = logging.getLogger("fluxtrain")


class Engine:
    """Streams one model's blocks; see `fluxtrain.wrap`."""

    def __init__(self, device: Device, placement: Placement, *, overlap: bool) -> None:
        self.device = device
        self.plan = placement
        self.use = Use()
        self.overlap = overlap
        self.chunk_rows = placement.chunk_rows or 0  # 0: chosen at the first forward
        self.head_tokens: int | None = None  # tokens a chunk of the head; None: by memory
        self.lazy_without_gradients = False
        self.units: list[Unit] = []
        self.groups: list[Group] = []
        self.loose: list[nn.Parameter] = []
        self.accounts = Accounts(self)
        self.window = Window(device, self.accounts.uploaded)
        self.gradients = Gradients(device, self.accounts.downloaded, self.accounts.sum_uploaded)
        self.updates = Updates(self.gradients, device, defers_moments=placement.deferred_moments)
        self.park = BoundaryPark(device)
        self.host_ids = HostIds()
        self.anchor = torch.zeros(1, device=device.torch_device, requires_grad=True)
        self.anchor_node = self.anchor.view_as(self.anchor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.graphs = Graphs()
        self.owners: dict[Group, dict[int, Owner]] = {}
        self.norm: GradNorm | None = None  # asked for since the last step
        self.eager: EagerStep | None = None  # the step under way updates as gradients arrive
        self.loss_scale: LossScale | None = None  # of fp16, where the engine's own norm is used
        self._following: dict[tuple[str, Unit | None], Unit] = {}
        self._last: dict[str, Unit | None] = {"forward": None, "backward": None}
        self._said: set[str] = set()
        self.thread = 0  # of the last forward
        self._lock = threading.RLock()

    # -- what a unit asks for ------------------------------------------------------------------

    def before(self, unit: Unit) -> None:
        """A unit's forward is about to run: check its weights, start the next copies."""
        self.use.check()
        self.thread = threading.get_ident()
        self.forget_broken_pass()
        for group in unit.groups:
            check_writes(self, group)
        unit.check_identity()
        self._heading("forward", unit)

    @contextmanager
    def bound(self, unit: Unit, does: str = "forward") -> Iterator[None]:
        """The unit's parameters are on the device inside; at home again afterwards.

        `does` is what the timeline calls the computation inside.
        """
        taken: list[Group] = []
        self.use.begin()
        try:
            for group in unit.groups:
                is_copied = group.placement.weights != "device"
                views = self.window.take(group) if is_copied else None
                taken.append(group)
                for member in unit.members_of(group):
                    parameter = member.parameter
                    parameter.__class__ = nn.Parameter
                    if views is not None:
                        parameter.data = views[member.index]
            start = self.device.recorder.instant()
            yield
            self.device.recorder.computed(does, unit.name, start)
        finally:
            self.use.end()
            for group in taken:
                is_copied = group.placement.weights != "device"
                for member in unit.members_of(group):
                    if is_copied:
                        member.parameter.data = group.home_views[member.index]
                    member.write_version = member.parameter._version
                    member.parameter.__class__ = HostParameter
                if is_copied:
                    self.window.release(group)

    def chunks(self, unit: Unit, rows: int, tree: Tree, tensors: Sequence[Tensor]) -> bool:
        """Should this unit cut a batch of `rows`?"""
        if unit.group.kind != "block" or rows < 2 or 0 < rows <= self.chunk_rows:
            return False
        if not unit.try_chunks(tree, tensors, rows):
            return False
        if not self.chunk_rows:
            with self.bound(unit, "probe"):
                row_bytes = saved_row_bytes(unit, tree, tensors)
            self.chunk_rows = self.plan.chunk_for(row_bytes, rows)
        return rows > self.chunk_rows

    def hold_boundary(self, size_bytes: int) -> Boundary:
        return Boundary(self.accounts, size_bytes)

    def after_forward(self, unit: Unit) -> None:
        self.accounts.sample()
        self.device.tidy()

    def begin_forward(self, ctx: Any, call: Call | HeadCall | Lookup) -> None:
        """A unit's forward is recorded: `ctx` is its node of torch's graph."""
        ctx.call, ctx.anchor_node = call, self.anchor_node
        self.graphs.record(ctx, call.unit.groups)

    def begin_backward(self, ctx: Any) -> None:
        """Checks before a unit's backward; starts the copies of the units before it."""
        self.use.check()
        call: Call | HeadCall | Lookup = ctx.call
        unit = call.unit
        if not torch._C._will_engine_execute_node(ctx.anchor_node):
            raise MisusedModel(
                "torch.autograd.grad and backward(inputs=...) do not reach the weights of wrapped "
                "blocks and would leave wrong gradients behind: use loss.backward()"
            )
        if call.training != unit.module.training:
            raise MisusedModel(
                f"{unit.name} was switched between train and eval after its forward pass: switch "
                "after backward()"
            )
        stale = [g.name for g, version in call.versions.items() if g.version != version]
        if stale:
            raise MisusedModel(
                f"the weights of {stale[0]} changed between forward and backward (an optimizer "
                "step, or a write to them): the gradients would be wrong. Step after backward()"
            )
        expect_gradients(self, unit.groups)
        self.graphs.begin_backward(ctx)
        self.graphs.enter_pass(self._end_pass)
        self._heading("backward", unit)
        for group in () if unit.in_slices else unit.groups:
            self.gradients.expect(group)

    def after_backward(self, unit: Unit) -> None:
        start = self.device.recorder.instant()
        for group in unit.groups:
            if group.users == 1:
                self._finish(group)
        self.device.recorder.computed("gradients", unit.name, start)
        self.accounts.sample()
        self.device.tidy()

    def add_slice(self, slices: WeightSlices, member: Member, first: int, values: Tensor) -> None:
        """The gradient of the words of a member from `first` on, (n, ...) in fp32: all of it."""
        group = slices.group
        passing = self.eager is not None and self.eager.uses_up_now(group)
        self.gradients.add_slice(group, member, first, values, rows=slices.words, passing=passing)

    def forget_gradients(self) -> None:
        """All of them, without a look at each."""
        for group in self.groups:
            if group.has_gradient:
                self.gradients.forget(group)

    def clip_grad_norm(self, max_norm: float | None, losses: Sequence[Tensor] = ()) -> GradNorm:
        """Measure the global norm; the next optimizer step scales by it. None only measures.

        `losses` are read with it; the step is not made where norm or losses are not finite.
        """
        parts = [part.to(self.device.torch_device) for part in norm_parts(self)]
        scale = self.loss_scale.value if self.loss_scale is not None else None
        self.norm = GradNorm(self.device, parts, max_norm, losses, scale)
        return self.norm

    def take_in(self, owner: Owner, parameter: nn.Parameter) -> None:
        """A gradient that autograd computed outside the blocks (a weight used by itself)."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
            parameter.grad = None
        if gradient is not None:
            expect_gradients(self, [owner.group])
            self.gradients.add(owner.group, owner.member, gradient.to(self.device.torch_device))
            if owner.group.users <= 1 or torch._C._current_graph_task_id() < 0:
                self._finish(owner.group)
            else:
                self.graphs.enter_pass(self._end_pass)

    # -- weights as the user sees them -----------------------------------------------------------

    def watch(self, member: Member) -> None:
        """`.data` was read: somebody may write through it without a trace."""
        if member.fingerprint is None:
            with torch._C.DisableTorchFunctionSubclass():
                member.fingerprint = fingerprint(member.parameter)

    def flush(self) -> None:
        """Wait for all updates under way; raises what made one fail."""
        self.updates.wait()
        if self.loss_scale is not None:
            self.loss_scale.settle()

    def say(self, text: str) -> None:
        """Tell the user once."""
        if text not in self._said:
            self._said.add(text)
            _LOG.warning(text)

    def close(self) -> None:
        """Stop the threads; the model must not be used afterwards (`unwrap` calls this)."""
        self.use.ended = True
        try:
            self.updates.wait()
        finally:  # also of one that failed
            self.updates.close()
            self.window.drain()
            self.device.close()

    # -- what a trainer asks for -------------------------------------------------------------------

    @property
    def blocks(self) -> list[BlockFacts]:
        return self.accounts.blocks()

    def residency(self) -> Residency:
        return self.accounts.residency()

    def memory(self) -> MemoryUse:
        return self.accounts.memory()

    def traffic(self) -> Traffic:
        return self.accounts.traffic()

    def take_moves(self, limit: int) -> tuple[list[Move], int]:
        return self.accounts.take_moves(limit)

    def take_stalls(self) -> dict[str, float]:
        """Seconds the computation waited since the last call: weights, update, gradients."""
        return self.device.stalls.take()

    def state_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        return state_shards(self)

    def shard_bytes(self) -> int:
        """What all shards take now, at most."""
        return shard_bytes(self)

    def load_state_shard(self, name: str, tensors: dict[str, Tensor]) -> None:
        load_state_shard(self, name, tensors)

    def begin_eager_step(
        self, optimizer: torch.optim.Optimizer, loss: Tensor | None = None
    ) -> None:
        """Before the only backward pass of a step without clipping: update each group as soon as
        its gradients are complete. `optimizer.step()` ends it. The hyperparameters are read now.

        What the graph still needs (a block called twice, a weight used outside of its block) is
        updated later, by `optimizer.step()` at the latest. There is no norm to clip by. A weight's
        alias of an alias (`w.detach().detach()`) that the graph needs is not seen."""
        if self.loss_scale is not None:
            raise MisusedModel("with a loss scale no group is updated before the norm is known")
        self.forget_orphaned_step()
        if self.partly_updated:
            raise MisusedModel("an eager step is under way: optimizer.step() ends it")
        self.norm = None
        self.eager = EagerStep(optimizer, self, loss)

    @property
    def partly_updated(self) -> bool:
        """True while an eager step has updated some groups and not all."""
        return self.eager is not None and bool(self.eager.updated)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Updates are done, and the head's loss is fused in chunks without gradients too."""
        self.flush()
        self.lazy_without_gradients = True
        try:
            yield
        finally:
            self.lazy_without_gradients = False

    # -- inside ------------------------------------------------------------------------------------

    def _heading(self, direction: str, unit: Unit) -> None:
        """Learn who follows whom, and copy the next ones in."""
        with self._lock:
            self._following[direction, self._last[direction]] = unit
            self._last[direction] = unit
            self._copy_ahead(direction, unit)

    def copy_ahead_for_the_next_step(self) -> None:
        """The first units of the next forward come in as soon as they are updated."""
        with self._lock:
            self._copy_ahead("forward", None)

    def _copy_ahead(self, direction: str, unit: Unit | None) -> None:
        if all(group.placement.weights == "device" for group in self.groups):
            return
        near = set(unit.groups) if unit is not None else set()
        seen: list[Unit] = [] if unit is None else [unit]
        wanted = max(1, self.plan.slots - 1)
        while wanted and len(seen) <= LOOKS_AHEAD:
            unit = self._following.get((direction, unit))
            if unit is None or unit in seen:
                break
            seen.append(unit)
            if unit.in_slices and unit.slices is not None and direction == "forward":
                unit.slices.prefetch(0)
                unit.slices.prefetch(1)
            copied = [group for group in unit.copied if group.placement.weights != "device"]
            near.update(copied)
            started = [self.window.prefetch(group, near) for group in copied]
            if not all(started):
                break
            wanted -= self.window.is_shared_by(copied)

    def _finish(self, group: Group) -> None:
        if not self.gradients.is_open(group):
            return
        passing = self.eager is not None and self.eager.uses_up_now(group)
        self.gradients.finish(group, passing=passing)
        with torch._C.DisableTorchFunctionSubclass():  # a look at hooks is no read of the weights
            hooked = [(m, m.parameter._post_accumulate_grad_hooks) for m in group.members]
        for member, hooks in hooked:
            for key, hook in list((hooks or {}).items()):
                if key != self.owners[group][member.index].hook_key and member.has_gradient:
                    hook(member.parameter)
        if self.eager is not None:
            self.eager.take(group)

    def forget_broken_pass(self) -> None:
        """Of the last backward pass, if it raised, nothing stays."""
        if self.graphs.broke_off:
            self.abandon_backward()

    def forget_orphaned_step(self) -> None:
        """Of an eager step whose optimizer is gone, no gradient stays."""
        if self.eager is not None and self.eager.is_orphaned():
            self.eager.drop()
            self.eager = None

    def abandon_backward(self) -> None:
        """The last backward pass raised: its end was never called and its sums are incomplete."""
        self._last = {"forward": None, "backward": None}
        self.graphs.abandon_pass()
        self.gradients.discard()
        if self.eager is not None:
            self.updates.forget_refused()
            self.eager.end()
            self.eager = None

    def _end_pass(self) -> None:
        """A backward pass is over: groups that several units add to are complete now."""
        self._last = {"forward": None, "backward": None}
        for group in self.gradients.open_groups():
            self._finish(group)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a wrapped model. Raises MisusedModel for any other."""
    engine = model.__dict__.get("_fluxtrain_engine")
    if not isinstance(engine, Engine):
        raise MisusedModel(
            f"{type(model).__name__} is not wrapped: call fluxtrain.wrap(model) first"
        )
    return engine
