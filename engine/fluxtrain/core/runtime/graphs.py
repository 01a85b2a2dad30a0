"""Find the groups that a backward pass under way still needs.

An optimizer step in backward changes weights while the pass still runs. It must not change weights
that the pass still needs: for a block that was called twice, or an expression outside the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from fluxtrain.core.memory.group import Group


class Graphs:
    """Nodes of torch's graph that compute with groups, and the backward passes under way."""

    def __init__(self) -> None:
        self._nodes: dict[Group, WeakSet[Any]] = {}
        self._begun: WeakSet[Any] = WeakSet()  # nodes whose backward has begun in a pass under way
        self._passes: set[int] = set()  # torch's numbers of backward passes that have not ended
        self._outside: set[Group] = set()
        self._aliases: dict[Group, list[ref[Tensor]]] = {}

    def record(self, node: Any, groups: Iterable[Group]) -> None:
        """Note that a node (`ctx` of an autograd function) has computed with the groups."""
        within_backward = torch._C._current_graph_task_id() >= 0
        for group in groups:
            self._nodes.setdefault(group, WeakSet()).add(node)
            if within_backward:  # reentrant checkpointing: its later recomputations are not seen
                self._outside.add(group)

    def begin_backward(self, node: Any) -> None:
        """Note that the node's backward has begun."""
        self._begun.add(node)

    def enter_pass(self, at_its_end: Callable[[], None]) -> None:
        """Note the backward pass that runs now, and call `at_its_end` once when it ends."""
        number = torch._C._current_graph_task_id()
        if number in self._passes:
            return
        self._passes.add(number)

        def end() -> None:
            self._passes.discard(number)
            if not self._passes:
                self._begun.clear()  # another pass may take the same nodes (`retain_graph`)
            try:
                at_its_end()
            except BaseException:
                self._passes.add(number)  # it broke off
                raise

        torch.autograd.Variable._execution_engine.queue_callback(end)

    @property
    def broke_off(self) -> bool:
        """Return whether the last backward pass raised, so that its end was never called."""
        return bool(self._passes) and torch._C._current_graph_task_id() < 0

    def abandon_pass(self) -> None:
        """Forget a backward pass that raised."""
        self._passes.clear()
        self._begun.clear()

    def record_outside(self, group: Group) -> None:
        """Note that an expression outside the blocks has used a weight of the group."""
        self._outside.add(group)

    def record_alias(self, group: Group, alias: Tensor) -> None:
        """Note a tensor over the memory of a weight that was handed out; a graph may keep it."""
        left = [known for known in self._aliases.get(group, ()) if known() is not None]
        self._aliases[group] = [*left, ref(alias)]

    def end_step(self) -> None:
        """Forget uses outside the blocks: the step has changed those weights, so that their graph
        cannot run backward any more."""
        self._outside.clear()

    def need(self, group: Group) -> bool:
        """Return whether the pass under way may still compute with the group; without a pass, when
        an expression outside the blocks or an alias may."""
        if group in self._outside or any(a() is not None for a in self._aliases.get(group, ())):
            return True
        nodes = self._nodes.get(group)
        if not nodes or torch._C._current_graph_task_id() < 0:
            return False
        left = [node for node in nodes if node not in self._begun]
        return any(torch._C._will_engine_execute_node(node) for node in left)
