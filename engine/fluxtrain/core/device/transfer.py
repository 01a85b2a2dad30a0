"""`Transfer`, a copy under way between host and device: every wait for a copy goes through it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fluxtrain.core.device.recorder import Instant


class Transfer(Protocol):
    """A copy under way."""

    @property
    def duration_s(self) -> float | None:
        """Seconds that the copy took; None while they are not known."""

    def instants(self) -> tuple[Instant, Instant] | None:
        """When it began and ended, for the recorder; None until it was issued (on CPU: made)."""

    def done(self) -> bool:
        """True when the bytes have arrived."""

    def failed(self) -> bool:
        """True when the copy was never made, because the update it waited for failed."""

    def wait_host(self) -> None:
        """Block this thread until the bytes have arrived; raise what made the copy fail."""

    def wait_compute(self, cause: str) -> None:
        """Make the computation wait for the bytes, and book that wait as a stall of `cause`."""


def all_arrived(transfers: Iterable[Transfer]) -> bool:
    """True when a copy that follows these has none of them to wait for."""
    return all(transfer.done() for transfer in transfers)
