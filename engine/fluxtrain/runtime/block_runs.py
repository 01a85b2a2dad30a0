"""Blocks for a screen: neighbours of equal sizes with numbered names are reported as one run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from fluxtrain.telemetry.events import BlockRun

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one block; `weights` are trained, frozen and packed ones together."""

    weights: int
    gradients: int
    optimizer: int
    frozen: int = 0
    packed: int = 0


def runs_of(blocks: Iterable[tuple[str, Sizes]]) -> tuple[BlockRun, ...]:
    """Merge neighbours such as `model.layers.0`, `model.layers.1`, ... of equal sizes into runs."""
    runs: list[BlockRun] = []
    for name, sizes in blocks:
        found = _LAST_NUMBER.search(name)
        first = int(found[1]) if found else 0
        pattern = name if found is None else f"{name[: found.start()]}{{}}{name[found.end() :]}"
        one = BlockRun(
            name=pattern,
            first=first,
            count=1,
            weights_bytes=sizes.weights,
            gradients_bytes=sizes.gradients,
            optimizer_bytes=sizes.optimizer,
            frozen_bytes=sizes.frozen,
            packed_bytes=sizes.packed,
        )
        last = runs[-1] if runs else None
        if last is not None and one == replace(last, first=last.first + last.count, count=1):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(one)
    return tuple(runs)
