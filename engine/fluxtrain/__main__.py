"""The `fluxtrain` command, also as `python -m fluxtrain`."""

from __future__ import annotations

import sys

from fluxtrain.interrupts import ImmediateInterrupts
from fluxtrain.parent import end_with_parent


def main() -> None:
    """Read the command, then run it; it ends the process."""
    end_with_parent()
    with ImmediateInterrupts():
        from fluxtrain.cli import main as command
        from fluxtrain.errors import DoesNotFit
        from fluxtrain.native_exits import tell_native_exits
        from fluxtrain.output import complain, leave, tell
        from fluxtrain.system_limits import fit_into_limits
    try:
        fit_into_limits(sys.argv[1:], complain)
    except DoesNotFit as error:
        leave(tell(error, debug=False))
    tell_native_exits()
    command()


if __name__ == "__main__":
    main()
