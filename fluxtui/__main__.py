"""The `fluxtrain-tui` command, also as `python -m fluxtui`."""

from __future__ import annotations

import sys

from fluxtrain.commands.importing import Importing


def main() -> int:
    """Read the command, then run it; returns its exit code."""
    with Importing():
        from fluxtui.launch import main as command
    return command()


if __name__ == "__main__":
    sys.exit(main())
