"""`Card`: one GPU of a wrapped model, and what of the engine belongs to it alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fluxtrain.device.device import Device
from fluxtrain.gradients.gradients import Gradients
from fluxtrain.gradients.host_gradients import Arrival
from fluxtrain.memory.activation_offload import ActivationOffload
from fluxtrain.memory.group import Group
from fluxtrain.memory.window import Window
from fluxtrain.runtime.cards.ahead import CopiesAhead
from fluxtrain.runtime.cards.shared_arguments import SharedArguments
from fluxtrain.runtime.counters import Counters


class Card:
    """A device with the slots, the copies ahead, the gradient sums and the offloaded activations of
    the groups that it computes with."""

    def __init__(
        self,
        number: int,
        device: Device,
        groups: Sequence[Group],
        counters: Counters,
        arrivals: dict[Group, Arrival],
    ) -> None:
        """`groups` are those of the whole model, `arrivals` their gradients on the host."""
        self.number = number
        self.device = device
        self.counts = counters.cards[number]
        self.window = Window(device, counters.uploaded)
        self.ahead = CopiesAhead(self.window, groups, number)
        self.gradients = Gradients(
            device, counters.downloaded, counters.sum_uploaded, arrivals=arrivals
        )
        self.activation_offload = ActivationOffload(device)
        self.shared = SharedArguments()
        # its copy of a head whose tokens all cards share, with the version of the weights
        self.head_weight: tuple[int, Tensor] | None = None

    def computing(self, *, joins: bool = True) -> AbstractContextManager[None]:
        """Compute inside where this card's blocks do; see `Device.computing`."""
        return self.device.computing(joins=joins)

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return self.device.torch_device
