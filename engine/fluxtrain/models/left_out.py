"""Tensors of a model's files that are not of the model: those of blocks that it was cut off."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn

_NUMBER = re.compile(r"\d+")


def further_blocks(model: nn.Module, left_out: Iterable[str]) -> list[str]:
    """Of the tensors that were left out those of whole further blocks: with a number that no block
    of the model has, and nothing in them that its blocks do not have.

    A block for predicting several tokens (DeepSeek-V3's, GLM's), which is stored under the next
    number and left out on purpose, has more than the others.
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
    """The list that a tensor's block is in, its number there, and the rest of the name with other
    numbers left out; None where it is in none."""
    number = _NUMBER.search(name)
    if number is None:
        return None
    return name[: number.start()], number.group(), _NUMBER.sub("#", name[number.end() :])


def _names(model: nn.Module) -> Iterator[str]:
    """Of parameters and buffers, with and without the prefix of the model inside."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    for name in model.state_dict():
        yield name
        yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
