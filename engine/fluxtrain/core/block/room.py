"""Device memory that runs out inside of a block: it is computed again with fewer rows at once.

So a training goes on where another program takes memory, or where rows are longer than any before.
A trainer that redoes whole steps, and tells of it, switches this off.
"""

from __future__ import annotations

import torch

from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context

_CURE = (
    "fluxtrain: {name} ran out of device memory with {rows} rows at once, and fewer are "
    "impossible: wrap the model with offload='max', give it shorter rows, or close other programs "
    "on this GPU"
)


def halve_chunk(
    context: Context, unit: Unit, rows: int | None, error: torch.OutOfMemoryError
) -> None:
    """Let blocks compute half as many rows at once from now on.

    Raises `error`, with the cure in a note, where that is impossible: one row is left, or the
    trainer redoes the step. rows: of the chunk that ran out of memory; None: the block's arguments
    carry none.
    """
    if not context.retries_blocks:
        raise error
    uncut = rows is not None and 0 < context.chunk_rows < rows  # it runs on the whole batch alone
    if rows is None or rows < 2 or uncut or unit.group.kind != "block":
        note_cure(unit, rows, error)
        raise error
    context.chunk_rows = rows // 2
    tell(context, unit, rows)


def give_back(device: torch.device) -> None:
    """Free device memory that torch caches: cut for the old number of rows, it would hold fewer
    rows with gaps between them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def note_cure(unit: Unit, rows: int | None, error: torch.OutOfMemoryError) -> None:
    """Add the cure to the error."""
    error.add_note(_CURE.format(name=unit.name, rows=rows or "all"))


def tell(context: Context, unit: Unit, rows: int) -> None:
    """Warn that a block is computed again with half of these rows."""
    context.say(
        f"device memory ran out in {unit.name} with {rows} rows at once: it is computed again with "
        f"{rows // 2}, and sums are taken in another order; chunk_rows={rows // 2} avoids the "
        "second attempt"
    )
