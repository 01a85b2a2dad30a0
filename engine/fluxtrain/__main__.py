"""The `fluxtrain` command, also as `python -m fluxtrain`."""

from __future__ import annotations

import sys

from fluxtrain.commands.importing import Importing
from fluxtrain.files.parent import end_with_parent


def main() -> None:
    """Read the command, then run it; it ends the process."""
    end_with_parent()
    with Importing():
        from fluxtrain.cli import main as command
    try:
        command()
    except SystemExit as ended:
        code = ended.code or 0
        if "triton._C.libtriton" in sys.modules and isinstance(code, int):
            _end_before_teardown(code)
        raise


def _end_before_teardown(code: int) -> None:
    """End the process with `code` and without Python's teardown, in which triton's bindings print
    all that they still hold as leaks. Threads and exit functions are waited for, as Python does."""
    import atexit
    import os
    import threading

    threading._shutdown()  # type: ignore[attr-defined]  # Python itself calls it by this name
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
