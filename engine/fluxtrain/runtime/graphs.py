"""Which groups the graph of a backward pass under way is not done with yet.

A step in backward changes weights while the pass still runs. It must not change those that a block
called twice, or an expression outside of the blocks, has still to be differentiated with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from fluxtrain.memory.group import Group


class Graphs:
    """Nodes of torch's graph that compute with groups."""

    def __init__(self) -> None:
        self._nodes: dict[Group, WeakSet[Any]] = {}
        self._begun: WeakSet[Any] = WeakSet()  # in passes under way
        self._passes: set[int] = set()  # torch's numbers of backward passes that have not ended
        self._outside: set[Group] = set()
        self._aliases: dict[Group, list[ref[Tensor]]] = {}

    def record(self, node: Any, groups: Iterable[Group]) -> None:
        """The node (`ctx` of an autograd function) has computed with the groups."""
        within_backward = torch._C._current_graph_task_id() >= 0
        for group in groups:
            self._nodes.setdefault(group, WeakSet()).add(node)
            if within_backward:  # reentrant checkpointing: nobody sees what is computed again later
                self._outside.add(group)

    def begin_backward(self, node: Any) -> None:
        """Its part of the pass is being computed."""
        self._begun.add(node)

    def enter_pass(self, at_its_end: Callable[[], None]) -> None:
        """What runs now is of a backward pass, at whose end the call is made, once."""
        number = torch._C._current_graph_task_id()
        if number in self._passes:
            return
        self._passes.add(number)

        def end() -> None:
            self._passes.discard(number)
            if not self._passes:
                self._begun.clear()  # another pass may take the same nodes (`retain_graph`)
            at_its_end()

        torch.autograd.Variable._execution_engine.queue_callback(end)

    @property
    def broke_off(self) -> bool:
        """Has the last backward pass raised, so that its end was never told?"""
        return bool(self._passes) and torch._C._current_graph_task_id() < 0

    def abandon_pass(self) -> None:
        """It did, and that is dealt with."""
        self._passes.clear()
        self._begun.clear()

    def record_outside(self, group: Group) -> None:
        """An expression outside of the blocks has used a weight of the group."""
        self._outside.add(group)

    def record_alias(self, group: Group, alias: Tensor) -> None:
        """A tensor over the memory of a weight was handed out, which a graph may keep."""
        left = [known for known in self._aliases.get(group, ()) if known() is not None]
        self._aliases[group] = [*left, ref(alias)]

    def end_step(self) -> None:
        """Weights that were used outside have changed: their graph is of no use any more."""
        self._outside.clear()

    def need(self, group: Group) -> bool:
        """Will more of the pass under way compute with the group, or could it? Without a pass: no
        more will."""
        if group in self._outside or any(a() is not None for a in self._aliases.get(group, ())):
            return True
        nodes = self._nodes.get(group)
        if not nodes or torch._C._current_graph_task_id() < 0:
            return False
        left = [node for node in nodes if node not in self._begun]
        return any(torch._C._will_engine_execute_node(node) for node in left)
