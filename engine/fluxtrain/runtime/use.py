"""Who may use an engine: the process that made it, one thread at a time, until `unwrap`.

Anything else would hang (a forked child has none of the threads) or compute with weights that
another thread is taking away.
"""

from __future__ import annotations

import os
import threading

from fluxtrain.errors import MisusedModel


class _Process:
    """Its number, kept: asking the system for it four times a block is slow where system calls are,
    as in a sandbox."""

    def __init__(self) -> None:
        self.learn()
        os.register_at_fork(after_in_child=self.learn)

    def learn(self) -> None:
        self.number = os.getpid()


_this = _Process()


class Use:
    """Notices what cannot work before it does harm."""

    def __init__(self) -> None:
        self.ended = False
        self._process = _this.number
        self._thread = 0  # that computes with weights on the device now
        self._depth = 0

    @property
    def computing(self) -> bool:
        """Is a block's forward or backward under way?"""
        return self._depth > 0

    def check(self) -> None:
        """Raise MisusedModel for a use that cannot work."""
        if self.ended:
            raise MisusedModel(
                "the model was unwrapped between forward and backward: call fluxtrain.unwrap after "
                "backward(), or compute the loss again"
            )
        if self._process != _this.number:
            raise MisusedModel(
                f"the model was wrapped in process {self._process} and is used in a fork of it, "
                "which has none of its threads: start processes with 'spawn', or wrap in each"
            )
        if self._depth and self._thread != threading.get_ident():
            raise MisusedModel(
                "two threads run the wrapped model at once, and its blocks are on the device for "
                "one of them only: use a lock around forward and backward"
            )

    def begin(self) -> None:
        """This thread computes from now on. Raises as `check`."""
        self.check()
        self._thread = threading.get_ident()
        self._depth += 1

    def end(self) -> None:
        """It is done."""
        self._depth -= 1
