"""Boundary activations: what a block keeps between its forward and its backward pass.

They stay on the device, or wait on the host when the plan says so (`offload="max"`): sent home as
soon as the block has run, and brought back when its backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.memory.device import Device, Ticket


@dataclass(eq=False)
class Parked:
    """One tensor's bytes on the host."""

    host: Tensor
    ticket: Ticket
    source: Tensor | None  # kept until the copy has been made

    def settle(self) -> None:
        """Let go of the device memory once the copy is made."""
        if self.source is not None and self.ticket.done():
            self.source = None


class BoundaryPark:
    """Sends boundaries to the host and brings them back; one engine's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._leaving: list[Parked] = []

    def park(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> dict[int, Parked]:
        """Start to send home the tensors that need gradients; (position -> where it went)."""
        self._leaving = [p for p in self._leaving if p.source is not None]
        for parked in self._leaving:
            parked.settle()
        gone: dict[int, Parked] = {}
        for i, (tensor, needed) in enumerate(zip(tensors, needs, strict=True)):
            if needed and tensor.is_contiguous():
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.pins)
                source = tensor.detach()
                gone[i] = Parked(host, self._device.download(host, source), source)
                self._leaving.append(gone[i])
        return gone

    def fetch(self, parked: Parked) -> Tensor:
        """The tensor on the device again; the computation waits for it."""
        parked.ticket.wait_host()
        parked.source = None
        back = torch.empty_like(parked.host, device=self._device.torch_device)
        ticket = self._device.upload(back, parked.host, None, self._device.mark())
        ticket.wait_compute("activations")
        return back
