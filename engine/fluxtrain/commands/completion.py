"""Complete names of runs and keys of settings in a shell, which waits for each answer.

It imports nothing that takes its time: no configuration library and no reader of journals.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from os.path import getmtime
from pathlib import Path

KEYS = Path(__file__).with_name("setting_keys.txt")  # from the schema: docs/write_configuration.py


def completes(arguments: Sequence[str]) -> bool:
    """Return whether a shell asks for completions, or a user for the script that makes it ask:
    typer answers both by ending the process."""
    return "_FLUXTRAIN_COMPLETE" in os.environ or arguments[:1] in (
        ["--install-completion"],
        ["--show-completion"],
    )


def run_names(incomplete: str) -> list[str]:
    """Return `last` and the runs of the folder of runs ($FLUXTRAIN_RUNS, or ./runs), newest
    first."""
    found = []
    with contextlib.suppress(OSError):  # no folder, or one that this user may not read
        root = os.environ.get("FLUXTRAIN_RUNS") or "runs"
        runs = [path for path in Path(root).iterdir() if (path / "run.json").is_file()]
        found = [path.name for path in sorted(runs, key=getmtime, reverse=True)]
    names = ["last", *found] if found else []
    return [name for name in names if name.startswith(incomplete)]


def setting_keys(incomplete: str) -> list[str]:
    """Return the settings that begin so, each with the `=` of its value."""
    keys = KEYS.read_text(encoding="utf-8").split()
    return [f"{key}=" for key in keys if key.startswith(incomplete)]
