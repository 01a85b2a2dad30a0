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
        return f"{who} to stream: {_what_is_missing(model)}"
    name, largest = max(found, key=lambda item: _module_bytes(item[1]))
    return (
        f"{who} worth streaming: {name}, the largest list of modules, holds "
        f"{bytes_text(_module_bytes(largest))}, less than {_SMALLEST_SHARE:.0%}. Train it without "
        "wrap"
    )


def _what_is_missing(model: nn.Module) -> str:
    """Say what a model without a block list lacks; name the Sequential that is nearest to one."""
    near = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Sequential) and len(_with_parameters(module)) >= 2
    ]
    if not near:
        return (
            "no ModuleList or Sequential with two or more modules that hold parameters. Train it "
            "without wrap, or put its layers into a ModuleList"
        )
    name, largest = max(near, key=lambda item: _module_bytes(item[1]))
    members = _with_parameters(largest)
    leaf, layer = next((n, m) for n, m in members if _is_leaf(m))
    others = sum(not _is_leaf(m) for _, m in members)
    beside = f" beside {others} modules made of several" if others else ""
    return (
        f"{name or 'the model'}, a Sequential, holds single layers ({leaf}: "
        f"{type(layer).__name__}){beside}, and only one whose every module with parameters is "
        "made of smaller ones is a list of blocks. Train it without wrap, or put the modules that "
        "repeat into a ModuleList or a Sequential of their own"
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
    """True for two or more members with parameters; a Sequential must hold no leaf (Linear)."""
    members = _with_parameters(module)
    if isinstance(module, nn.Sequential) and any(_is_leaf(member) for _, member in members):
        return False
    return len(members) >= 2


def _with_parameters(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _module_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _parents_of(lists: list[nn.Module], model: nn.Module) -> set[int]:
    """Return the ids of all modules that contain a block list."""
    wanted = {id(module) for module in lists}
    parents: set[int] = set()

    def visit(module: nn.Module) -> bool:
        holds = id(module) in wanted
        for child in module.children():
            holds |= visit(child)
        if holds:
            parents.add(id(module))
        return holds

    visit(model)
    return parents


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
