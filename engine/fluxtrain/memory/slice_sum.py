"""The gradient of one backward pass over a head that came in slices: each goes home at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fluxtrain.memory.arrival import Arrival
from fluxtrain.memory.device import Ticket
from fluxtrain.memory.group import Member


@dataclass(eq=False)
class SliceSum:
    """What has come so far."""

    again: bool  # gradients of an earlier backward pass are at home, and these are added there
    indices: dict[int, None] = field(default_factory=dict)  # of members
    _tickets: list[Ticket] = field(default_factory=list)
    # by member index and first row of a slice: 2-norms (n,) of its rows
    _norms: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def add(self, member: Member, values: Tensor, home: Tensor) -> None:
        """Rows (n, ...) of the member's gradient are added at home; waits for the device."""
        self.indices[member.index] = None
        fresh = values.to("cpu")
        (home.add_ if member.has_gradient else home.copy_)(fresh)

    def send(self, member: Member, first: int, staged: Tensor, ticket: Ticket) -> None:
        """Rows (n, ...) from `first` on, rounded, are on their way home."""
        self.indices[member.index] = None
        self._tickets.append(ticket)
        rows = staged.view(len(staged), -1)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        self._norms.setdefault(member.index, {})[first] = norms

    def arrival(self) -> Arrival:
        """All has come; the norms are the same however the rows were cut."""
        if self.again:
            return Arrival([], None, {})
        norms = [
            torch.linalg.vector_norm(torch.cat([slices[first] for first in sorted(slices)]))
            for slices in self._norms.values()
        ]
        places = {index: place for place, index in enumerate(self._norms)}
        return Arrival(self._tickets, torch.stack(norms), places)
