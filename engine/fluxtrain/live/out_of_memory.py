"""What an error says of device memory that ran out, and what is said to people."""

from __future__ import annotations

import re

from fluxtrain.errors import DoesNotFit
from fluxtrain.runtime.context import Context

_GPU = re.compile(r"\bGPU (\d+)\b")


def gpu_of(error: BaseException) -> int | None:
    """Return torch's number of the GPU whose memory ran out; None where the error does not say."""
    found = _GPU.search(str(error))
    return None if found is None else int(found[1])


def out_of_memory(context: Context, step: int, error: BaseException, last: str) -> DoesNotFit:
    """Return the end of a run that has nothing left to give up in the step after `step`, with what
    helps; `last` says which checkpoint there is."""
    chunk_rows = context.chunk_rows
    cures = (
        "set a smaller placement.chunk_rows" if chunk_rows > 1 else "",
        "set placement.offload=max" if context.plan.offload != "max" else "",
        "shorten data.sequence_length",
        "or close other programs on the GPU",
    )
    return DoesNotFit(
        f"device memory ran out at step {step + 1} with chunks of {chunk_rows} rows "
        f"({str(error).splitlines()[0]}): {', '.join(filter(None, cures))}; {last}"
    )
