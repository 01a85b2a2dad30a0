"""The trainer's loop never makes the host wait for the device: not in any mode, not in any place.

torch raises at an operation that would (`.item()`, `nonzero`, a blocking copy). What the loop does
wait for by design are events: the numbers of the step before (its norm, its loss, whether fp16's
gradients overflowed), read when the next step is queued.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fluxtrain.plan import heads
from tests.gpu.loops import LAYERS, STREAMED, VOCAB_CHUNK_BYTES, Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WARM_UP, STEPS = 6, 12  # the first steps compare what they compute with what they expect
TIED: dict[str, Any] = {"tied": True}
PARTS: dict[str, dict[str, Any]] = {
    "embedding by rows": {"embedding": "rows"},
    "tied": TIED,
    "tied embedding by rows": {**TIED, "embedding": "rows"},
    "head in vocabulary chunks": {"head": "chunks"},
    "tied, rows and vocabulary chunks": {**TIED, "embedding": "rows", "head": "chunks"},
    "8-bit states, rows and vocabulary chunks": {
        "states": "8bit",
        "embedding": "rows",
        "head": "chunks",
    },
}
CASES: dict[str, dict[str, Any]] = {
    "exact": STREAMED,
    "exact, all on the device": {"offload": "none"},
    "accumulating": {**STREAMED, "accumulation": 2},
    "accumulating, all on the device": {"offload": "none", "accumulation": 2},
    "accumulating, some on the device": {
        "offload": "weights", "device_groups": 3, "resident_blocks": 1, "accumulation": 2,
    },
    "accumulating three": {**STREAMED, "accumulation": 3},
    "accumulating, moments deferred": {**STREAMED, "accumulation": 2, "deferred_moments": True},
    "accumulating, 8-bit states": {**STREAMED, "accumulation": 2, "states": "8bit"},
    "accumulating, fp16": {**STREAMED, "accumulation": 2, "dtype": torch.float16},
    "accumulating, unclipped": {**STREAMED, "accumulation": 2, "max_grad_norm": None},
    "exact, moments deferred": {**STREAMED, "deferred_moments": True},
    "in backward": {**STREAMED, "max_grad_norm": None, "optimizer_in_backward": True},
    "in backward, resident": {
        "offload": "none", "max_grad_norm": None, "optimizer_in_backward": True,
    },
    "8-bit states": {**STREAMED, "states": "8bit"},
    "8-bit states on the device": {"offload": "none", "states": "8bit"},
    "bf16 states on the device": {"offload": "none", "states": "bf16"},
    "kept activations": {"offload": "none", "blocks_without_recompute": LAYERS},
    "some kept": {
        "offload": "weights", "device_groups": 3, "resident_blocks": 1,
        "blocks_without_recompute": 2,
    },
    "packed": {**STREAMED, "documents": 4},
    "packed, all on the device": {"offload": "none", "documents": 4},
    "packed, kept": {"offload": "none", "documents": 4, "blocks_without_recompute": LAYERS},
    "offload max": {"offload": "max"},
    "embedding by rows": {**STREAMED, "embedding": "rows"},
    "tied embedding by rows": {**STREAMED, **TIED, "embedding": "rows"},
    "head in vocabulary chunks": {**STREAMED, "head": "chunks"},
    "tied, rows and vocabulary chunks": {**STREAMED, **TIED, "embedding": "rows", "head": "chunks"},
    **{
        f"accumulating, {name}": {**STREAMED, "accumulation": 2, **parts}
        for name, parts in PARTS.items()
    },
    "fp16": {**STREAMED, "dtype": torch.float16},
    "fp16, all on the device": {"offload": "none", "dtype": torch.float16},
}  # fmt: skip


@pytest.fixture(autouse=True)
def waiting_is_allowed_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", VOCAB_CHUNK_BYTES)
    yield
    torch.cuda.set_sync_debug_mode("default")


def forbid_waiting(step: int) -> None:
    """From the end of the warm-up on."""
    if step == WARM_UP + 1:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")


@pytest.mark.parametrize("case", CASES)
def test_no_operation_of_the_loop_synchronises(case: str) -> None:
    training = Training(STEPS, **CASES[case])
    training.batches.before_step = forbid_waiting
    try:
        training.loop.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    told = training.run()  # no step is left: this closes the engine
    assert [step.step for step in told] == list(range(1, STEPS + 1))
    assert told[-1].loss < told[0].loss
