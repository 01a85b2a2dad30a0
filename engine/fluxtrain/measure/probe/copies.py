"""Copies to, from and between cards with torch, each on the card that it names.

torch has one current card; waiting and new streams are that card's. So every call here names its
card, whatever the current one is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Copies(Protocol):
    """Buffers and copies that rates are measured with; tests pretend cards with another one."""

    def count(self) -> int:
        """Return how many cards there are."""

    def can_reach(self, source: int, target: int) -> bool:
        """Return whether the driver lets a card write into the memory of another."""

    def on_card(self, card: int, size_bytes: int) -> Any:
        """Return a buffer of zeros on a card."""

    def on_host(self, size_bytes: int, *, locked: bool = True) -> Any:
        """Return a buffer of zeros in host memory, page-locked."""

    def copy(self, target: Any, source: Any, card: int) -> None:
        """Queue a copy on a stream of `card` that has nothing else to do in this direction."""

    def wait(self, card: int) -> None:
        """Wait for all that was queued on a card."""


class TorchCopies:
    """The cards of this machine."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, str], Any] = {}

    def count(self) -> int:
        """Return how many cards torch can use."""
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def can_reach(self, source: int, target: int) -> bool:
        """Return whether the driver lets a card write into the memory of another."""
        import torch

        return bool(torch.cuda.can_device_access_peer(source, target))

    def on_card(self, card: int, size_bytes: int) -> torch.Tensor:
        """Return a buffer of zeros on a card."""
        import torch

        zeros = torch.zeros(size_bytes, dtype=torch.uint8, device=f"cuda:{card}")
        torch.cuda.synchronize(card)  # copies run on other streams than what fills it
        return zeros

    def on_host(self, size_bytes: int, *, locked: bool = True) -> torch.Tensor:
        """Return a buffer of zeros in host memory."""
        import torch

        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=locked)

    def copy(self, target: torch.Tensor, source: torch.Tensor, card: int) -> None:
        """Queue a copy on a stream of `card` for its direction. Between two cards torch makes the
        copy on the source's current stream wait for the target's, and the reverse: both are streams
        of copies alone."""
        import torch

        ways = [(one.device.index, "copies") for one in (target, source) if one.is_cuda]
        if len(ways) == 1:
            ways = [(card, "up" if target.is_cuda else "down")]
        outer = torch.cuda.stream(self._stream(*ways[0]))
        with outer, torch.cuda.stream(self._stream(*ways[-1])):
            target.copy_(source, non_blocking=True)

    def wait(self, card: int) -> None:
        """Wait for all that was queued on a card."""
        import torch

        torch.cuda.synchronize(card)

    def _stream(self, card: int, way: str) -> Any:
        import torch

        if (card, way) not in self._streams:
            make: Any = torch.cuda.Stream  # torch has no types for it
            self._streams[card, way] = make(device=card)
        return self._streams[card, way]
