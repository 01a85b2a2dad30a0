"""Data sets on the Hugging Face hub: one readable file is fetched, everything else is streamed.

`hf://datasets/owner/name`, `hf://datasets/owner/name/file.jsonl.gz`, and for data sets with
configurations and splits `hf://datasets/owner/name?configuration=en&split=train`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl

from fluxtrain.data.containers.columnar import without_nulls
from fluxtrain.data.containers.record import Record
from fluxtrain.data.containers.streams import INSTALL
from fluxtrain.data.hub import PREFIX, single_file, split_address
from fluxtrain.data.reading.files import Entry
from fluxtrain.data.reading.parts import Part, file_part, with_shape
from fluxtrain.data.row import Origin
from fluxtrain.errors import BadInput

DEFAULT_SPLIT = "train"

_ASKED = ("configuration", "split")


def hub_parts(entry: Entry) -> list[Part]:
    """Return the part that an address on the hub means; a single file is fetched first.

    Raises BadInput where there is no such data set, configuration or split, and where a package
    that is needed is not installed.
    """
    address, configuration, split = _asked(entry)
    repository, file = split_address(address)
    if configuration is None and split is None:
        path = single_file(repository, file)
        if path is not None:
            return [file_part(path, entry.rules, entry.weight)]
    return [_streamed(repository, configuration, split or DEFAULT_SPLIT, entry)]


def _asked(entry: Entry) -> tuple[str, str | None, str | None]:
    """Return the address without its question, the configuration and the split."""
    address, _, question = entry.path.partition("?")
    asked = dict(parse_qsl(question, keep_blank_values=True))
    unknown = [key for key in asked if key not in _ASKED]
    if unknown:
        raise BadInput(
            f"{entry.path} asks for {unknown[0]!r}, and only {' and '.join(_ASKED)} can be asked "
            f"for, as in {PREFIX}owner/name?configuration=en&split=train"
        )
    return (
        address,
        entry.configuration or asked.get("configuration"),
        entry.split or asked.get("split"),
    )


class _HubItems:
    """The rows of one split, fetched as they are read."""

    def __init__(self, stream: Any, name: str, rows: int | None) -> None:
        self._stream, self._name, self._rows = stream, name, rows
        self._read = 0

    def __enter__(self) -> _HubItems:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream = None

    @property
    def share(self) -> float:
        """Return the share of rows that were read; where their number is not known, of none."""
        return min(1.0, self._read / self._rows) if self._rows else 0.0

    def __iter__(self) -> Iterator[Record]:
        rows = iter(self._stream)
        while True:
            try:
                values = next(rows, None)
            except Exception as error:  # the library passes on what any of its readers raise
                raise BadInput(
                    f"{self._name} cannot be read behind row {self._read}: {_first_line(error)}"
                ) from error
            if values is None:
                return
            self._read += 1
            yield Record(Origin(self._name, self._read, "row"), without_nulls(values))


def _streamed(repository: str, configuration: str | None, split: str, entry: Entry) -> Part:
    library = _datasets(repository)
    wanted = "&".join(
        f"{key}={value}"
        for key, value in (("configuration", configuration), ("split", split))
        if value
    )
    name = f"{PREFIX}{repository}?{wanted}"
    stream = _loaded(library, repository, configuration, split, name)
    facts = (getattr(stream.info, "splits", None) or {}).get(split)
    rows = getattr(facts, "num_examples", None)
    size_bytes = getattr(facts, "num_bytes", None) or stream.info.dataset_size or 0
    part = Part(
        name=name,
        container="hub",
        shape="text",
        because="it is streamed from the hub",
        open=lambda: _HubItems(stream, name, rows),
        size_bytes=size_bytes,
        weight=entry.weight,
        rules=entry.rules,
        has_end=rows is not None,
    )
    return with_shape(part)


def _datasets(repository: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise BadInput(
            f"{PREFIX}{repository} is streamed with the package datasets: {INSTALL}"
        ) from error
    return datasets


def _loaded(library: Any, repository: str, configuration: str | None, split: str, name: str) -> Any:
    try:
        return library.load_dataset(repository, configuration, split=split, streaming=True)
    except ValueError as error:  # names the configurations or the splits that there are
        raise BadInput(
            f"{name} cannot be read: {_first_lines(error)}; name one, as in "
            f"{PREFIX}{repository}?configuration=...&split=..."
        ) from error
    except Exception as error:  # network, permission, a builder script that is not run
        raise BadInput(f"{name} cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _first_lines(error: Exception) -> str:
    return " ".join(islice((line.strip() for line in str(error).splitlines()), 3))
