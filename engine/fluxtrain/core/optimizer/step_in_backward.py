"""An optimizer step that runs in the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from fluxtrain.core.adamw.hyper import Hyper
from fluxtrain.core.memory.group import Group
from fluxtrain.core.optimizer.hook import hypers_of, prepare, takes_over
from fluxtrain.core.optimizer.optimizer_state import wrapped_parameters
from fluxtrain.core.runtime.context import Context, Owner
from fluxtrain.core.runtime.user_gradients import replace
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.errors import MisusedModel


class StepInBackward:
    """A step whose groups are updated as soon as their gradients are complete.

    For loops of one forward and one backward a step, without clipping by the global norm, which is
    known too late. `optimizer.step()` ends the step and updates the remaining groups.
    """

    def __init__(self, optimizer: Optimizer, context: Context, loss: Tensor | None = None) -> None:
        """loss: the tensor to call `backward` on. If it is not finite nothing is updated. A
        backward pass that does not pass through it does not belong to this step."""
        entries = wrapped_parameters(optimizer)
        if not takes_over(optimizer):
            raise MisusedModel(
                f"{type(optimizer).__name__} cannot step block by block: use torch.optim.AdamW"
            )
        prepare(optimizer, entries)
        self.updated: set[Group] = set()
        self.guard = None if loss is None else GradNorm(context.device, [], None, [loss])
        self._begun: list[bool] | None = None if loss is None else _begun(loss)
        self._optimizer = weakref.ref(optimizer)
        self._context = context
        self._graphs = context.graphs
        self._work: dict[Group, list[tuple[Owner, Hyper]]] = {}
        by_options = hypers_of(optimizer)
        for owner, options, _ in entries:
            if owner.context is context:
                self._work.setdefault(owner.group, []).append((owner, by_options[id(options)]))

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
        """Return whether the update of the group takes all its gradients, so that they can go."""
        stepped = {owner.member.index for owner, _ in self._work.get(group, ())}
        return all(m.index in stepped for s in group.trained for m in s.members)

    def uses_up_now(self, group: Group) -> bool:
        """Return whether the group's update takes all its gradients and can be queued now."""
        return self.uses_up(group) and not self._graphs.need(group)

    def refuse_updated(self, groups: Iterable[Group]) -> None:
        """Raise MisusedModel if one of the groups, which get gradients now, is updated already."""
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
                replace(self._context, group, owner.member, None)


def _begun(loss: Tensor) -> list[bool] | None:
    """Return a list that is filled when a backward pass reaches the loss; None if it cannot be."""
    if loss.grad_fn is None:
        return None
    begun: list[bool] = []
    loss.grad_fn.register_prehook(lambda _: begun.append(True))
    return begun
