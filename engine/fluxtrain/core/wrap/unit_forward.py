"""`UnitForward` replaces a wrapped module's forward: the one place that decides how a unit runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.block.block import run_with_gradients, run_without_gradients
from fluxtrain.core.cards.transfer import as_seen_on_first_card, receive, write_back_arguments
from fluxtrain.core.embedding.lookup import look_up
from fluxtrain.core.guards.arguments import to_device, write_back
from fluxtrain.core.head.lazy_logits import LazyLogits
from fluxtrain.core.head.vocab_chunks import vocab_chunked_logits
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import begin_forward
from fluxtrain.errors import Diverged, MisusedModel


class UnitForward:
    """Runs one unit: it looks rows up, leaves logits uncomputed, or streams through the device."""

    def __init__(self, context: Context, unit: Unit) -> None:
        self._context = weakref.ref(context)
        self.unit = unit

    @property
    def context(self) -> Context:
        context = self._context()
        assert context is not None, "the wrapped model is gone"
        return context

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, computes_logits: bool = False
    ) -> Any:
        """Return what the module's own forward would; `computes_logits`: never lazy ones."""
        context = self.context
        try:
            return self._run(context, args, kwargs, computes_logits=computes_logits)
        except Diverged:
            context.updates.forget_refused()
            raise

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute a head's output (..., V) for hidden (..., H)."""
        logits: Tensor = self.run((hidden,), {}, computes_logits=True)
        return logits

    def _run(
        self,
        context: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        computes_logits: bool,
    ) -> Any:
        unit = self.unit
        _refuse_nesting(unit)
        begin_forward(context, unit)
        if len(context.cards) == 1:
            return self._run_here(context, args, kwargs, computes_logits=computes_logits)
        (args, kwargs), moved = receive(context, unit, args, kwargs)
        try:
            out = self._run_here(context, args, kwargs, computes_logits=computes_logits)
        finally:
            write_back_arguments(context, moved)  # also what a block wrote before it failed
        if unit is context.last_block:
            context.updates.begin_moments()
        return as_seen_on_first_card(context, unit, out)

    def _run_here(
        self,
        context: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        computes_logits: bool,
    ) -> Any:
        unit, card = self.unit, context.card_of(self.unit)
        if unit.group.rows is not None and not unit.group.is_on("device"):
            found = look_up(context, unit, args, kwargs)
            if found is not None:
                return found
        (args, kwargs), moved = to_device((args, kwargs), card.torch_device)
        linear = unit.linear
        if linear is not None and not computes_logits and _may_wait(context, args, kwargs):
            dtype = torch.promote_types(args[0].dtype, linear.weight.dtype)
            return LazyLogits.of(self, args[0], dtype, unit.group_of_weight().version)
        if unit.in_vocab_chunks:
            logits = vocab_chunked_logits(context, unit, args, kwargs)
            if logits is not None:
                return logits
        if torch.is_grad_enabled():
            out = run_with_gradients(context, unit, args, kwargs)
        else:
            out = run_without_gradients(context, unit, args, kwargs)
        write_back(moved)
        return out


def _may_wait(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a head with these arguments may leave its logits uncomputed until they are
    read."""
    if kwargs or len(args) != 1:
        return False
    wanted = torch.is_grad_enabled() or context.lazy_without_gradients
    return wanted and not torch.is_autocast_enabled(context.device.torch_device.type)


def _refuse_nesting(unit: Unit) -> None:
    if unit.members and type(unit.members[0][1].parameter) is nn.Parameter:  # as while bound
        raise MisusedModel(
            f"{unit.name} was called inside of its own forward pass, as torch.utils.checkpoint "
            "does around a block that computes gradients in its forward: leave the checkpoint "
            "out, wrapped blocks are computed again without it"
        )
