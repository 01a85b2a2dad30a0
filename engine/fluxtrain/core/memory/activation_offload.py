"""Activation offload: block inputs that wait on the host between forward and backward.

An input is downloaded as soon as its block has run, and uploaded again while the block after it (in
forward order) is in its backward pass. The last inputs, which the backward pass needs first, are
still on the device then. Where memory gets short, inputs that were to stay on the device are
evicted: the oldest first, which the backward pass needs last.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fluxtrain.core.device.arena import HostArena
from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.memory.group import Group

_GROWTH = 5 / 4  # of a buffer that was too small: where sizes differ, few are made anew
_WASTE = 8  # a buffer this many times as large is not taken if a smaller one can be replaced


class PinnedBuffer(HostArena):
    """Page-locked memory for one tensor, in its exact size: torch's allocator rounds up to powers
    of two (896 MiB take a gigabyte)."""

    def __init__(self, size_bytes: int) -> None:
        self.unawaited: Transfer | None = None  # a copy that the computation did not wait for
        super().__init__(size_bytes, pin=True)

    def tensor_like(self, tensor: Tensor) -> Tensor:
        """Return this memory as a tensor of the dtype and shape of `tensor`."""
        return self.tensor(tensor.dtype, tensor.numel(), 0).view(tensor.shape)


class PinnedPool:
    """The free buffers, by size."""

    def __init__(self) -> None:
        self._free: dict[int, deque[PinnedBuffer]] = {}
        # a thread that drops the last reference to an activation gives its buffer back
        self._guard = threading.RLock()

    def take(self, size_bytes: int) -> PinnedBuffer:
        """Return a buffer of `size_bytes` or, where sizes differ, more.

        Its earlier copies end before later ones: the computation has waited for them, or this
        thread does.
        """
        buffer = self._taken(size_bytes)
        if buffer.unawaited is not None:
            with contextlib.suppress(Exception):
                buffer.unawaited.wait_host()
            buffer.unawaited = None
        return buffer

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Make a buffer free again."""
        with self._guard:
            self._free.setdefault(buffer.size_bytes, deque()).append(buffer)

    def clear(self) -> None:
        """Free the memory of all free buffers."""
        with self._guard:
            gone, self._free = self._free, {}
        gone.clear()

    def _taken(self, size_bytes: int) -> PinnedBuffer:
        with self._guard:
            if size_bytes in self._free:
                return self._pop(size_bytes)
            sizes = list(self._free)  # the collector may give one back meanwhile, on this thread
            smaller = [size for size in sizes if size < size_bytes]
            larger = [size for size in sizes if size > size_bytes]
            if larger and (min(larger) <= _WASTE * size_bytes or not smaller):
                return self._pop(min(larger))
            too_small = self._pop(max(smaller)) if smaller else None
        if too_small is None:
            return PinnedBuffer(size_bytes)
        larger_bytes = max(size_bytes, int(_GROWTH * too_small.size_bytes))
        del too_small  # unguarded: the thread whose copies it waits for may give a buffer back
        return PinnedBuffer(larger_bytes)

    def _pop(self, size: int) -> PinnedBuffer:
        buffers = self._free[size]
        buffer = buffers.popleft()
        if not buffers:
            del self._free[size]
        return buffer


MOST_DOWNLOADS = 2  # under way at a time: the host must not run further ahead of the copies


@dataclass(eq=False)
class OffloadedActivation:
    """The copy of one tensor on the host."""

    host: Tensor
    download: Transfer
    source: Tensor | None  # kept until the copy has been made, or its memory would be reused
    version: int  # of `source` when it was downloaded
    turn: int  # of its call, in the order of the forward pass
    for_copies: Callable[[Tensor], object]  # of the device
    buffer: PinnedBuffer | None  # that `host` is in, where it is page-locked
    give_back: Callable[[PinnedBuffer], None]
    on_device: Tensor | None = None  # uploaded again; arrived once `upload` is
    upload: Transfer | None = None

    @property
    def unchanged_source(self) -> Tensor | None:
        """Return the tensor itself, while its memory is kept and no code has written to it."""
        source = self.source
        return source if source is not None and source._version == self.version else None

    def __del__(self) -> None:
        if self.on_device is not None:  # never fetched: the backward pass raised
            self.for_copies(self.on_device)
        if self.buffer is not None:
            self.buffer.unawaited = self.upload if self.on_device is not None else None
            self.give_back(self.buffer)


class KeptInputs(Protocol):
    """The inputs of one call of a block that are to stay on the device until its backward."""

    @property
    def evictable_bytes(self) -> int:
        """Return the bytes that `evict` would free."""

    def evict(self, offload: ActivationOffload) -> None:
        """Offload them now."""


class ActivationOffload:
    """Offloads the block inputs of one engine to the host, and uploads them for backward."""

    def __init__(
        self, device: Device, evicted: Callable[[Group, Transfer, int], None] = lambda *_: None
    ) -> None:
        """Serve `device`; `evicted` books bytes that leave a group's inputs."""
        self._device = device
        self.evicted = evicted
        self._downloading: deque[OffloadedActivation] = deque()
        self._pool = PinnedPool()
        self._turns = 0
        self._away: weakref.WeakSet[OffloadedActivation] = weakref.WeakSet()  # not fetched yet
        self._kept: deque[weakref.ref[KeptInputs]] = deque()  # the oldest first
        self.offloaded_count = 0  # tensors, so far

    def next_turn(self) -> int:
        """Return the turn of a call, which all of its inputs have."""
        self._turns += 1
        return self._turns

    def offload(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], turn: int | None = None
    ) -> dict[int, OffloadedActivation]:
        """Start to download the tensors that need gradients; return their copies by position.

        Waits for the oldest copy when too many are under way, or their memory would never be free
        for the blocks that are queued next. turn: of their call (None: it comes next).
        """
        offloaded: dict[int, OffloadedActivation] = {}
        turn = self.next_turn() if turn is None else turn
        for i, (tensor, needed) in enumerate(zip(tensors, needs, strict=True)):
            if needed and tensor.is_contiguous():
                buffer, host = self._host_memory(tensor)
                source = tensor.detach()
                download = self._device.download(host, source)
                self._device.recorder.copied("d2h", "activations", "", download)
                offloaded[i] = OffloadedActivation(
                    host, download, source, source._version, turn, self._device.for_copies,
                    buffer, self._pool.give_back,
                )  # fmt: skip
                self._away.add(offloaded[i])
                self.offloaded_count += 1
                self._downloading.append(offloaded[i])
        while self._downloading and (
            len(self._downloading) > MOST_DOWNLOADS or self._downloading[0].download.done()
        ):
            self._downloading[0].download.wait_host()
            self._downloading.popleft().source = None
        return offloaded

    def fetch(self, activation: OffloadedActivation) -> Tensor:
        """Return the tensor on the device, where the computation waits for it; start to upload the
        others of its call, and those of the call that comes next in the backward pass."""
        self._start_upload(activation)
        if activation.on_device is not None and activation.upload is not None:
            found, transfer = activation.on_device, activation.upload  # it followed the download
        else:
            assert activation.source is not None
            # the computation reuses this memory next, so it waits for the download
            found, transfer = activation.source, activation.download
        transfer.wait_compute("activations")
        self._device.used_here(found)  # another lane may have begun its upload
        activation.on_device = activation.source = None
        if activation in self._downloading:
            self._downloading.remove(activation)
        self._away.discard(activation)  # else it would come a second time, which nobody takes
        left = [one for one in self._away if one.turn <= activation.turn]
        before = max((one.turn for one in left if one.turn < activation.turn), default=-1)
        for turn in (activation.turn, before):
            for one in left:
                if one.turn == turn:
                    self._start_upload(one)
        return found

    def keep(self, inputs: KeptInputs) -> None:
        """Note inputs that stay on the device, so that they can be evicted."""
        while self._kept and self._evictable(self._kept[-1]) is None:
            self._kept.pop()  # of passes that have ended
        self._kept.append(weakref.ref(inputs))

    def evict(self, size_bytes: int) -> int:
        """Evict inputs, the oldest first, until `size_bytes` of the device are free; return how
        many are. Waits for their copies."""
        freed = 0
        while self._kept and freed < size_bytes:
            inputs = self._evictable(self._kept.popleft())
            if inputs is not None:
                freed += inputs.evictable_bytes
                inputs.evict(self)
        while self._downloading:
            self._downloading[0].download.wait_host()
            self._downloading.popleft().source = None
        return freed

    @staticmethod
    def _evictable(kept: weakref.ref[KeptInputs]) -> KeptInputs | None:
        inputs = kept()
        return inputs if inputs is not None and inputs.evictable_bytes else None

    def give_back(self) -> None:
        """Free the host memory without activations."""
        self._pool.clear()

    def _host_memory(self, tensor: Tensor) -> tuple[PinnedBuffer | None, Tensor]:
        """Return host memory of the tensor's shape, and the pinned buffer that it is in."""
        if not self._device.pins or tensor.numel() == 0:
            return None, torch.empty(tensor.shape, dtype=tensor.dtype)
        buffer = self._pool.take(tensor.nbytes)
        return buffer, buffer.tensor_like(tensor)

    def _start_upload(self, activation: OffloadedActivation) -> None:
        if activation.on_device is not None or activation.unchanged_source is not None:
            return
        device = self._device
        activation.on_device = torch.empty_like(activation.host, device=device.torch_device)
        activation.upload = device.upload(
            activation.on_device, activation.host, None, device.mark(),
            follows=[activation.download],
        )  # fmt: skip
        device.recorder.copied("h2d", "activations", "", activation.upload)
