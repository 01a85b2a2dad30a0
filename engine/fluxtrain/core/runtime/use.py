"""Check that only the process that made an engine uses it, one thread at a time, until `unwrap`.

Other uses would hang (a forked child has none of the threads) or compute with weights that another
thread is moving away.
"""

from __future__ import annotations

import os
import threading

from fluxtrain.errors import MisusedModel


class _Process:
    """The process id, cached: it is needed four times a block, and system calls are slow in a
    sandbox."""

    def __init__(self) -> None:
        self.learn()
        os.register_at_fork(after_in_child=self.learn)

    def learn(self) -> None:
        self.number = os.getpid()


_this = _Process()


class Use:
    """Raises for uses that cannot work, before they do harm."""

    def __init__(self) -> None:
        self.ended = False
        self._process = _this.number
        self._thread = 0  # the thread that computes with weights on the device now
        self._depth = 0

    @property
    def computing(self) -> bool:
        """True while a block's forward or backward is under way."""
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
        """Note that this thread begins to compute. Raises as `check`."""
        self.check()
        self._thread = threading.get_ident()
        self._depth += 1

    def end(self) -> None:
        """Note that this thread's computation has ended."""
        self._depth -= 1
