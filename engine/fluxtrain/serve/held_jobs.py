"""The jobs that a server looks after, each from its start until its end is judged.

A job's row names its server. Every change made here holds only while it still does, and nobody
else writes meanwhile: a server that hung cannot touch what another has taken since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from fluxtrain.serve.lease import Lease
from fluxtrain.serve.refusal import without_folders
from fluxtrain.serve.store import Store, jobs, servers

Row = Mapping[str, Any]
HELD = (jobs.c.outcome.is_(None), jobs.c.server.is_not(None))


class Taken(Exception):
    """Another server has the job now."""


def is_held(row: Row) -> bool:
    """Return whether a job was started and its end is not judged yet."""
    started, judged = (int(row["tries"].get(kind, 0)) for kind in ("started", "judged"))
    return started > judged


class HeldJobs:
    """Takes, changes and gives back the jobs of one server."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store, self._lease = store, lease

    def divided(
        self, rows: list[Row], is_elsewhere: Callable[[Row], bool]
    ) -> tuple[list[Row], ...]:
        """Return the jobs that this server has, some of them taken over from servers that are gone,
        and the waiting ones.

        `is_elsewhere`: whether only servers of another machine can look after a job.
        """
        living, mine, waiting = self._lease.living(), [], []
        for row in rows:
            if row["server"] == self._lease.id:
                mine.append(row)
            elif row["server"] not in living:
                if not is_held(row):
                    waiting.append(row)
                elif not is_elsewhere(row) and (taken := self._take(row)) is not None:
                    mine.append(taken)
        return mine, waiting

    def _take(self, row: Row) -> Row | None:
        """Take a job whose server is gone; None where that server is back."""
        before = servers.c.id == row["server"]
        with self._store.write() as connection:
            ended = servers.c.until_s <= self._store.clock
            connection.execute(sa.delete(servers).where(before, ended))
            if connection.execute(sa.select(servers.c.id).where(before)).first() is not None:
                return None
            taken = sa.update(jobs).where(*_unchanged(row)).values(server=self._lease.id)
            is_taken = connection.execute(taken).rowcount
        return {**row, "server": self._lease.id} if is_taken else None

    def claim(self, row: Row, lane: int, most: int, *, counts: bool) -> Row | None:
        """Note that this server starts a job on a card; return its row.

        None where it does not wait any more, or `most` jobs of its project run already. counts: its
        card's time counts from now on.
        """
        waits = (*_unchanged({**row, "server": None}), jobs.c.wanted == "run")
        held = sa.select(sa.func.count()).where(jobs.c.project == row["project"], *HELD)
        with self._store.write() as connection:
            fresh = connection.execute(sa.select(jobs).where(*waits)).mappings().first()
            if fresh is None or connection.execute(held).scalar_one() >= most:
                return None
            tries = {**fresh["tries"], "started": fresh["tries"].get("started", 0) + 1}
            if counts:
                tries["started_s"] = self._store.now_s()
            claim = {"server": self._lease.id, "tries": tries, "card": lane}
            connection.execute(sa.update(jobs).where(jobs.c.id == row["id"]).values(claim))
        return {**fresh, **claim}

    def change(self, row: Row, *more: sa.Insert, **values: Any) -> None:
        """Change a job, and run `more` with it. Raises Taken."""
        with self._store.write() as connection:
            change = sa.update(jobs).where(*_unchanged(row)).values(**values)
            if not connection.execute(change).rowcount:
                raise Taken
            for statement in more:
                connection.execute(statement)

    def note(self, row: Row, level: str, text: str) -> None:
        """Add an event to a job that its run does not report. Raises Taken."""
        self.change(row, notes=self.noted(row, level, text))

    def noted(self, row: Row, level: str, text: str) -> list[Any]:
        """Return the notes of a job with one more."""
        return [*row["notes"], [self._store.now_s(), level, without_folders(text)]]


def _unchanged(row: Row) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions for a job that no other server has taken or ended since."""
    same = jobs.c.server.is_not_distinct_from(row["server"])
    return (jobs.c.id == row["id"], jobs.c.outcome.is_(None), same)
