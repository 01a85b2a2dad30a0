"""Task 5: a registry of models."""

from pathlib import Path


class Registry:
    """Versions of models, and aliases that lead to them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, folder: Path) -> str:
        """Keep a copy of a folder's files; return the id of the version."""
        raise NotImplementedError

    def open(self, version: str) -> Path:
        """Return the folder of a version. Raises ValueError where its files were changed."""
        raise NotImplementedError

    def promote(self, alias: str, version: str, loss: float, min_gain: float = 0.0) -> bool:
        """Let an alias lead to a version if its loss is lower by min_gain; return whether."""
        raise NotImplementedError

    def current(self, alias: str) -> str:
        """Return the version that an alias leads to. Raises KeyError."""
        raise NotImplementedError

    def history(self, alias: str) -> list[str]:
        """Return the versions that an alias has led to, oldest first."""
        raise NotImplementedError
