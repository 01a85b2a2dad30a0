"""Finds the blocks that a model's files have and the model lacks, because it was cut off."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn

_NUMBER = re.compile(r"\d+")


def further_blocks(model: nn.Module, left_out: Iterable[str]) -> list[str]:
    """Return the ignored tensors that belong to whole further blocks: with a number that no block
    of the model has, and with no tensor that its blocks do not have.

    A block for predicting several tokens (DeepSeek-V3's, GLM's) is stored under the next number and
    ignored on purpose; it has tensors that the other blocks lack.
    """
    own = defaultdict[str, set[str]](set)  # by the list's name: numbers of its blocks
    kinds = set()
    for name in _names(model):
        if found := _placed(name):
            place, number, kind = found
            own[place].add(number)
            kinds.add((place, kind))
    further = defaultdict[tuple[str, str], list[tuple[str, str]]](list)
    for name in left_out:
        if found := _placed(name):
            place, number, kind = found
            if place in own and number not in own[place]:
                further[place, number].append((name, kind))
    return sorted(
        name
        for (place, _), tensors in further.items()
        if all((place, kind) in kinds for _, kind in tensors)
        for name, _ in tensors
    )


def _placed(name: str) -> tuple[str, str, str] | None:
    """Return the list of a tensor's block, the block's number in it, and the rest of the name
    without other numbers; None if the tensor is in no list."""
    number = _NUMBER.search(name)
    if number is None:
        return None
    return name[: number.start()], number.group(), _NUMBER.sub("#", name[number.end() :])


def _names(model: nn.Module) -> Iterator[str]:
    """Return the names of parameters and buffers, with and without the inner model's prefix."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    for name in model.state_dict():
        yield name
        yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
