"""Single files of data sets on the Hugging Face hub.

The file is downloaded once into the library's own cache and is an ordinary file after that.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from fluxtrain.data.containers.opening import SUFFIXES, is_about_data, suffix_of
from fluxtrain.errors import BadInput, NoSpace
from fluxtrain.files.temporary import FULL, free_text, moved_by

PREFIX = "hf://datasets/"

_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})

_NAMED = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(?P<file>.+))?")


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
