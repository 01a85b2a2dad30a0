"""Deletes what is older than the operator keeps it: files, runs of ended jobs, usage."""

from __future__ import annotations

from contextlib import suppress

import sqlalchemy as sa

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.run_folder.removal import remove_run
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.store import Store, files, jobs, usage
from fluxtrain.serve.uploads import remove_left, remove_unused


def delete_old(store: Store, days: float | None) -> None:
    """Delete files older than `days`, and leftovers of killed uploads. Versions of models stay."""
    remove_left(store)
    if days is None:
        return
    before_s = store.now_s() - days * 86400
    with store.write() as connection:
        connection.execute(sa.delete(usage).where(usage.c.at_s < before_s))
    for row in store.rows(sa.select(files).where(files.c.created_s < before_s)):
        with store.write() as connection:
            connection.execute(sa.delete(files).where(files.c.id == row["id"]))
        remove_unused(store, row["blob"])
    ended = sa.select(jobs).where(jobs.c.outcome.is_not(None), jobs.c.created_s < before_s)
    for row in store.rows(ended):
        if row["outcome"]["at_s"] < before_s and run_of(row["id"]).path.exists():
            with suppress(FluxTrainError):  # tried again in an hour
                remove_run(run_of(row["id"]).path, runs_root())
