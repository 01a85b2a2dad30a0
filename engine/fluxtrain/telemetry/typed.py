"""Our commands as the user can type them here."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def typed_line(line: str) -> str:
    """A command line that begins with `fluxtrain`, as `typed` has that word."""
    command, _, rest = line.partition(" ")
    return f"{typed(command)} {rest}" if command == "fluxtrain" else line


def typed(command: str) -> str:
    """`command`, or where it lies beside this Python if no folder of PATH has it."""
    script = Path(sys.executable).parent / command
    if shutil.which(command) is not None or not os.access(script, os.X_OK):
        return command
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
