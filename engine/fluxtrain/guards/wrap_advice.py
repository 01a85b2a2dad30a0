"""What `wrap` advises the program that calls it. FluxTrain's own commands wrap without advice: what
their user can do is said by each, in words of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fluxtrain.memory.group import Group
from fluxtrain.plan.states import LEAST_PACKED

_of_a_command = ContextVar("of_a_command", default=False)


@contextmanager
def without_advice() -> Iterator[None]:
    """Wrap for a command, which nobody can tell to call a library otherwise."""
    before = _of_a_command.set(True)
    try:
        yield
    finally:
        _of_a_command.reset(before)


def advice(groups: Iterable[Group]) -> str:
    """Say what a program could do better before it calls `wrap`; empty where it is all right.

    peft's `prepare_model_for_kbit_training` casts every weight that is not packed to fp32.
    """
    wide = 0 if _of_a_command.get() else wide_frozen_weights(groups)
    if not wide:
        return ""
    return (
        f"{wide:,} frozen weights of blocks are float32, which takes twice the memory and time of "
        "bfloat16: load the model with dtype=torch.bfloat16, and leave out "
        "prepare_model_for_kbit_training, which casts them (wrap needs nothing of it)"
    )


def wide_frozen_weights(groups: Iterable[Group]) -> int:
    """Count the blocks' frozen weights in fp32 beside adapters; 0 unless they are most of them."""
    blocks = [group for group in groups if group.kind == "block"]
    frozen = [m for group in blocks for m in group.members if not m.trained]
    wide = sum(m.count for m in frozen if m.segment.dtype == torch.float32)
    count = sum(m.count for m in frozen)
    trained = sum(group.trained_count for group in blocks)
    few = 2 * wide <= count or wide < LEAST_PACKED
    return wide if not few and 0 < trained < count else 0
