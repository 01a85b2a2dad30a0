"""Finds the user's home folder, and expands paths that begin with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `$HOME`, else the home of this process's user; `/` for a user without one.

    A container may run with the number of no user.
    """
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path("/" if home == "~" else home)


def expanded(path: str) -> str:
    """Expand a typed `path`: strip blanks around it and replace `~` by the home folder.

    A `~name` of no user stays as it is: while the user types, most names are incomplete.
    """
    return str(Path(os.path.expanduser(path.strip()))) if path.strip() else ""
