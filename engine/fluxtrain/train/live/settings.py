"""What can change while a run trains: rows of the placement table, slots and the chunk. Pure.

| setting                    | what it counts                                       |
|----------------------------|------------------------------------------------------|
| `prefetch`                 | blocks copied ahead of the one that computes         |
| `device_groups`            | groups that live on the device with their states     |
| `resident_blocks`          | other blocks whose weights stay on the device        |
| `blocks_without_recompute` | blocks with weights there that keep activations      |
| `activations_on_device`    | blocks whose inputs wait there: no user sets it, a   |
|                            | run lowers it when memory runs out                   |
| `chunk_rows`               | rows computed at once inside a block                 |

All but `chunk_rows` keep the bits of losses: another chunk sums gradients in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from fluxtrain.errors import BadInput
from fluxtrain.events.events import setting_name
from fluxtrain.plan.group_placement import GroupPlacement

SettingName = Literal[
    "prefetch",
    "device_groups",
    "resident_blocks",
    "blocks_without_recompute",
    "activations_on_device",
    "chunk_rows",
]
LIVE_SETTINGS = tuple(name for name in get_args(SettingName) if name != "activations_on_device")
LOSSES_DIFFER = (
    "by rounding, because gradients are summed in another order, and by other draws of dropout if "
    "the model has any"
)


def keeps_bits(name: SettingName) -> bool:
    """Return whether losses have the same bits after a change of this setting."""
    return name != "chunk_rows"


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """The settings in force between two changes."""

    rows: tuple[GroupPlacement, ...]  # the placement table
    slots: tuple[int, ...]  # that each card's streamed blocks share, where so many stream
    chunk_rows: int

    @property
    def prefetch(self) -> int:
        """Return the number of blocks copied ahead, where enough of them stream."""
        return max(1, max(self.slots) - 1)

    def value(self, name: SettingName) -> int:
        """Return the value of a setting; a count of table rows is over all cards."""
        if name == "prefetch":
            return self.prefetch
        if name == "chunk_rows":
            return self.chunk_rows
        return count_of(self.rows, name)

    def on_card(self, card: int) -> list[GroupPlacement]:
        """Return the rows of one card."""
        return [row for row in self.rows if row.card == card]


def count_of(rows: Iterable[GroupPlacement], name: SettingName) -> int:
    """Count the rows that a setting counts."""
    if name == "device_groups":
        return sum(row.weights == "device" for row in rows)
    blocks = [row for row in rows if row.kind == "block"]
    if name == "resident_blocks":
        return sum(row.resident for row in blocks)
    activations = "kept" if name == "blocks_without_recompute" else "inputs_on_device"
    return sum(row.activations == activations for row in blocks)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting and the value that it should have."""

    name: SettingName
    value: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def parse_change(arguments: Mapping[str, Any]) -> Change:
    """Return the change that a command asks for. Raises BadInput."""
    names = ", ".join(LIVE_SETTINGS)
    if len(arguments) != 1:
        raise BadInput(f"one change at a time: use one of {names} with a whole number")
    ((name, value),) = arguments.items()
    short = name.removeprefix("placement.")  # as a configuration and a plan have it
    name = short if setting_name(short) == name else name
    if name not in LIVE_SETTINGS:
        raise BadInput(f"{name} cannot change while a run trains: {names} can")
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{name} is {value!r}: use a whole number")
    return Change(name=cast(SettingName, name), value=value)
