"""What everything that computes with one wrapped model shares: where it is and what is under way.

`Engine` adds what a trainer calls; blocks, head, embedding and optimizer know only this.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from fluxtrain.device.device import Device
from fluxtrain.gradients.gradients import Gradients
from fluxtrain.memory.activation_offload import ActivationOffload
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.memory.unit import Unit
from fluxtrain.memory.window import Window
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.runtime.ahead import CopiesAhead
from fluxtrain.runtime.counters import Counters
from fluxtrain.runtime.graphs import Graphs
from fluxtrain.runtime.host_ids import HostIds
from fluxtrain.runtime.use import Use
from fluxtrain.updates.loss_scale import LossScale
from fluxtrain.updates.norm import GradNorm
from fluxtrain.updates.updates import Updates

_LOG = logging.getLogger("fluxtrain")


class UpdatesInBackward(Protocol):
    """A step under way that updates each group as soon as its gradients are complete."""

    updated: set[Group]
    guard: GradNorm | None

    def is_of(self, optimizer: Optimizer) -> bool: ...
    def is_of_this_pass(self) -> bool: ...
    def is_orphaned(self) -> bool: ...
    def was_refused(self) -> bool: ...
    def uses_up_now(self, group: Group) -> bool: ...
    def refuse_updated(self, groups: Iterable[Group]) -> None: ...
    def take(self, group: Group) -> None: ...
    def end(self) -> None: ...
    def drop(self) -> None: ...


class Context:
    """The state of one wrapped model.

    It belongs to the thread that runs the model (and to autograd's thread in the backward pass).
    Copies, downloads and updates run beside it.
    """

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
        self.owners: dict[Group, dict[int, Owner]] = {}
        self.counters = Counters(device)
        self.window = Window(device, self.counters.uploaded)
        self.ahead = CopiesAhead(self.window, self.groups)
        self.gradients = Gradients(device, self.counters.downloaded, self.counters.sum_uploaded)
        self.updates = Updates(self.gradients, device, defers_moments=placement.deferred_moments)
        self.activation_offload = ActivationOffload(device)
        self.host_ids = HostIds()
        self.anchor = torch.zeros(1, device=device.torch_device, requires_grad=True)
        self.anchor_node = self.anchor.view_as(self.anchor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.graphs = Graphs()
        self.norm: GradNorm | None = None  # asked for since the last step
        self.step_in_backward: UpdatesInBackward | None = None  # the step under way, if it is one
        self.loss_scale: LossScale | None = None  # of fp16, where the engine's own norm is used
        self.thread = 0  # of the last forward
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Tell the user once."""
        if text not in self._said:
            self._said.add(text)
            _LOG.warning(text)

    def flush(self) -> None:
        """Wait for all updates under way; raises what made one fail."""
        self.updates.wait()
        if self.loss_scale is not None:
            self.loss_scale.take_back_skipped()

    @property
    def partly_updated(self) -> bool:
        """True while a step in backward has updated some groups and not all."""
        return self.step_in_backward is not None and bool(self.step_in_backward.updated)

    def expect_gradients(self, groups: Iterable[Group]) -> None:
        """Gradients of these groups are about to come. Raises MisusedModel where they have been
        updated; a step in backward whose loss was given up is forgotten."""
        self.forget_orphaned_step()
        if self.step_in_backward is not None and not self.step_in_backward.is_of_this_pass():
            self.step_in_backward = None
            self.say(
                "a step in backward is not made as one, for the loss that begin_step_in_backward "
                "was given is "
                "not part of the backward pass: give it the loss that backward() is called on"
            )
        if self.step_in_backward is not None:
            self.step_in_backward.refuse_updated(groups)

    def forget_broken_pass(self) -> None:
        """Drop what the last backward pass left, if it raised."""
        if self.graphs.broke_off:
            self.abandon_backward()

    def forget_orphaned_step(self) -> None:
        """Drop the gradients of a step in backward whose optimizer is gone."""
        if self.step_in_backward is not None and self.step_in_backward.is_orphaned():
            self.step_in_backward.drop()
            self.step_in_backward = None

    def abandon_backward(self) -> None:
        """The last backward pass raised: its end was never called and its sums are incomplete."""
        self.ahead.end_pass()
        self.graphs.abandon_pass()
        self.gradients.discard()
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
        """The parameter's, for messages: as in `named_parameters` of the whole model."""
        return f"{self.group.name}.{self.member.name}"

    @property
    def context(self) -> Context:
        context = self._context()
        assert context is not None, "the wrapped model is gone"
        return context
