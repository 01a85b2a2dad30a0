"""The user's home folder, and paths that begin with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`$HOME`, else the home of this process's user; `/` for a user that has none.

    A container may run as a number that is no user's.
    """
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path("/" if home == "~" else home)


def expanded(path: str) -> str:
    """`path` as typed, without blanks around it and with the home folder for `~`.

    A `~name` that is no user's stays as it is: while somebody types, most names are not.
    """
    return str(Path(os.path.expanduser(path.strip()))) if path.strip() else ""
