"""Which groups the graph of a backward pass under way is not done with yet.

An eager step changes weights while the pass still runs. It must not change those that a block
called twice, or an expression outside of the blocks, has still to be differentiated with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch

from fluxtrain.memory.group import Group


class Graphs:
    """Nodes of torch's graph that compute with groups, from their forward to their backward."""

    def __init__(self) -> None:
        self._nodes: dict[Group, WeakSet[Any]] = {}  # whose backward has not begun
        self._outside: set[Group] = set()

    def record(self, node: Any, groups: Iterable[Group]) -> None:
        """The node (`ctx` of an autograd function) has computed with the groups."""
        for group in groups:
            self._nodes.setdefault(group, WeakSet()).add(node)

    def begin_backward(self, node: Any, groups: Iterable[Group]) -> None:
        """Its part of the pass is being computed."""
        for group in groups:
            if group in self._nodes:
                self._nodes[group].discard(node)

    def record_outside(self, group: Group) -> None:
        """An expression outside of the blocks has used a weight of the group."""
        self._outside.add(group)

    def end_step(self) -> None:
        """Weights that were used outside have changed: their graph is of no use any more."""
        self._outside.clear()

    def need(self, group: Group) -> bool:
        """Will more of the pass under way compute with the group, or could it? Without a pass: no
        more will."""
        if group in self._outside:
            return True
        nodes = self._nodes.get(group)
        if not nodes or torch._C._current_graph_task_id() < 0:
            return False
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
