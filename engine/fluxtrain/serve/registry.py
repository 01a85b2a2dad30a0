"""The registry: immutable versions of trained models, their artifacts, and aliases with history."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import read_json, replace_folder, storage_error
from fluxtrain.serve.store import Store

CHECKPOINT = ":ckpt-step-"  # in the name of a checkpoint's model, before its step


def model_name(row: Mapping[str, Any]) -> str:
    """Return the name of the model that a job makes."""
    suffix, number = row["request"].get("suffix") or "", row["id"].removeprefix("ftjob-")
    return f"ft:{row['request']['model']}:{row['project']}:{suffix}:{number}"


def version_of(store: Store, row: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
    """Keep the files of a finished job's model; return its row as a version.

    Raises as `storage_error`.
    """
    ending = read_json(run.result) or {}
    return {
        "id": model_name(row),
        "project": row["project"],
        "job": row["id"],
        "base": row["request"]["model"],
        "method": row["config"].get("method", {}).get("name", "full"),
        "step": None,
        "artifact": keep(run.model, store.models),
        "facts": {
            "data": row["blobs"],
            "configuration": row["config"],
            "run": row["id"],
            "metrics": {name: ending.get(name) for name in ("loss", "evaluation_loss")},
            "measured": ending.get("plan"),
        },
        "created_s": time.time(),
    }


def keep(folder: Path, models: Path) -> str:
    """Keep the files of a model under a digest of their contents; return the digest.

    The files are linked, not copied, where the disk can. Raises as `storage_error`.
    """
    name = digest_of(folder)
    kept = models / name
    if kept.is_dir() and digest_of(kept) == name:
        return name

    def fill(made: Path) -> None:
        for path in _files_of(folder):
            target = made / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, target)
            except OSError:  # another disk, or one without links
                shutil.copyfile(path, target)

    try:
        replace_folder(kept, fill)
    except OSError as error:
        raise storage_error(kept, error) from error
    return name


def digest_of(folder: Path) -> str:
    """Return a digest of the names and contents of a folder's files."""
    listed = {}
    for path in _files_of(folder):
        with path.open("rb") as file:
            listed[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def _files_of(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sorted(path for path in found if not path.name.startswith("."))
