"""Takes the first rows of every data file, and looks further on for bad and repeated rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from fluxtrain.data.reading.corpus import Corpus, Reading, readings_of
from fluxtrain.data.reading.report import Report
from fluxtrain.data.row import Row
from fluxtrain.errors import BadInput

DOCUMENTS = 512
CHARACTERS = 2 << 20
LEAST_DOCUMENTS = 4  # of each file, where there are many
READ_ON_S = 3.0
LONG_BYTES = 8 << 20  # of a file; the rows that are taken are 2 MiB at most
PLACES = 15
FIRST_DOCUMENTS = 64
FIRST_CHARACTERS = 1 << 20
CHARACTERS_PER_TOKEN = 4.0  # English prose and BPE vocabularies of 32k to 150k entries


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The first rows of the data, their share of it, and the findings in more of it."""

    rows: list[Row]
    share: float  # of the documents that an epoch draws; 1 is all
    report: Report
    read_share: float  # of the data's bytes: `report` is about them


def sampled(corpus: Corpus, apart: Corpus | None = None, whole: bool = False) -> Sampled:
    """Take the first rows, and read on for `READ_ON_S` seconds, or with `whole` to the end.

    `apart` is separate evaluation data: it is read, but no row of it is taken.

    Raises BadInput if a file cannot be used, or if more rows are bad than the configuration
    allows.
    """
    rows, share = first_rows(corpus)
    report, read_share = _looked_at(corpus, apart, math.inf if whole else READ_ON_S)
    return Sampled(rows=rows, share=share, report=report, read_share=read_share)


def first_rows(corpus: Corpus) -> tuple[list[Row], float]:
    """Return the first rows of every file, and their share of the documents of an epoch.

    Of long files that can be read from anywhere, rows of `PLACES` further places are taken as well,
    as many files are sorted. Raises BadInput as `sampled`.
    """
    rows: list[Row] = []
    drawn = 0.0  # rows that an epoch draws, estimated
    most = max(LEAST_DOCUMENTS, DOCUMENTS // len(corpus.parts))
    most_characters = CHARACTERS // len(corpus.parts)
    for part in corpus.parts:
        alone = replace(corpus, parts=(replace(part, weight=1.0),))
        if part.open_at is not None and part.size_bytes >= LONG_BYTES:
            first, share = _across(alone, most, most_characters)
        else:
            first, share = _first(Reading(alone), most, most_characters)
        rows += first
        drawn += len(first) * part.weight / (share or 1.0)
    share = 1.0 if math.isclose(drawn, len(rows)) else len(rows) / max(drawn, 1.0)
    return rows, share


def _across(corpus: Corpus, most: int, most_characters: int) -> tuple[list[Row], float]:
    """Return rows from the beginning and from places at equal distances, and their share."""
    [part] = corpus.parts
    rows: list[Row] = []
    read = reached = 0.0
    places = PLACES + 1
    for place in range(places):
        offset = part.size_bytes * place // places
        if part.open_at is None or offset < reached * part.size_bytes:
            continue  # long rows reach beyond the next place
        here = replace(corpus, parts=(replace(part, open=partial(part.open_at, offset)),))
        reading = Reading(here)
        try:
            found, reached = _first(reading, -(-most // places), most_characters // places)
        except BadInput:
            if not place or reading.report.rows or reading.report.bad:
                raise
            break  # no row begins behind this place
        rows += found
        read += reached - offset / part.size_bytes
    return rows, read


def _first(reading: Reading, most: int, most_characters: int) -> tuple[list[Row], float]:
    """Return the first rows, and the share of the file that was read for them."""
    taken: list[Row] = []
    characters, share = 0, 0.0
    for row in reading:
        if len(taken) >= most or characters >= most_characters:
            return taken, share
        taken.append(row)
        characters += row.characters
        share = reading.share
    return taken, 1.0


def _looked_at(corpus: Corpus, apart: Corpus | None, seconds: float) -> tuple[Report, float]:
    deadline = time.monotonic() + seconds
    corpora = [corpus, *([apart] if apart else [])]
    with readings_of(corpora) as readings:
        for reading in readings:
            for _ in _until(deadline, reading):
                pass
            reading.check()
    size_bytes = sum(one.size_bytes for one in corpora)
    read_bytes = sum(r.share * r.corpus.size_bytes for r in readings)
    return readings[0].report, min(1.0, read_bytes / max(1, size_bytes))


def _until(deadline: float, rows: Iterator[Row] | Reading) -> Iterator[Row]:
    for row in rows:
        yield row
        if time.monotonic() > deadline:
            return


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
