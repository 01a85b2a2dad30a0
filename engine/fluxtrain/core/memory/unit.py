"""`Unit`: a module that is streamed at once, its parameters, and facts learned from running it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.module_buffers import WrittenBuffers
from fluxtrain.core.memory.segment import Member
from fluxtrain.core.memory.vocab_chunks import ChunkedWeights
from fluxtrain.errors import MisusedModel


class Unit:
    """A block, or an edge such as the embedding."""

    def __init__(self, name: str, module: nn.Module, position: int, group: Group) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.position = position
        self.group = group  # the group it owns
        self.card = 0  # the number of the GPU that it runs on, with all of its groups
        self.lane = 0  # of that GPU's compute streams: neighbours there have different ones
        self.borrowed: dict[Group, list[Member]] = {}  # members of other groups it computes with
        self.places: list[tuple[nn.Module, str, Member]] = []  # where its parameters are registered
        self.original: Callable[..., Any] = module.forward
        self._linear: weakref.ref[nn.Linear] | None = None
        self.vocab_chunks: ChunkedWeights | None = (
            None  # of a head on the host that is never copied whole
        )
        # how its activations get to the backward pass (see `choose_recompute`)
        self.recomputes = True  # False: what its backward needs stays on the device
        self.offloads_inputs = False  # its inputs wait for the backward pass on the host
        # facts learned from its first runs
        self.chunkable: dict[tuple[Any, ...], bool] = {}  # by mode, cut arguments, choices
        # positions of the arguments that it writes to in place, by kind of call
        self.written_arguments: dict[Hashable, frozenset[int]] = {}
        self.buffers = WrittenBuffers()
        self.buffers_without_gradients = WrittenBuffers()  # a forward may write to others then
        self.records_again = False  # its graph cannot be filled again (see recompute.py)
        self.draws_on_host = False  # it draws from Python's or numpy's generators
        self.checked_recomputes = 0

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the wrapped block is gone"
        return module

    @property
    def linear(self) -> nn.Linear | None:
        """Return the linear layer of a head whose output may stay uncomputed (LazyLogits): the
        module itself, or the one inside adapters."""
        return None if self._linear is None else self._linear()

    @linear.setter
    def linear(self, layer: nn.Linear | None) -> None:
        self._linear = None if layer is None else weakref.ref(layer)

    @property
    def is_head(self) -> bool:
        """Tell whether it makes the logits."""
        return self._linear is not None

    @property
    def is_linear_head(self) -> bool:
        """Return whether its logits are `hidden @ weight.T + bias` of its own tensors."""
        return self.is_head and self.linear is self.module

    @cached_property
    def groups(self) -> list[Group]:
        return [g for g in (self.group, *self.borrowed) if g.members]

    @property
    def copied(self) -> list[Group]:
        """Return the groups that must be whole on the device: no embedding looked up by rows, no
        head in vocabulary chunks."""
        if self.in_vocab_chunks:
            return []
        return [g for g in self.groups if g.rows is None or g is not self.group]

    @property
    def in_vocab_chunks(self) -> bool:
        """Return whether this is a head that computes with two vocabulary chunks of its weight at
        a time."""
        return self.vocab_chunks is not None and not self.vocab_chunks.group.is_on("device")

    @cached_property
    def members(self) -> list[tuple[Group, Member]]:
        """Return every parameter that this unit computes with."""
        borrowed = [(group, m) for group, members in self.borrowed.items() for m in members]
        return [*((self.group, m) for m in self.group.members), *borrowed]

    def members_of(self, group: Group) -> list[Member]:
        return group.members if group is self.group else self.borrowed[group]

    def group_of_weight(self) -> Group:
        """Find the group that holds a head's weight (the embedding's, when tied)."""
        assert self.linear is not None, "this is no head"
        weight = self.linear.weight
        return next(g for g, m in self.members if m.parameter is weight)

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
