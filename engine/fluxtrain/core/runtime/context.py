"""`Context`: the state that blocks, head, embedding and optimizer of one wrapped model share.

`Engine` adds the methods that a trainer calls; the units and the optimizer know only `Context`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fluxtrain.core.adamw.hyper import Hyper
from fluxtrain.core.device.device import Device
from fluxtrain.core.device.spill import Spill
from fluxtrain.core.gradients.gradients import Gradients
from fluxtrain.core.gradients.host_gradients import Arrival
from fluxtrain.core.guards.arguments import flatten
from fluxtrain.core.guards.shared_memory import version_of
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.ranks.exchange import NOT_EXCHANGED, Exchange
from fluxtrain.core.runtime.card import EngineCard
from fluxtrain.core.runtime.counters import Counters
from fluxtrain.core.runtime.graphs import Graphs
from fluxtrain.core.updates.loss_scale import LossScale
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.core.updates.updates import Updates
from fluxtrain.errors import MisusedModel
from fluxtrain.plan.placement import Placement


class _Process:
    """The process id, cached: it is needed four times a block, and system calls are slow in a
    sandbox."""

    def __init__(self) -> None:
        self.learn()
        os.register_at_fork(after_in_child=self.learn)

    def learn(self) -> None:
        self.number = os.getpid()


_this = _Process()


class UseGuard:
    """Refuses uses that cannot work: in a fork, which lacks the threads and would hang; by two
    threads at once, of which one would compute with weights that the other moves; and after
    `unwrap`."""

    def __init__(self) -> None:
        self.ended = False
        self._process = _this.number
        self._thread = 0  # the thread that computes with weights on the device now
        self._depth = 0

    @property
    def computing(self) -> bool:
        """Return whether a block's forward or backward is under way."""
        return self._depth > 0

    def check(self) -> None:
        """Raise MisusedModel for a use that cannot work."""
        if self.ended:
            raise MisusedModel(
                "the model was unwrapped between forward and backward: call fluxtrain.unwrap after "
                "backward(), or compute the loss again"
            )
        if self._process != _this.number:
            raise MisusedModel(
                f"the model was wrapped in process {self._process} and is used in a fork of it, "
                "which has none of its threads: start processes with 'spawn', or wrap in each"
            )
        if self._depth and self._thread != threading.get_ident():
            raise MisusedModel(
                "two threads run the wrapped model at once, and its blocks are on the device for "
                "one of them only: use a lock around forward and backward"
            )

    def begin(self) -> None:
        """Note that this thread begins to compute. Raises as `check`."""
        self.check()
        self._thread = threading.get_ident()
        self._depth += 1

    def end(self) -> None:
        """Note that this thread's computation has ended."""
        self._depth -= 1


class HostIds:
    """The integers among a model's inputs, until its forward ends; after that a data loader may
    write the next batch into the same memory."""

    def __init__(self) -> None:
        # on the device, on the host, and their versions
        self._moved: list[tuple[Tensor, Tensor, tuple[int, int]]] = []

    def note(self, before: Any, after: Any) -> None:
        """Note the model's arguments from before and after they were moved."""
        pairs = zip(flatten(before)[1], flatten(after)[1], strict=True)
        self._moved = [
            (moved, host, (version_of(moved), version_of(host)))
            for host, moved in pairs
            if host.device.type == "cpu" and not host.is_floating_point()
        ]

    def forget(self) -> None:
        """Drop the inputs when the model's forward has ended."""
        self._moved = []

    def of(self, ids: Tensor) -> Tensor | None:
        """Return the same integers on the host, in the same order, if neither tensor was written to
        since; `ids` may be a view."""
        for moved, host, versions in self._moved:
            same = moved.data_ptr() == ids.data_ptr() and moved.numel() == ids.numel()
            plain = ids.is_contiguous() and moved.is_contiguous() and moved.dtype == ids.dtype
            if same and plain and (version_of(moved), version_of(host)) == versions:
                return host
        return None


_LOG = logging.getLogger("fluxtrain")


class Context:
    """The state of one wrapped model.

    Used by the thread that runs the model (and by autograd's thread in the backward pass). Copies
    and updates run concurrently.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        placement: Placement,
        *,
        overlap: bool,
        exchange: Exchange = NOT_EXCHANGED,
    ) -> None:
        self.plan = placement
        self.exchange = exchange  # with the other processes that train this model
        self.use = UseGuard()
        self.overlap = overlap
        self.chunk_rows = placement.chunk_rows or 0  # 0: chosen at the first forward
        self.retries_blocks = True  # that run out of device memory, with fewer rows at once
        self.head_tokens: int | None = None  # tokens a chunk of the head; None: by memory
        self.lazy_without_gradients = False
        self.units: list[Unit] = []
        self.groups: list[Group] = []
        self.loose: list[nn.Parameter] = []
        self.owners: dict[Group, dict[int, Owner]] = {}
        self.counters = Counters(devices)
        self.arrivals: dict[Group, Arrival] = {}  # gradients on the host
        self._said: set[str] = set()
        self.cards = [
            EngineCard(
                number, device, self.groups, self.counters, self.arrivals, self.say, exchange
            )
            for number, device in enumerate(devices)
        ]
        device = devices[0]
        device.recorder.lead([other.recorder for other in devices[1:]])
        self.spill = Spill(Path(placement.spill_folder or tempfile.gettempdir()), device.recorder)
        self.updates = Updates(
            self.arrivals,
            device,
            defers_moments=placement.deferred_moments,
            holds_moments=len(devices) > 1,
        )
        self.host_ids = HostIds()
        self.anchor = torch.zeros(1, device=device.torch_device, requires_grad=True)
        self.anchor_node = self.anchor.view_as(self.anchor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.graphs = Graphs()
        self.norm: GradNorm | None = None  # asked for since the last step
        self.norm_before: GradNorm | None = None  # of the last step
        self.step_in_backward: StepInBackward | None = None  # the step under way, if it is one
        self.loss_scale: LossScale | None = None  # of fp16, where the engine's own norm is used
        self.thread = 0  # of the last forward

    @property
    def device(self) -> Device:
        """Return the first card's device, which has inputs, loss and everything outside
        of blocks."""
        return self.cards[0].device

    def card_of(self, unit: Unit) -> EngineCard:
        """Return the card that the unit runs on."""
        return self.cards[unit.card]

    def gradients_of(self, group: Group) -> Gradients:
        """Return the sums that the group's gradients go into."""
        return self.cards[group.placement.card].gradients

    @cached_property
    def last_block(self) -> Unit | None:
        """Return the last block of the forward pass, in the model's order."""
        return next((one for one in reversed(self.units) if one.group.kind == "block"), None)

    def begin_next_step(self) -> None:
        """Prefetch the first units of the next forward, each as soon as it is updated; look how
        much memory the cards have for it."""
        for card in self.cards:
            card.ahead.begin_next_step(self.plan.slots_of(card.number))
            planned = self.plan.cards[card.number]
            peak_bytes = planned.device_bytes if self.plan.layout.batch_rows else None
            card.watch.look(peak_bytes, planned.budget_bytes)

    def say(self, text: str) -> None:
        """Log a warning for the user, once for each text."""
        if text not in self._said:
            self._said.add(text)
            _LOG.warning(text)

    def flush(self) -> None:
        """Wait for all updates under way; raise the error of a failed one."""
        self.updates.wait()
        if self.loss_scale is not None:
            self.loss_scale.take_back_skipped()

    def wait_for_skipped(self) -> None:
        """Wait for the last step if it may have been skipped, before the next one is counted: a
        skipped step is no step of its parameters."""
        norm, self.norm_before = self.norm_before, None
        if norm is not None and norm.skips and norm.refuses():
            self.flush()

    @property
    def partly_updated(self) -> bool:
        """Return whether a step in backward has updated some groups and not all."""
        return self.step_in_backward is not None and bool(self.step_in_backward.updated)

    def expect_gradients(self, groups: Iterable[Group]) -> None:
        """Prepare for gradients of these groups. Raises MisusedModel when this step has updated
        one of them already; forgets a step in backward whose loss was given up."""
        self.forget_orphaned_step()
        if self.step_in_backward is not None and not self.step_in_backward.is_of_this_pass():
            self.step_in_backward = None
            self.say(
                "begin_step_in_backward has no effect: the loss that it was given is not part of "
                "this backward pass. Give it the loss that backward() is called on"
            )
        if self.step_in_backward is not None:
            self.step_in_backward.refuse_updated(groups)

    def forget_broken_pass(self) -> None:
        """Drop unfinished gradients of the last backward pass, if it raised."""
        if self.graphs.broke_off:
            self.abandon_backward()

    def forget_orphaned_step(self) -> None:
        """Drop the gradients of a step in backward whose optimizer is gone."""
        if self.step_in_backward is not None and self.step_in_backward.is_orphaned():
            self.step_in_backward.drop()
            self.step_in_backward = None

    def abandon_backward(self) -> None:
        """Drop the incomplete sums of a backward pass that raised, whose end was never called."""
        self.graphs.abandon_pass()
        for card in self.cards:
            card.ahead.end_pass()
            card.gradients.discard()
        if self.step_in_backward is not None:
            self.updates.forget_refused()
            self.step_in_backward.end()
            self.step_in_backward = None


class Owner:
    """Ties one parameter to its group and context; lives on the parameter as `_fluxtrain`."""

    __slots__ = ("_context", "group", "hidden", "hook_key", "member", "stepper")

    def __init__(self, context: Context, group: Group, member: Member) -> None:
        self._context = weakref.ref(context)
        self.group = group
        self.member = member
        self.hidden = False  # from the optimizer whose step the engine has taken over
        self.stepper: weakref.ref[Optimizer] | None = None  # the optimizer that was adopted
        self.hook_key: int | None = None  # of the engine's own post-accumulate-grad hook

    @property
    def name(self) -> str:
        """Return the parameter's name for messages, as in `named_parameters` of the whole model."""
        return f"{self.group.name}.{self.member.name}"

    @property
    def context(self) -> Context:
        context = self._context()
        assert context is not None, "the wrapped model is gone"
        return context


class StepInBackward:
    """A step whose groups are updated as soon as their gradients are complete.

    For loops of one forward and one backward a step, without clipping by the global norm, which is
    known too late. `optimizer.step()` ends the step and updates the remaining groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        context: Context,
        work: dict[Group, list[tuple[Owner, Hyper]]],
        loss: Tensor | None,
    ) -> None:
        """loss: the tensor to call `backward` on. If it is not finite nothing is updated. A
        backward pass that does not pass through it does not belong to this step."""
        self.updated: set[Group] = set()
        self.guard = None if loss is None else _guard_of(context, loss)
        self._begun: list[bool] | None = None if loss is None else _begun(loss)
        self._optimizer = weakref.ref(optimizer)
        self._context, self._graphs, self._work = context, context.graphs, work

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer began the step."""
        return self._optimizer() is optimizer

    def is_of_this_pass(self) -> bool:
        """Return whether the running backward pass is that of the step's loss, as far as known."""
        return self._begun is None or bool(self._begun) or torch._C._current_graph_task_id() < 0

    def is_orphaned(self) -> bool:
        """Return whether the optimizer is gone, so that no `optimizer.step()` will end the step."""
        return self._optimizer() is None

    def was_refused(self) -> bool:
        """Return whether the loss is not finite, so that no update was made. Waits for the loss."""
        return self.guard is not None and self.guard.refuses()

    def uses_up(self, group: Group) -> bool:
        """Return whether the group's update takes all its gradients, so that they can be freed."""
        stepped = {owner.member.index for owner, _ in self._work.get(group, ())}
        return all(m.index in stepped for s in group.trained for m in s.members)

    def uses_up_now(self, group: Group) -> bool:
        """Return whether the group's update takes all its gradients and can be queued now."""
        return self.uses_up(group) and not self._graphs.need(group)

    def refuse_updated(self, groups: Iterable[Group]) -> None:
        """Raise MisusedModel if a group that now gets gradients is already updated in this step."""
        name = next((group.name for group in groups if group in self.updated), None)
        if name is not None:
            raise MisusedModel(
                f"{name} got a gradient after its update: with begin_step_in_backward a weight is "
                "updated once, as soon as its gradient is complete. Call optimizer.step() behind "
                "each backward(), without reentrant checkpointing or an autograd function of your "
                "own over a weight, or leave begin_step_in_backward out"
            )

    def take(self, group: Group) -> None:
        """Queue the group's update now that gradients arrived, unless the graph has more to come.

        Then a later call queues it, or `optimizer.step()`."""
        if self._graphs.need(group):
            return
        mine = [(o, h) for o, h in self._work.get(group, ()) if o.member.has_gradient]
        if not mine:
            return
        for owner, _ in mine:
            owner.member.step += 1
        self.updated.add(group)
        hypers = {owner.member.index: hyper for owner, hyper in mine}
        self._context.updates.submit_one(group, hypers, self.guard)

    def end(self) -> None:
        """End the step: drop gradients that updates used up, and references to parameters."""
        for group in self.updated:
            if not group.is_on("device", "gradients") and self.uses_up(group):
                self._context.gradients_of(group).host.forget(group)
        self._work.clear()

    def drop(self) -> None:
        """Abandon the step without `optimizer.step()`: clear the gradients of updated groups."""
        for group in self.updated:
            for owner, _ in self._work.get(group, ()):
                self._context.gradients_of(group).host.drop(group, owner.member)


def _guard_of(context: Context, loss: Tensor) -> GradNorm:
    return GradNorm(context.device, [], None, [loss], exchange=context.exchange)


def _begun(loss: Tensor) -> list[bool] | None:
    """Return a list that is filled when a backward pass reaches the loss; None where none can."""
    if loss.grad_fn is None:
        return None
    begun: list[bool] = []
    loss.grad_fn.register_prehook(lambda _: begun.append(True))
    return begun
