"""`EngineCard`: one GPU of a wrapped model, and what of the engine belongs to it alone."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fluxtrain.core.device.device import Device
from fluxtrain.core.device.multi_gpu_streams import Joins
from fluxtrain.core.gradients.gradients import Gradients
from fluxtrain.core.gradients.host_gradients import Arrival
from fluxtrain.core.guards.shared_memory import version_of
from fluxtrain.core.memory.activation_offload import ActivationOffload
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.window import CopiesAhead, Window
from fluxtrain.core.ranks.exchange import Exchange
from fluxtrain.core.runtime.arrivals import arrivals_of
from fluxtrain.core.runtime.counters import Counters
from fluxtrain.core.runtime.memory_watch import MemoryWatch

_MOST_SHARED = 64  # copies of arguments kept at a time


class EngineCard:
    """A device with the slots, the copies ahead, the gradient sums and the offloaded activations of
    the groups that it computes with."""

    def __init__(
        self,
        number: int,
        device: Device,
        groups: Sequence[Group],
        counters: Counters,
        arrivals: dict[Group, Arrival],
        say: Callable[[str], None],
        exchange: Exchange,
    ) -> None:
        """Make the card of `number`; `groups` are the whole model's, `arrivals` their gradients on
        the host; `say` warns the user; `exchange` adds the gradients of other processes."""
        self.number = number
        self.device = device
        self.counts = counters.cards[number]
        self.window = Window(device, counters.uploaded)
        self.ahead = CopiesAhead(self.window, groups, number)
        self.gradients = Gradients(
            device, counters.downloaded, counters.sum_uploaded, arrivals, exchange
        )
        self.activation_offload = ActivationOffload(device, counters.evicted)
        self.watch = MemoryWatch(device, self.counts, self.activation_offload, say)
        self.shared = SharedArguments()
        self.ways = itertools.count()  # of tensors that come from other cards, in turn
        # arguments that code outside had made when a block last waited for it, with their versions
        self._joined: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # its copy of a head whose tokens all cards share, with the version of the weights
        self.head_weight: tuple[int, Tensor] | None = None

    def computing(self, *, joins: Joins = "now", lane: int = 0) -> AbstractContextManager[None]:
        """Compute on this card's streams inside the context; see `Device.computing`."""
        return self.device.computing(joins=joins, lane=lane)

    def joins_for(self, tensors: Iterable[Tensor], lane: int) -> Joins:
        """Say what a forward on a lane must wait for: what code outside has queued until now, or,
        where its arguments are those of the blocks before or say when they are there, until it was
        waited for the last time."""
        mine = [t for t in tensors if t.device == self.torch_device and arrivals_of(t) is None]
        if lane and all(self._is_joined(tensor) for tensor in mine):
            return "last"
        self._joined = {id(t): (weakref.ref(t), version_of(t)) for t in mine}
        return "now"

    def _is_joined(self, tensor: Tensor) -> bool:
        found = self._joined.get(id(tensor))
        return found is not None and found[0]() is tensor and found[1] == version_of(tensor)

    @property
    def torch_device(self) -> torch.device:
        """Return the device as torch names it."""
        return self.device.torch_device


class SharedArguments:
    """Copies of arguments that many blocks of a card get: one for each tensor, until it is freed
    or written to."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # by id

    def copy_of(self, tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return the card's copy of the tensor, which `make` makes on first use. Writes
        to tensors of inference mode are not counted: those are copied each time."""
        if tensor.is_inference():
            return make()
        known = self._copies.get(id(tensor))
        version = version_of(tensor)
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        self._forget_dead()
        made = make()
        self._copies[id(tensor)] = weakref.ref(tensor), version, made
        return made

    def _forget_dead(self) -> None:
        alive = {key: kept for key, kept in self._copies.items() if kept[0]() is not None}
        self._copies = dict(list(alive.items())[-_MOST_SHARED:])
