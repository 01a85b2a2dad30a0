"""`MemoryWatch`: lets block inputs leave a GPU whose memory gets short, before it runs out.

Another program may take memory at any time, and rows may be longer than any that were planned for.
Inputs that were to stay on the device until the backward pass are evicted then, the oldest first;
they come back ahead of their backward, and the bits stay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fluxtrain.core.device.device import Device
from fluxtrain.core.memory.activation_offload import ActivationOffload
from fluxtrain.core.runtime.counters import CardCounts, held_by_torch
from fluxtrain.units import bytes_text

FULL_SHARE = 0.9  # of what torch may use: healthy plans reach it, so that
BEYOND_PLAN = 1.05  # times the predicted peak must be reached, too
GROWN = 1.05  # times what tensors may use: another program has given memory back


class MemoryWatch:
    """Looks at one card's memory: after each block by torch's counter, once a step by the driver's.

    Used by the thread that computes. Without a GPU only `ran_out` has an effect.
    """

    def __init__(
        self,
        device: Device,
        counts: CardCounts,
        inputs: ActivationOffload,
        say: Callable[[str], None],
    ) -> None:
        self._device, self._counts, self._inputs, self._say = device, counts, inputs, say
        self._planned_bytes: int | None = None  # predicted peak of what tensors use
        self._budget_bytes: int | None = None
        self._step_inputs_bytes = 0
        self.most_bytes: int | None = None  # that they may use, at the last look
        self._most_inputs_bytes = 0  # that were on the device or away, after a block of this step
        self._beyond_bytes = 0  # the peak was seen to be higher than predicted by this

    @property
    def lack_bytes(self) -> int:
        """Return the bytes by which the peak is expected to exceed what tensors may use; 0 or
        below: it fits."""
        if self._planned_bytes is None or self.most_bytes is None:
            return 0
        return self._planned_bytes + self._beyond_bytes - self.most_bytes

    @property
    def settings_must_free_bytes(self) -> int:
        """Return `lack_bytes`, or 0 where inputs like those of the newest step can leave for it."""
        return 0 if 0 < self.lack_bytes <= self._most_inputs_bytes else self.lack_bytes

    @property
    def can_evict(self) -> bool:
        """Return whether inputs of earlier blocks are on the device."""
        return self._counts.evictable_bytes > 0

    def look(self, planned_bytes: int | None, budget_bytes: int | None) -> None:
        """Ask the driver how much is left. planned_bytes: the predicted peak; budget_bytes: the
        most that torch may take (None: no limit was set)."""
        self._budget_bytes = budget_bytes
        self._most_inputs_bytes, self._step_inputs_bytes = self._step_inputs_bytes, 0
        if planned_bytes != self._planned_bytes:
            self._planned_bytes, self._beyond_bytes = planned_bytes, 0
        left = self._left_bytes()
        if left is None:
            return
        before = self.most_bytes
        self.most_bytes = left if budget_bytes is None else min(left, budget_bytes)
        if before is not None and self.most_bytes > GROWN * before:
            self._beyond_bytes = 0  # it may have been another program's

    def after_block(self) -> None:
        """Evict inputs, after a block's forward, where memory gets short."""
        if self.most_bytes is None or self._planned_bytes is None:
            return
        used = self._used_bytes()
        if used is None:
            return
        evicted_bytes = self._counts.evicted_bytes
        inputs_bytes = self._counts.evictable_bytes + evicted_bytes
        self._step_inputs_bytes = max(self._step_inputs_bytes, inputs_bytes)
        wanted = self.lack_bytes - evicted_bytes
        healthy = max(FULL_SHARE * self.most_bytes, BEYOND_PLAN * self._planned_bytes)
        if (size_bytes := max(wanted, int(used - healthy))) > 0 and self.can_evict:
            self._evict(size_bytes)

    def ran_out(self) -> bool:
        """Evict a quarter of the inputs on the device, whose memory ran out; return whether there
        were any. The computation can be repeated then."""
        size_bytes = self._counts.evictable_bytes // 4 + 1
        if not self.can_evict:
            return False
        if self._planned_bytes is not None:
            self.look(self._planned_bytes, self._budget_bytes)
        freed = self._evict(size_bytes)
        self._beyond_bytes += max(0, min(freed, self._counts.evicted_bytes - self.lack_bytes))
        return True

    def _evict(self, size_bytes: int) -> int:
        if self._device.torch_device.type == "cuda":
            torch.cuda.synchronize(self._device.torch_device)  # other lanes may have made them
        freed = self._inputs.evict(size_bytes)
        self._say(
            f"GPU memory is short: inputs of blocks ({bytes_text(freed)} at first) wait on the "
            "host until the backward pass; the results stay the same"
        )
        return freed

    def _used_bytes(self) -> int | None:
        """Return the bytes that tensors use."""
        if self._device.torch_device.type != "cuda":
            return None
        return held_by_torch(self._device.torch_device)[0]["current"]

    def _left_bytes(self) -> int | None:
        """Return the bytes that torch holds or could still get."""
        here = self._device.torch_device
        if here.type != "cuda":
            return None
        return torch.cuda.mem_get_info(here)[0] + held_by_torch(here)[1]["current"]
