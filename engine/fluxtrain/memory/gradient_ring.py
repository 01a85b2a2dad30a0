"""Host memory for gradients that are used up while the backward pass still runs.

In an eager step a group's gradients are needed from their way home until the group's update. A few
buffers of each size are enough for that, so that gradients take no two bytes a parameter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fluxtrain.memory.group import Group
from fluxtrain.plan.depths import ring_depth

Shape = tuple[tuple[object, int], ...]


class GradientRing:
    """Lends the oldest buffer on; used by the thread that runs the backward pass."""

    def __init__(self) -> None:
        self._borrowers: dict[Shape, deque[Group]] = {}  # that hold a buffer, oldest first

    def lend(self, group: Group) -> None:
        """Memory for the group's gradients: its own, a new buffer, or the one that another group
        has had for longest. Waits for that group's update."""
        shape = tuple((segment.dtype, segment.elements) for segment in group.trained)
        borrowers = self._borrowers.setdefault(shape, deque())
        if group in borrowers:
            borrowers.remove(group)
        elif group.holds_gradient_memory:
            return  # from steps that were not eager
        elif len(borrowers) < ring_depth(sum(s.size_bytes for s in group.trained)):
            group.ensure_gradient()
        else:
            oldest = borrowers.popleft()
            oldest.wait()
            group.take_gradient_memory(oldest)
        borrowers.append(group)

    def keep(self, group: Group) -> None:
        """The group's gradients stay: the buffer that it has, if any, is its own from now on."""
        for borrowers in self._borrowers.values():
            if group in borrowers:
                borrowers.remove(group)

    def give_back(self, groups: Iterable[Group]) -> None:
        """Free all buffers, between two steps: the next one takes new ones. A buffer may have been
        made by any of `groups` and lent on since."""
        lent = [group for borrowers in self._borrowers.values() for group in borrowers]
        addresses = {address for group in lent for address in group.give_up_gradient_memory()}
        if addresses:
            for group in groups:
                group.drop_arenas(addresses)
        self._borrowers.clear()
