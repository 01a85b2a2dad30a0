"""Data files on the hub: which file is meant, and what is said when it cannot be had."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from fluxtrain.data.reading.hub import PREFIX, chosen_file, single_file, split_address
from fluxtrain.errors import BadInput, NoSpace

TALES = f"{PREFIX}owner/tales"


def local_file(address: str) -> Path | None:
    return single_file(*split_address(address))


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["README.md", "tales.jsonl"], "tales.jsonl"),
        (["data/train.jsonl.gz", "data/test.jsonl", ".gitattributes"], "data/train.jsonl.gz"),
        (["a.txt", "dataset_infos.json"], "a.txt"),
        (["train-0.parquet", "README.md"], "train-0.parquet"),
        ([], None),
        (["a.jsonl", "b.jsonl"], None),
        (["train-1.jsonl", "train-2.jsonl"], None),
    ],
)
def test_the_only_file_or_the_one_for_training_is_chosen_and_none_is_guessed(
    files: list[str], chosen: str | None
) -> None:
    assert chosen_file(files) == chosen


@pytest.mark.parametrize(
    "path",
    ["hf://", "hf://owner/name", PREFIX, f"{PREFIX}owner", f"{PREFIX}-x/y", f"{PREFIX}a b/c"],
)
def test_what_names_no_data_set_is_refused(path: str) -> None:
    with pytest.raises(BadInput, match="is not hf://datasets/owner/name"):
        local_file(path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub in memory: what it lists, and what it was asked for."""
    state: dict[str, Any] = {"files": ["train.jsonl", "test.jsonl"], "asked": []}

    def listed(_: object, repository: str, **options: object) -> list[str]:
        if isinstance(state["files"], Exception):
            raise state["files"]
        return list(state["files"])

    def download(repository: str, file: str, **options: object) -> str:
        state["asked"].append((repository, file, options))
        if "error" in state:
            raise state["error"]
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", listed)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _nothing_cached)
    return state


def _nothing_cached(*_: object, **__: object) -> str:
    raise LocalEntryNotFoundError("not cached")


def test_a_data_set_is_fetched_as_one_and_its_training_file_taken(
    hub: dict[str, Any], tmp_path: Path
) -> None:
    assert local_file(TALES) == tmp_path / "train.jsonl"
    assert hub["asked"] == [("owner/tales", "train.jsonl", {"repo_type": "dataset"})]
    assert local_file(f"{TALES}/data/mine.txt") == tmp_path / "data/mine.txt"


def test_a_file_that_is_not_there_is_told(hub: dict[str, Any]) -> None:
    hub["error"] = EntryNotFoundError("404")
    with pytest.raises(BadInput, match=r"has no file 'no\.txt'"):
        local_file(f"{TALES}/no.txt")


@pytest.mark.parametrize(
    "error",
    [
        OSError("no network"),
        LocalEntryNotFoundError("offline"),
        httpx.ConnectError("Name or service not known"),
        httpx.InvalidURL("Invalid port: 'bar'"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_told_from_a_wrong_name(
    hub: dict[str, Any], error: Exception
) -> None:
    hub["error"] = error
    with pytest.raises(BadInput, match="the hub cannot be reached"):
        local_file(f"{TALES}/a.txt")
    hub["files"] = error
    with pytest.raises(BadInput, match="the hub cannot be reached"):
        local_file(TALES)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"no space left to download .* free\): ",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/hub"), "cannot be downloaded to .*Read-o"),
        (PermissionError(errno.EACCES, "Permission denied", "/hub"), "downloaded to .*Permission"),
    ],
)
def test_a_disk_that_refuses_a_download_is_told_from_a_network_that_fails(
    hub: dict[str, Any], tmp_path: Path, error: Exception, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    hub["error"] = error
    kind = NoSpace if error.args[0] == errno.ENOSPC else BadInput
    with pytest.raises(kind, match=f"{words}.*set HF_HOME to a folder on another disk") as told:
        local_file(f"{TALES}/a.txt")
    assert str(tmp_path / "none") in str(told.value) and "network" not in str(told.value)


def test_without_the_hub_the_files_in_the_cache_are_used(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    (snapshot / "data").mkdir(parents=True)
    (snapshot / "data" / "only.jsonl").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    hub["files"] = OSError("no network")
    local_file(TALES)
    assert hub["asked"][-1][1] == "data/only.jsonl"
