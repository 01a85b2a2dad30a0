"""Find a model's repeated blocks by walking the module tree.

There is no table of model names: a block list is an outermost `ModuleList` (or `Sequential`) of
modules with parameters that holds at least 2 % of the model's bytes. A module with parameters
outside of such lists is an edge (embedding, final norm, head).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fluxtrain.errors import UnsupportedModel
from fluxtrain.units import bytes_text

_SMALLEST_SHARE = 0.02  # of the model's bytes: a shorter list is not worth streaming


@dataclass(frozen=True)
class Parts:
    """A model taken apart; names are dotted paths as in `named_modules`."""

    blocks: tuple[tuple[str, nn.Module], ...]  # in the order of the module tree
    edges: tuple[tuple[str, nn.Module], ...]
    loose: tuple[tuple[str, nn.Parameter], ...]  # parameters directly on a parent of both


def take_apart(model: nn.Module) -> Parts:
    """Find blocks, edges and loose parameters. Raises UnsupportedModel without repeated blocks."""
    total_bytes = _module_bytes(model)
    found = _outermost_lists(model, "")
    lists = [
        (name, module)
        for name, module in found
        if _module_bytes(module) >= _SMALLEST_SHARE * total_bytes
    ]
    blocks = tuple(
        (f"{name}.{key}" if name else key, child)
        for name, module in lists
        for key, child in module.named_children()
        if _module_bytes(child)
    )
    if not blocks:
        raise UnsupportedModel(_without_blocks(model, found, total_bytes))
    inside = {id(module) for _, block in blocks for module in block.modules()}
    parents = _parents_of([module for _, module in lists], model)
    edges: list[tuple[str, nn.Module]] = []
    loose: list[tuple[str, nn.Parameter]] = []
    _collect_edges(model, "", inside, parents, edges, loose)
    return Parts(blocks, tuple(edges), tuple(loose))


def _without_blocks(model: nn.Module, found: list[tuple[str, nn.Module]], total_bytes: int) -> str:
    size = f"its parameters take {bytes_text(total_bytes)}"
    who = f"{type(model).__name__} ({size}) has no repeated blocks"
    if not found:
        return (
            f"{who} to stream: no ModuleList or Sequential with two or more modules that hold "
            "parameters, where a Sequential of single layers (Linear, Conv2d) does not count. "
            "Train it without wrap, or put the modules that repeat into a ModuleList or a "
            "Sequential of their own"
        )
    name, largest = max(found, key=lambda item: _module_bytes(item[1]))
    return (
        f"{who} worth streaming: {name}, the largest list of modules, holds "
        f"{bytes_text(_module_bytes(largest))}, less than {_SMALLEST_SHARE:.0%}. Train it without "
        "wrap"
    )


def _outermost_lists(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList | nn.Sequential) and _is_block_list(child):
            found.append((path, child))
        else:
            found += _outermost_lists(child, path)
    if not prefix and not found and isinstance(module, nn.Sequential) and _is_block_list(module):
        return [("", module)]
    return found


def _is_block_list(module: nn.Module) -> bool:
    """Return whether it has two or more members with parameters; a Sequential must hold no leaf
    (Linear)."""
    members = [child for child in module.children() if any(True for _ in child.parameters())]
    if isinstance(module, nn.Sequential) and not all(any(m.children()) for m in members):
        return False
    return len(members) >= 2


def _module_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _parents_of(lists: list[nn.Module], model: nn.Module) -> set[int]:
    """Return the ids of all modules that contain a block list, and of the lists."""
    wanted = {id(module) for module in lists}
    return {
        id(module)
        for module in model.modules()
        if any(id(inner) in wanted for inner in module.modules())
    }


def _collect_edges(
    module: nn.Module,
    prefix: str,
    inside: set[int],
    parents: set[int],
    edges: list[tuple[str, nn.Module]],
    loose: list[tuple[str, nn.Parameter]],
) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        loose.append((f"{prefix}.{name}" if prefix else name, parameter))
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if id(child) in inside or any(child is e for _, e in edges):
            continue
        if id(child) in parents:
            _collect_edges(child, path, inside, parents, edges, loose)
        elif any(True for _ in child.parameters()):
            edges.append((path, child))
