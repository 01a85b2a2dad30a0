"""Estimates how much training text a corpus has. Standard library only."""

from __future__ import annotations

from itertools import islice

from fluxtrain.data.reading.corpus import Corpus, Reading

FIRST_DOCUMENTS = 64
FIRST_CHARACTERS = 1 << 20
CHARACTERS_PER_TOKEN = 4.0  # English prose and BPE vocabularies of 32k to 150k entries


def estimated_tokens(corpus: Corpus) -> int:
    """Estimate the tokens of a corpus by its first rows; takes milliseconds for any size.

    Raises BadInput if a file or one of its first rows cannot be used.
    """
    characters = 0
    reading = Reading(corpus)
    for row in islice(reading, FIRST_DOCUMENTS):
        characters += row.characters
        if characters >= FIRST_CHARACTERS:
            break
    reading.check()
    share = reading.share or 1.0  # of a stream whose length is not known: what was read
    return max(1, round(characters / share / CHARACTERS_PER_TOKEN))
