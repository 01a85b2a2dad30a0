"""Completing paths as they are typed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from textual.suggester import Suggester

from fluxtui.home import expanded


class PathSuggester(Suggester):
    """Completes a path with the first name in its folder that begins like it."""

    def __init__(self, folders_only: bool) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._folders_only = folders_only

    async def get_suggestion(self, value: str) -> str | None:
        """Complete the path in a thread, as listing a folder may be slow."""
        return await asyncio.to_thread(complete_path, value, self._folders_only)


def complete_path(value: str, folders_only: bool) -> str | None:
    """Complete `value` to an existing path, or None; hidden names only when asked for."""
    found = completions(value, folders_only) if value.strip() else ()
    return found[0] if found else None


def completions(value: str, folders_only: bool) -> tuple[str, ...]:
    """List every path that begins with `value`, in order; a folder ends with a slash."""
    head, begun = os.path.split(value)
    try:
        with os.scandir(Path(expanded(head) or ".")) as entries:
            names = sorted(
                entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if entry.name.startswith(begun) and (entry.is_dir() or not folders_only)
            )
    except OSError:
        return ()
    return tuple(os.path.join(head, name) for name in names if begun or not name.startswith("."))


def stem_of(paths: Sequence[str]) -> str:
    """Return the common beginning of the paths."""
    least, most = min(paths), max(paths)
    agreed = next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), None)
    return least if agreed is None else least[:agreed]
