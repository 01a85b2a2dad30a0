"""`python -m fluxtui`: the same as the `fluxtrain-tui` command."""

from __future__ import annotations

import sys

from fluxtui.launch import main

if __name__ == "__main__":
    sys.exit(main())
