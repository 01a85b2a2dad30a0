"""Spells our commands so that the user can type them on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def typed_line(line: str) -> str:
    """Return a command line that begins with `fluxtrain`, spelled as `typed` spells it."""
    command, _, rest = line.partition(" ")
    return f"{typed(command)} {rest}" if command == "fluxtrain" else line


def typed(command: str) -> str:
    """Return `command`, or its path in this Python's folder if no folder of PATH has it."""
    script = Path(sys.executable).parent / command
    if shutil.which(command) is not None or not os.access(script, os.X_OK):
        return command
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
