"""The `fluxtrain` command, also as `python -m fluxtrain`."""

from __future__ import annotations

from fluxtrain.commands.interrupts import ImmediateInterrupts
from fluxtrain.files.parent import end_with_parent


def main() -> None:
    """Read the command, then run it; it ends the process."""
    end_with_parent()
    with ImmediateInterrupts():
        from fluxtrain.cli import main as command
    command()


if __name__ == "__main__":
    main()
