"""Blocks for a screen: neighbours of equal sizes with numbered names are reported as one run."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec.structs import replace

from fluxtrain.telemetry.events import BlockRun

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")

Sizes = tuple[str, int, int, int]  # name; bytes of weights, gradients and optimizer state


def runs_of(blocks: Iterable[Sizes]) -> tuple[BlockRun, ...]:
    """Merge neighbours such as `model.layers.0`, `model.layers.1`, ... of equal sizes into runs."""
    runs: list[BlockRun] = []
    for name, weights, gradients, optimizer in blocks:
        found = _LAST_NUMBER.search(name)
        first = int(found[1]) if found else 0
        pattern = name if found is None else f"{name[: found.start()]}{{}}{name[found.end() :]}"
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.name, last.first + last.count) == (pattern, first)
            and (last.weights_bytes, last.gradients_bytes, last.optimizer_bytes)
            == (weights, gradients, optimizer)
        ):
            runs[-1] = replace(last, count=last.count + 1)
            continue
        sizes = {"weights_bytes": weights, "gradients_bytes": gradients}
        runs.append(
            BlockRun(name=pattern, first=first, count=1, optimizer_bytes=optimizer, **sizes)
        )
    return tuple(runs)
