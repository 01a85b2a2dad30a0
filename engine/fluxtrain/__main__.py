"""`python -m fluxtrain`: the same as the `fluxtrain` command."""

from __future__ import annotations

from fluxtrain.cli import main

if __name__ == "__main__":
    main()
