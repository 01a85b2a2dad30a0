"""The registry: immutable versions of trained models, their artifacts, and aliases with history."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import Field

from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import read_json, replace_folder, storage_error
from fluxtrain.serve.refusal import Body, Refusal, not_found
from fluxtrain.serve.store import Store, aliases, versions

ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
CHECKPOINT = ":ckpt-step-"  # in the name of a checkpoint's model, before its step


def model_name(row: Mapping[str, Any]) -> str:
    """Return the name of the model that a job makes.

    Of its suffix a-z, digits, dots and underscores stay: names stand in addresses and file names.
    """
    plain = unicodedata.normalize("NFKD", row["request"].get("suffix") or "")
    letters = plain.encode("ascii", "ignore").decode().lower()
    suffix = re.sub(r"[^a-z0-9._]+", "-", letters).strip("-.")
    number = row["id"].removeprefix("ftjob-")
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
        "artifact": keep(run.model, store.models),
        "facts": {
            "data": row["blobs"],
            "configuration": row["config"],
            "run": row["id"],
            "metrics": {name: ending.get(name) for name in ("loss", "evaluation_loss")},
            "measured": ending.get("plan"),
        },
        "created_s": store.now_s(),
    }


class PromotionGate(Body):
    """What a version has to show before an alias moves to it."""

    file: str | None = None  # held-out rows, for the loss of both versions
    metric: str = "loss"  # or TASK/METRIC of the operator's tasks
    min_gain: float = Field(default=0.0, description="by which it must be better")


class Promotion(Body):
    """The body of `POST /v1/fluxtrain/aliases/{name}`."""

    version: str
    gate: PromotionGate | None = None


def compared_tasks(
    metric: str, version: Mapping[str, Any], before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the results of two versions in a task. Raises Refusal where one has none."""
    results = [None if one is None else _result(metric, one) for one in (version, before)]
    new, old = results
    assert new is not None
    return {
        metric: new["value"],
        f"{metric}_before": None if old is None else old["value"],
        "higher_is_better": new["higher_is_better"],
    }


def _result(metric: str, version: Mapping[str, Any]) -> dict[str, Any]:
    tasks = version["facts"].get("tasks")
    if tasks is None:
        raise Refusal(
            f"{version['id']} has no results of tasks: they are made after each job where "
            "models.NAME.tasks is set in serve.yaml, so ask again later, or gate by the loss",
            param="gate.metric",
        )
    found: dict[str, Any] | None = tasks.get(metric) if "error" not in tasks else None
    if found is None:
        told = tasks.get("error") or f"it has {', '.join(tasks)}"
        raise Refusal(f"{version['id']} has no result {metric!r}: {told}", param="gate.metric")
    return found


def refuse_below_gate(asked: Promotion, now: str | None, why: Mapping[str, Any]) -> None:
    """Raise Refusal where a version is not as much better as the gate asks for."""
    gate = asked.gate
    if gate is None or (before := why[f"{gate.metric}_before"]) is None:
        return
    value = why[gate.metric]
    gain = value - before if why.get("higher_is_better") else before - value
    if not gain >= gate.min_gain:  # nor where a loss is not finite
        where = f"on {gate.file} its loss" if gate.metric == "loss" else f"its {gate.metric}"
        raise Refusal(
            f"the alias stays at {now}: {where} is {before:.6g} and that of {asked.version} "
            f"{value:.6g}, a gain of {gain:.3g} where {gate.min_gain:g} is asked for",
            code="gate_not_passed",
        )


def find_version(store: Store, project: str, name: str) -> Mapping[str, Any]:
    """Return the row of a project's version, by its name or an alias. Raises Refusal (404)."""
    wanted = current(store, project, name) or name
    mine = (versions.c.id == wanted, versions.c.project == project)
    found = store.one(sa.select(versions).where(*mine))
    if found is None:
        raise not_found("model", name)
    return found


def current(store: Store, project: str, alias: str) -> str | None:
    """Return the version that an alias points to; None where no such alias exists."""
    rows = history(store, project, alias)
    return rows[0]["version"] if rows else None


def history(store: Store, project: str, alias: str | None = None) -> list[Mapping[str, Any]]:
    """Return where a project's aliases, or one of them, have led to, newest first."""
    query = sa.select(aliases).where(aliases.c.project == project)
    if alias is not None:
        query = query.where(aliases.c.name == alias)
    return store.rows(query.order_by(aliases.c.number.desc()))


def move(
    store: Store, project: str, alias: str, version: str | None, why: Mapping[str, Any]
) -> dict[str, Any]:
    """Let an alias point to a version, or nowhere; its history keeps the earlier one."""
    if not ALIAS.fullmatch(alias):
        raise Refusal(f"{alias!r} is no name for an alias: use a-z, 0-9, dot, dash, underscore")
    row = {
        "project": project,
        "name": alias,
        "version": version,
        "moved_s": store.now_s(),
        "why": dict(why),
    }
    with store.write() as connection:
        connection.execute(sa.insert(aliases), row)
    return alias_object(row)


def delete_version(store: Store, project: str, name: str) -> None:
    """Delete a version and its files. Raises Refusal while an alias leads to it."""
    row = find_version(store, project, name)
    leading = {one["name"] for one in history(store, project)}
    used = [alias for alias in leading if current(store, project, alias) == row["id"]]
    if used:
        raise Refusal(f"the alias {used[0]} leads to {row['id']}: move or delete it first")
    with store.write() as connection:
        connection.execute(sa.delete(versions).where(versions.c.id == row["id"]))
        same = sa.select(versions.c.id).where(versions.c.artifact == row["artifact"])
        if connection.execute(same).first() is None:
            shutil.rmtree(store.models / row["artifact"], ignore_errors=True)


def checked(store: Store, folder: Path) -> Path:
    """Return the folder of an artifact. Raises Refusal where its files were changed or are gone."""
    assert folder.parent == store.models
    if not folder.is_dir() or digest_of(folder) != folder.name:
        raise Refusal(
            f"the files of this model were changed or removed since they were registered "
            f"({folder.name[:12]}): train it again, or put them back",
            status=409,
            code="artifact_changed",
        )
    return folder


def version_object(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a version as the API shows it."""
    facts = {name: row["facts"].get(name) for name in ("metrics", "tasks", "data", "run")}
    return {
        "id": row["id"],
        "object": "model",
        "created": int(row["created_s"]),
        "owned_by": row["project"],
        "fluxtrain": {
            "base": row["base"],
            "method": row["method"],
            "job": row["job"],
            "sha256": row["artifact"],
            **facts,
        },
    }


def alias_object(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a move of an alias as the API shows it."""
    return {
        "id": row["name"],
        "object": "fluxtrain.alias",
        "version": row["version"],
        "moved_at": int(row["moved_s"]),
        "why": row["why"],
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
        raise storage_error(kept, error, option="--folder") from error
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
