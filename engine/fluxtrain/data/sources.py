"""Estimates how much training text a source has. Standard library only."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from fluxtrain.data.formats import Format, documents

DEMO = "demo"
FIRST_DOCUMENTS = 64
FIRST_CHARACTERS = 1 << 20
CHARACTERS_PER_TOKEN = 4.0  # English prose and BPE vocabularies of 32k to 150k entries


def estimated_tokens(path: Path, format: Format) -> int:
    """Estimate the tokens of a data file by its size; takes milliseconds for any size.

    Raises BadInput if the file or one of its first documents cannot be used.
    """
    characters = 0
    for document in islice(documents(path, format), FIRST_DOCUMENTS):
        characters += document.characters
        if characters >= FIRST_CHARACTERS:
            break
    return max(1, round(path.stat().st_size / CHARACTERS_PER_TOKEN))
