"""Where a wrapped model's bytes go, decided from sizes and free memory. Pure; no torch.

The rule of `auto`: on a GPU `none` when its fixed parts leave half of the budget to activations,
else `weights` with as many of the first parts wholly on the device as that half holds (host memory
bandwidth binds before PCIe does, and such parts use neither); without a GPU `weights`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.telemetry.events import ChoiceMade
from fluxtrain.units import bytes_text

OFFLOADS = ("auto", "none", "optimizer", "weights", "max")
STREAMING_SLOTS = 3
_FIXED_SHARE = 0.5  # of the budget may be weights, states and gradients; the rest is activations
_BUDGET_SHARE = 0.9  # of the free memory


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's groups. `wire` is weights; `none` is weights, states and gradients."""

    block_wire: tuple[int, ...]
    edge_wire: tuple[int, ...]
    state: int  # optimizer states of all groups
    gradient: int  # rounded gradients of all groups
    whole: tuple[int, ...]  # weights, states and gradient of each group, in forward order
    largest_sum: int  # fp32 gradient sum of the largest group
    shared_sum: int  # fp32 sums of groups that several units share
    cpu: bool


@dataclass(frozen=True)
class Placement:
    """The decision and its reasons."""

    offload: str
    resident_blocks: int  # whose weights stay on the device
    device_groups: int  # first groups, in forward order, whose states and gradients are there too
    slots: int  # shared by the blocks that are not resident
    budget_bytes: int | None
    device_bytes: int  # of weights, states and gradients; activations come on top
    host_bytes: int
    chunk_rows: int | None = None
    activation_bytes: int = 1 << 30  # for the activations of one chunk
    choices: tuple[ChoiceMade, ...] = field(default=())

    def chunk_for(self, row_bytes: int, rows: int) -> int:
        """Rows of a chunk whose saved activations (row_bytes each) fit."""
        return max(1, min(rows, self.activation_bytes // max(1, row_bytes)))


def place(
    sizes: Sizes,
    *,
    offload: str,
    free_bytes: int | None,
    budget_bytes: int | None,
    chunk_rows: int | None,
    resident_blocks: int | None,
    device_groups: int | None = None,
) -> Placement:
    """Decide. `free_bytes` is the device's free memory (None without a GPU).

    Raises BadInput for an unknown `offload`, DoesNotFit when the smallest form is too large.
    """
    if offload not in OFFLOADS:
        raise BadInput(f"offload is {offload!r}: use one of {', '.join(OFFLOADS)}")
    budget = budget_bytes
    if budget is None and free_bytes is not None:
        budget = int(free_bytes * _BUDGET_SHARE)
    chosen, resident, because = _choose(sizes, offload, budget, resident_blocks)
    slots = 2 if chosen == "max" else STREAMING_SLOTS
    need = _device_bytes(sizes, chosen, resident, slots)
    whole = len(sizes.whole) if chosen == "none" else device_groups or 0
    if offload == "auto" and chosen == "weights" and device_groups is None and budget is not None:
        limit = int(budget * _FIXED_SHARE)
        while whole < len(sizes.whole) and need + sum(sizes.whole[: whole + 1]) <= limit:
            whole += 1
        because += f"; the first {whole} of {len(sizes.whole)} parts keep their states there too"
    if chosen != "none":
        need += sum(sizes.whole[:whole])
    if budget is not None and need > budget:
        smallest = _device_bytes(sizes, "max", 0, 2)
        raise DoesNotFit(
            f"offload={chosen} needs {bytes_text(need)} on the device for weights, gradients and "
            f"states, and the budget is {bytes_text(budget)}; the least is "
            f"{bytes_text(smallest)} with offload=max"
        )
    activations = (budget - need) // 2 if budget is not None else 1 << 30
    return Placement(
        chosen,
        resident,
        whole,
        slots if chosen in ("weights", "max") else 0,
        budget,
        need,
        _host_bytes(sizes, chosen),
        chunk_rows,
        max(activations, 1 << 20),
        (ChoiceMade(name="offload", value=chosen, because=because),),
    )


def _choose(
    sizes: Sizes, offload: str, budget: int | None, resident: int | None
) -> tuple[str, int, str]:
    blocks = len(sizes.block_wire)
    if offload != "auto":
        fixed = {"none": blocks, "optimizer": blocks, "weights": 0, "max": 0}[offload]
        count = fixed if resident is None or offload in ("none", "optimizer") else resident
        return offload, min(count, blocks), "as set"
    if sizes.cpu or budget is None:
        return (
            "weights",
            min(resident or 0, blocks),
            (
                "without a GPU the device is a buffer in host memory: blocks stream through "
                f"{STREAMING_SLOTS} slots"
            ),
        )
    limit = int(budget * _FIXED_SHARE)
    need = _device_bytes(sizes, "none", blocks, 0)
    if need <= limit:
        return (
            "none",
            blocks,
            (
                f"needs {bytes_text(need)} of the {bytes_text(budget)} budget, which leaves at least "
                "half to activations"
            ),
        )
    base = _device_bytes(sizes, "weights", 0, STREAMING_SLOTS)
    count = 0 if resident is None else min(resident, blocks)
    if base > budget:
        return "max", 0, f"even streaming needs {bytes_text(base)} of {bytes_text(budget)}"
    return (
        "weights",
        count,
        (
            f"all weights with states need {bytes_text(_device_bytes(sizes, 'none', blocks, 0))}, the "
            f"budget is {bytes_text(budget)}: blocks stream"
        ),
    )


def _device_bytes(sizes: Sizes, mode: str, resident: int, slots: int) -> int:
    sums = sizes.largest_sum + sizes.shared_sum
    if mode == "none":
        wire = sum(sizes.block_wire) + sum(sizes.edge_wire)
        return wire + sizes.state + sizes.gradient + sums
    staging = 4 * (sizes.largest_sum // 2)
    edges = sum(sizes.edge_wire)
    if mode == "optimizer":
        return sum(sizes.block_wire) + edges + sums + staging
    streamed = sizes.block_wire[resident:]
    shared = slots * max(streamed, default=0)
    return sum(sizes.block_wire[:resident]) + shared + edges + sums + staging


def _host_bytes(sizes: Sizes, mode: str) -> int:
    if mode == "none" and not sizes.cpu:
        return 0
    wire = sum(sizes.block_wire) + sum(sizes.edge_wire)
    return wire + sizes.state + sizes.gradient
