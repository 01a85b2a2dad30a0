"""Uploaded files: stored under the digest of their content, and read by the trainer's own reader
before they are accepted."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import sqlalchemy as sa

from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.request import read_request
from fluxtrain.errors import BadInput
from fluxtrain.files.atomic import storage_error, sync
from fluxtrain.serve.refusal import Refusal, not_found
from fluxtrain.serve.settings import Quotas
from fluxtrain.serve.store import Store, files, jobs, new_id
from fluxtrain.units import bytes_text

PURPOSE = "fine-tune"
KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
INCOMING = ".incoming-"
NAME_LIMIT = 255
LEFT_S = 3600.0  # an upload that grows, or a plan that is made, is younger
PIECE_BYTES = 1 << 20


def add_file(
    store: Store, quotas: Quotas, project: str, name: str, content: BinaryIO
) -> dict[str, Any]:
    """Store and check an upload; return its row.

    Raises:
        Refusal: it is too large, of an unknown kind, or the trainer cannot read it; the message
            has the line.
        NoSpace: the disk is full; nothing is kept.
    """
    name = PurePath(name.replace("\\", "/")).name[-NAME_LIMIT:] or "file.jsonl"
    kind = PurePath(name).suffix.lower()
    if kind not in KINDS:
        raise Refusal(f"{name!r} is no file of data: name it {', '.join(KINDS)}", param="file")
    incoming = store.files / f"{INCOMING}{secrets.token_hex(8)}{kind}"
    try:
        digest, size_bytes = _written(content, incoming, quotas.file_bytes)
        _refuse_over_quota(store, quotas, project, size_bytes)
        rows = _count_rows(incoming, name)
        blob = digest + kind
        row = {
            "id": new_id("file"),
            "project": project,
            "name": name,
            "bytes": size_bytes,
            "rows": rows,
            "blob": blob,
            "created_s": store.now_s(),
        }
        with store.write() as connection:  # together: a deletion looks for rows of the blob
            incoming.replace(store.files / blob)
            sync(store.files)
            connection.execute(sa.insert(files), row)
        return row
    except OSError as error:
        raise storage_error(incoming, error, option="--folder") from error
    finally:
        incoming.unlink(missing_ok=True)


def delete_file(store: Store, project: str, file_id: str) -> None:
    """Delete a file; its content stays while a job that has not ended reads it."""
    row = find_file(store, project, file_id)
    with store.write() as connection:
        connection.execute(sa.delete(files).where(files.c.id == file_id))
    remove_unused(store, row["blob"])


def remove_unused(store: Store, blob: str) -> None:
    """Remove the content of a file that neither a file nor a job still uses."""
    with store.write() as connection:
        holder = connection.execute(sa.select(files.c.id).where(files.c.blob == blob)).first()
        open_jobs = connection.execute(sa.select(jobs.c.blobs).where(jobs.c.outcome.is_(None)))
        if holder is None and not any(blob in one.values() for (one,) in open_jobs):
            (store.files / blob).unlink(missing_ok=True)


def remove_left(store: Store) -> None:
    """Remove leftovers of uploads to a killed server, and of plans that it made."""
    for path in (*store.files.glob(f"{INCOMING}*"), *store.configs.glob("*-plan.yaml")):
        if time.time() - path.stat().st_mtime > LEFT_S:
            path.unlink(missing_ok=True)


def find_file(store: Store, project: str, file_id: str) -> dict[str, Any]:
    """Return the row of a project's file. Raises Refusal (404)."""
    row = store.one(sa.select(files).where(files.c.id == file_id, files.c.project == project))
    if row is None:
        raise not_found("file", file_id)
    return row


def content_of(store: Store, row: Mapping[str, Any]) -> Path:
    """Return where a file's content lies. Raises Refusal where somebody removed it."""
    path: Path = store.files / row["blob"]
    if not path.is_file():
        raise Refusal(f"the content of {row['id']} is gone from the server: upload it again")
    return path


def file_object(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file as the API shows it."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": int(row["created_s"]),
        "filename": row["name"],
        "purpose": PURPOSE,
        "status": "processed",
        "fluxtrain": {"rows": row["rows"]},
    }


def _written(content: BinaryIO, path: Path, limit_bytes: int) -> tuple[str, int]:
    """Copy an upload to `path`; return its digest and its size."""
    digest, size_bytes = hashlib.sha256(), 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while piece := content.read(PIECE_BYTES):
            size_bytes += len(piece)
            if size_bytes > limit_bytes:
                raise too_large(limit_bytes)
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), size_bytes


def too_large(limit_bytes: int) -> Refusal:
    """Return the refusal of an upload that is over the limit."""
    most = bytes_text(limit_bytes)
    return Refusal(
        f"the upload has more than {most}, the most that this server takes (quotas.file_bytes): "
        "compress or divide it, or ask its operator",
        status=413,
        param="file",
    )


def _refuse_over_quota(store: Store, quotas: Quotas, project: str, size_bytes: int) -> None:
    total = sa.func.coalesce(sa.func.sum(files.c.bytes), 0).label("total")
    found = store.one(sa.select(total).where(files.c.project == project))
    stored = int(found["total"]) if found else 0
    if stored + size_bytes > quotas.stored_bytes:
        raise Refusal(
            f"the project stores {bytes_text(stored)} of {bytes_text(quotas.stored_bytes)}, and "
            f"this file has {bytes_text(size_bytes)}: delete files that are not needed",
            code="quota_exceeded",
        )


def _count_rows(path: Path, name: str) -> int:
    """Read a file as the trainer does; return its rows. Raises Refusal with the line at fault."""
    try:
        reading = Reading(read_request({"path": str(path)}).corpus())
        for _ in reading:
            pass
        return reading.report.rows
    except BadInput as error:
        told = str(error).replace(str(path), name)
        raise Refusal(told, code="invalid_file", param="file") from error
