"""Where the bytes of a group live: a state for each kind of tensor, which changes here alone.

    device ◀──▶ host ◀──▶ disk ◀──▶ device       and `under way` from the first byte to the last

Using what is under way raises an error, also after a move that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fluxtrain.plan.group_placement import KINDS, GroupPlacement, Kind

_NEVER: dict[Kind, tuple[str, ...]] = {"weights": (), "state": (), "gradients": ("disk",)}


class IllegalMove(RuntimeError):
    """A move, or a use, that would read bytes on their way or lose some: a bug of the engine."""


class Homes:
    """The tiers of a group's weights, optimizer state and gradients."""

    def __init__(self, row: GroupPlacement) -> None:
        """Begin where `row` has them: what is there now is put there."""
        self._row, self._under_way = row, frozenset[Kind]()

    @property
    def row(self) -> GroupPlacement:
        """Return the group's row of the placement table; of what is under way, where it was."""
        return self._row

    def use(self, kind: Kind) -> None:
        """Raise IllegalMove where bytes of this kind are under way."""
        if kind in self._under_way:
            raise IllegalMove(f"the {kind} of {self._row.name} are under way to another tier")

    def stays(self, row: GroupPlacement) -> None:
        """Take a row with the same tiers. Raises IllegalMove for another one."""
        if moved := self.leaving(row):
            raise IllegalMove(f"{', '.join(moved)} of {row.name} change homes without a move")
        self._row = row

    def leaving(self, row: GroupPlacement) -> list[Kind]:
        """Return the kinds that have another home in `row`."""
        return [kind for kind in KINDS if self._row.tier_of(kind) != row.tier_of(kind)]

    def refuse(self, row: GroupPlacement, busy: Iterable[str]) -> None:
        """Raise IllegalMove where the group cannot move to `row` now. busy: what uses its bytes."""
        users = [f"{what} is under way" for what in busy]
        for kind in self.leaving(row):
            self.use(kind)
            tiers = self._row.tier_of(kind), row.tier_of(kind)
            if any(tier in _NEVER[kind] for tier in tiers):
                users.append(f"{kind} move between device and host alone")
        if users:
            raise IllegalMove(f"{row.name} cannot move: {', '.join(users)}")

    @contextmanager
    def moving(self, row: GroupPlacement, busy: Iterable[str]) -> Iterator[None]:
        """Move inside; the kinds that leave are under way until it ends. Raises as `refuse`."""
        self.refuse(row, busy)
        self._under_way = frozenset(self.leaving(row))
        yield
        self._row, self._under_way = row, frozenset()
