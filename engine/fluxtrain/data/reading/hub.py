"""Data sets on the Hugging Face hub: one readable file is fetched, everything else is streamed.

`hf://datasets/owner/name`, `hf://datasets/owner/name/file.jsonl.gz`, and for data sets with
configurations and splits `hf://datasets/owner/name?configuration=en&split=train`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from fluxtrain.data.containers.columnar import without_nulls
from fluxtrain.data.containers.opening import SUFFIXES, is_about_data, suffix_of
from fluxtrain.data.containers.record import Record
from fluxtrain.data.containers.streams import INSTALL
from fluxtrain.data.reading.files import Entry
from fluxtrain.data.reading.parts import Part, file_part, with_shape
from fluxtrain.data.row import Origin
from fluxtrain.errors import BadInput, NoSpace
from fluxtrain.files.temporary import FULL, free_text, moved_by

PREFIX = "hf://datasets/"

_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})

_NAMED = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(?P<file>.+))?")
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

    def __exit__(self, *_: object) -> None:
        self._stream = None

    @property
    def share(self) -> float:
        """Return the share of rows read so far; 0 where their number is unknown."""
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


def network_errors() -> tuple[type[Exception], ...]:
    """Return the errors that the hub's client raises if the network fails or a proxy is invalid."""
    import httpx  # the HTTP client's own errors are no OSError

    return OSError, ValueError, httpx.HTTPError, httpx.InvalidURL


def not_kept(name: str, error: BaseException) -> NoSpace | BadInput | None:
    """Return the error to raise where the disk of the hub's cache refused a download, not the
    network; None where the network did."""
    from huggingface_hub.constants import HF_HUB_CACHE

    refused = error.__context__ if error.__cause__ is None else error.__cause__
    known = [one for one in (error, refused) if isinstance(one, OSError)]
    folder = Path(HF_HUB_CACHE)
    cure = moved_by(folder) or "set HF_HOME to a folder on another disk"
    for one in known:
        if one.errno in FULL:
            return NoSpace(
                f"no space left to download {name} to {folder} ({one.strerror}; "
                f"{free_text(folder)} free): make room, or {cure}"
            )
        if one.errno in _CLOSED and one.filename is not None:
            return BadInput(f"{name} cannot be downloaded to {folder} ({one.strerror}): {cure}")
    return None


def split_address(path: str) -> tuple[str, str | None]:
    """Return the data set and the file that an address names. Raises BadInput for other text."""
    named = _NAMED.fullmatch(path.removeprefix(PREFIX))
    if named is None:
        raise BadInput(
            f"{path} is not {PREFIX}owner/name, {PREFIX}owner/name/file.jsonl or "
            f"{PREFIX}owner/name?configuration=en&split=train"
        )
    return named["repository"], named["file"]


def single_file(repository: str, file: str | None) -> Path | None:
    """Return the named file, or the only one to train on, downloaded unless it is in the cache.

    None where there is no such single file, so that the data set must be read by its splits.
    Raises BadInput if there is no such data set or file, or the hub cannot be reached.
    """
    chosen = file or chosen_file(_files(repository))
    return None if chosen is None else _downloaded(repository, chosen)


def chosen_file(files: list[str]) -> str | None:
    """Choose the file to train on: the only readable one, or the only one named `train`."""
    readable = sorted(file for file in files if suffix_of(Path(file)) in SUFFIXES)
    readable = [file for file in readable if not is_about_data(Path(file))]
    training = [file for file in readable if "train" in Path(file).name.lower()]
    for candidates in (readable, training):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _files(repository: str) -> list[str]:
    """Return the names in the data set; if the hub cannot be reached, the names in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return list(HfApi().list_repo_files(repository, repo_type="dataset"))
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403, 404):
            raise _unknown(repository) from error
        reason: Exception = error
    except network_errors() as error:
        reason = error
    try:
        folder = Path(snapshot_download(repository, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        raise _unreachable(repository) from reason
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _downloaded(repository: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except LocalEntryNotFoundError as error:  # is an EntryNotFoundError as well
        raise _unreachable(repository) from error
    except EntryNotFoundError as error:
        raise BadInput(f"{PREFIX}{repository} has no file {file!r}: check data.path") from error
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise _unknown(repository) from error
    except network_errors() as error:
        raise not_kept(repository, error) or _unreachable(repository) from error


def _unknown(repository: str) -> BadInput:
    return BadInput(
        f"there is no data set {repository!r} on the hub, or it is private or gated: check "
        "data.path, or `hf auth login`"
    )


def _unreachable(repository: str) -> BadInput:
    return BadInput(
        f"{PREFIX}{repository} is not on this machine, and the hub cannot be reached to fetch it: "
        "check the network and its proxy, or name a local file"
    )
