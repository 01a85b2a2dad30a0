"""Data files on the Hugging Face hub: `hf://datasets/owner/name` or `.../name/folder/file.jsonl`.

The file is downloaded once into the library's own cache and is an ordinary file after that.
"""

from __future__ import annotations

import re
from pathlib import Path

from fluxtrain.errors import BadInput

PREFIX = "hf://datasets/"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt")

_NAMED = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(?P<file>.+))?")


def network_errors() -> tuple[type[Exception], ...]:
    """Return the errors that the hub's client raises if the network fails or a proxy is invalid."""
    import httpx  # the HTTP client's own errors are no OSError

    return OSError, ValueError, httpx.HTTPError, httpx.InvalidURL


def local_file(path: str) -> Path:
    """Return the file that `data.path` means; download one on the hub unless it is in the cache.

    Raises:
        BadInput: no such data set, no readable file in it, or several and none is named.
    """
    if not path.startswith("hf:"):
        return Path(path).expanduser()
    named = _NAMED.fullmatch(path.removeprefix(PREFIX))
    if named is None:
        raise BadInput(f"{path} is not {PREFIX}owner/name or {PREFIX}owner/name/file.jsonl")
    repository, file = named["repository"], named["file"]
    return _downloaded(repository, file or chosen_file(repository, _files(repository)))


def chosen_file(repository: str, files: list[str]) -> str:
    """Choose the file to train on: the only readable one, or the only one named `train`.

    Raises:
        BadInput: there is none, or several and none is named.
    """
    readable = sorted(file for file in files if file.lower().endswith(SUFFIXES))
    readable = [file for file in readable if Path(file).name != "dataset_infos.json"]
    training = [file for file in readable if "train" in Path(file).name.lower()]
    for candidates in (readable, training):
        if len(candidates) == 1:
            return candidates[0]
    if not readable:
        kinds = sorted({Path(file).suffix for file in files if Path(file).suffix}) or ["nothing"]
        raise BadInput(
            f"{PREFIX}{repository} holds no {', '.join(SUFFIXES)} file ({', '.join(kinds)}): "
            "export its text as .jsonl and name that file"
        )
    shown = ", ".join(readable[:6]) + (", ..." if len(readable) > 6 else "")
    raise BadInput(
        f"{PREFIX}{repository} holds {len(readable)} files ({shown}): name one, as in "
        f"{PREFIX}{repository}/{readable[0]}"
    )


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
        raise _unreachable(repository) from error


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
