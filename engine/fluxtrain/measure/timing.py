"""Time the passes of a small model's blocks: marks where they begin and end, in repeated steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor, nn

from fluxtrain.measure.small_model import NotCalibrated

Mark = Literal["enters", "leaves", "backward enters", "backward leaves"]


class BlockMarks:
    """Calls `mark` where the forward and the backward pass of each block begin and end."""

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        mark: Callable[[Mark], None],
        *,
        to_the_input: bool = True,
    ) -> None:
        """to_the_input: mark where a backward pass ends, too, which needs a gradient of the first
        block's input even where the model computes none."""
        self._mark = mark
        self._hooks = []
        for block in blocks:
            enters = self._enters_and_returns if to_the_input else self._enters
            self._hooks.append(block.register_forward_pre_hook(enters, with_kwargs=True))
            self._hooks.append(block.register_forward_hook(self._leaves))

    def remove(self) -> None:
        """Remove the hooks from the blocks."""
        for hook in self._hooks:
            hook.remove()

    def _enters(self, *_: object) -> None:
        self._mark("enters")

    def _enters_and_returns(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._mark("enters")
        hidden = _first_tensor((*args, *kwargs.values()), else_first=True)
        hidden.register_hook(lambda _: self._mark("backward leaves"))

    def _leaves(self, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._mark("leaves")
        hidden = _first_tensor(out if isinstance(out, tuple) else (out,))
        hidden.register_hook(lambda _: self._mark("backward enters"))


def repeat_steps(step: Callable[[], object], *, most: int, limit_s: float, least: int = 1) -> None:
    """Run up to `most` steps, and none after `limit_s` once there are `least`."""
    started_s = time.perf_counter()
    for count in range(1, most + 1):
        step()
        if count >= least and time.perf_counter() - started_s > limit_s:
            break


def _first_tensor(values: tuple[Any, ...], *, else_first: bool = False) -> Tensor:
    """Return the hidden states: the first input (or output) that a gradient reaches.

    `else_first`: where a frozen embedding gives no gradient, let it reach the first input of
    floating point, as it does in all blocks but the first.
    """
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return value
    for value in values if else_first else ():
        if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf:
            return value.requires_grad_()
    raise NotCalibrated("no gradient reaches the input of its first block")
