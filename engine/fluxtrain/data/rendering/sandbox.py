"""Bounds single operations of chat templates, which hold the interpreter until they are done: no
other thread could end them.

Jinja's sandbox keeps templates from files and attributes, and its `range` from more than 100,000
numbers. Products and powers, and texts that are repeated or filled, can still be of any size.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import Any

LARGEST_BITS = 1 << 20  # of a number
GROWTH_BYTES = 1 << 30  # of what a template takes
OUTPUT_LIMIT = 1 << 26  # characters of a conversation
_REFRESH_S = 1.0


class TooLarge(ArithmeticError):
    """A template wants a number that takes minutes to compute."""


def bound_operations() -> None:
    """Let the sandbox in which transformers runs templates refuse endless arithmetic; once is
    enough, and what is within bounds gives the same text."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

    sandbox: Any = Sandbox
    if sandbox.call_binop is not _bounded:
        sandbox.intercepted_binops = frozenset(("**", "*"))
        sandbox.call_binop = _bounded


def _bounded(environment: Any, context: Any, operator: str, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if operator == "*":
            bits += right.bit_length()
        if bits > LARGEST_BITS:
            raise TooLarge(f"a number of more than {LARGEST_BITS:,} bits")
    return environment.binop_table[operator](left, right)


class _Data:
    """How much private memory this process may hold, counted anew once a second."""

    def __init__(self) -> None:
        self.limit_bytes, self._known_s = 0, float("-inf")

    def allowed(self) -> int:
        if time.monotonic() - self._known_s > _REFRESH_S:
            with open("/proc/self/statm", "rb") as file:
                pages = int(file.read().split()[5])
            self.limit_bytes = pages * resource.getpagesize() + GROWTH_BYTES
            self._known_s = time.monotonic()
        return self.limit_bytes


_data = _Data()


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the system refuse this process more than `GROWTH_BYTES`, which Python turns into a
    MemoryError."""
    try:
        soft, hard = before = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [_data.allowed(), *(one for one in before if one != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    except (OSError, ValueError, IndexError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
