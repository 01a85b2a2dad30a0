"""Refuse `torch.autograd.grad` and `backward(inputs=...)` for wrapped weights.

A wrapped block is one node of torch's graph, and its weights are not inputs of that node. torch
would say that they were not used, return None for them, or leave out the part through blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxtrain.errors import MisusedModel

PARTIAL = (torch.autograd.grad, torch.autograd.backward)


def refuse_weights_behind_blocks(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise MisusedModel when a call of one of `PARTIAL` with these arguments asks for gradients of
    wrapped weights, of a value that wrapped blocks of their model computed."""
    asked = kwargs.get("inputs")
    if asked is None:
        asked = args[1] if len(args) > 1 else ()  # of `grad`; those of `backward` are gradients
    owners = [vars(x)["_fluxtrain"] for x in _tensors(asked) if "_fluxtrain" in vars(x)]
    if not owners:
        return
    anchors = {id(owner.context.anchor_node): owner for owner in reversed(owners)}
    owner = _first_reached(_tensors(args[0] if args else ()), anchors)
    if owner is not None:
        raise MisusedModel(
            f"torch.autograd.grad and backward(inputs=...) do not reach {owner.name}: wrapped "
            "blocks put gradients of their weights into .grad and nowhere else. Use "
            "loss.backward(), and read .grad"
        )


def _tensors(given: Any) -> list[Tensor]:
    each = given if isinstance(given, tuple | list) else (given,)
    return [tensor for tensor in each if isinstance(tensor, Tensor)]


def _first_reached(outputs: list[Tensor], anchors: Mapping[int, Any]) -> Any:
    """Return the value in `anchors` of the first node of the graph of `outputs` that is there."""
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = {id(node): node for node in nodes}  # a node's id is its own as long as it is held
    while nodes:
        node = nodes.pop()
        if id(node) in anchors:
            return anchors[id(node)]
        for following, _ in node.next_functions:
            if following is not None and id(following) not in seen:
                seen[id(following)] = following
                nodes.append(following)
    return None
