"""What was asked of the service: the tables of its database, and the folder around it."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import JSON, BigInteger, Column, Float, Integer, MetaData, String, Table

from fluxtrain.errors import BadInput
from fluxtrain.files.atomic import storage_error, write_bytes
from fluxtrain.files.folders import try_lock
from fluxtrain.files.opening import open_to_write
from fluxtrain.serve.database import (
    clock_of,
    engine_of,
    lock_writes,
    migrate,
    refuse_network_mount,
)
from fluxtrain.serve.refusal import Refusal

tables = MetaData()
keys = Table(
    "key",
    tables,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("project", String, nullable=False),
    Column("scope", String, nullable=False),
    Column("sha256", String, nullable=False, unique=True),
    Column("created_s", Float, nullable=False),
    Column("revoked_s", Float),
)
files = Table(
    "file",
    tables,
    Column("id", String, primary_key=True),
    Column("project", String, nullable=False, index=True),
    Column("name", String, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("blob", String, nullable=False, index=True),  # its name in `files/`
    Column("created_s", Float, nullable=False),
)
jobs = Table(
    "job",
    tables,
    Column("id", String, primary_key=True),
    Column("number", Integer, nullable=False, unique=True),  # order of creation
    Column("project", String, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("request", JSON, nullable=False),  # as it came, without `fluxtrain`
    Column("config", JSON, nullable=False),  # of the run
    Column("plan", JSON, nullable=False),  # what was predicted
    Column("blobs", JSON, nullable=False),  # of training and held-out data
    Column("digest", String, nullable=False, index=True),  # of the request, for repeats
    Column("repeat_key", String),  # its Idempotency-Key
    Column("wanted", String, nullable=False, default="run"),  # run, pause, cancel
    Column("server", String),  # that looks after it, from its start until its end is judged
    Column("card", Integer),  # where it was started last
    # counts of ends that are tried again, by kind, and numbers of starts
    Column("tries", JSON, nullable=False, default={}),
    Column("not_before_s", Float, nullable=False, default=0.0),
    Column("notes", JSON, nullable=False, default=[]),  # of the queue: (time, level, text)
    Column("outcome", JSON(none_as_null=True)),  # how it ended; None: it has not
    sa.UniqueConstraint("project", "repeat_key", name="one_job_a_key"),
    sa.Index("job_order", "project", "number"),
)
versions = Table(
    "version",
    tables,
    Column("id", String, primary_key=True),  # ft:BASE:PROJECT:SUFFIX:ID
    Column("project", String, nullable=False, index=True),
    Column("job", String, nullable=False, unique=True),
    Column("base", String, nullable=False),
    Column("method", String, nullable=False),
    Column("artifact", String, nullable=False),  # its name in `models/`: a digest of its files
    Column("facts", JSON, nullable=False),  # data, configuration, base, metrics
    Column("created_s", Float, nullable=False),
)
aliases = Table(
    "alias",
    tables,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("project", String, nullable=False),
    Column("name", String, nullable=False),
    Column("version", String),  # None: the alias was removed
    Column("moved_s", Float, nullable=False),
    Column("why", JSON, nullable=False),
    sa.Index("alias_name", "project", "name"),
)
usage = Table(
    "usage",
    tables,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("project", String, nullable=False),
    Column("at_s", Float, nullable=False),
    Column("kind", String, nullable=False),  # prompt_tokens, answer_tokens, card_s
    Column("amount", Float, nullable=False),
    Column("model", String, nullable=False),
    sa.Index("usage_when", "project", "at_s"),
)
servers = Table(
    "server",
    tables,
    Column("id", String, primary_key=True),
    Column("host", String, nullable=False),
    Column("folder", String, nullable=False),  # the mark of its folder
    Column("until_s", Float, nullable=False),  # by the database's clock, when its lease ends
)


# psycopg has an idle transaction that was ended as an internal error
AWAY = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError)


class Store:
    """The service's folder: `files/`, `jobs/`, `models/`, and `service.db` or a Postgres.

    One server holds a folder with SQLite, several share one with a Postgres.
    """

    def __init__(self, folder: Path, *, alone: bool = True, db: str | None = None) -> None:
        """Make what is missing, lock it and bring the tables up to date.

        Args:
            folder: of files, models and SQLite's database.
            alone: no server runs; a command that works beside one brings SQLite's tables up to
                date only where none does.
            db: the address of a Postgres; None for SQLite.

        Raises:
            BadInput: another server uses the folder, it lies on a network mount, or the database
                cannot be used.
            NoSpace: the disk is full.
        """
        self.folder = folder.absolute()
        self.files, self.models = self.folder / "files", self.folder / "models"
        self.configs = self.folder / "jobs"
        try:
            for made in (self.folder, self.files, self.models, self.configs):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open_to_write(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise storage_error(self.folder, error, option="--folder") from error
        facts = os.fstat(self._lock)
        self.mark = f"{facts.st_ino}-{facts.st_mtime_ns}"  # of the folder, on every machine
        self.is_shared = db is not None
        try:
            first = self.is_shared or self._is_first(alone)
            self.engine = engine_of(self.folder, db)
            self.clock = clock_of(self.engine)
            self.ahead_s = 0.0  # of the database's clock before this machine's
            self._writing = threading.RLock()
            self.changes = 0  # committed by this server, so that readers look only after one
            if first:
                migrate(self.engine, tables)
        except BaseException:
            os.close(self._lock)
            raise

    def _is_first(self, alone: bool) -> bool:
        """Lock the folder for SQLite; return whether no other process has it. Raises BadInput."""
        refuse_network_mount(self.folder)
        first = try_lock(self._lock)
        if alone and not first:
            raise BadInput(
                f"{self.folder} is in use by another server: stop it, choose another folder with "
                "--folder, or let both share a Postgres with --db"
            )
        return first

    def now_s(self) -> float:
        """Return the time by the database's clock, which all servers have in common (Unix
        time)."""
        return time.time() + self.ahead_s

    def keep_to(self, runs: Path) -> None:
        """Note where the runs of jobs are; later servers of this folder look there too.

        Raises BadInput where an earlier server had another place: it would train all anew there.
        """
        note = self.folder / "runs"
        before = note.read_text() if note.exists() else str(runs)
        if before != str(runs):
            raise BadInput(
                f"the jobs of {self.folder} have their runs in {before}, and this one would look "
                f"in {runs}: set FLUXTRAIN_RUNS={before}, or start it where it was started before"
            )
        write_bytes(note, str(runs).encode())

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Give a connection whose writes are committed, and on the disk, at the end; nobody else
        writes meanwhile.

        Raises Refusal (503) where the database does not answer; nothing is known of the writes.
        """
        with self._told(), self._writing, self.engine.begin() as connection:
            lock_writes(connection)
            yield connection
        self.changes += 1

    @contextmanager
    def reach(self) -> Iterator[sa.Connection]:
        """Give a connection for reads, or a write that waits for no others. Raises as `write`."""
        with self._told(), self.engine.begin() as connection:
            yield connection

    @staticmethod
    @contextmanager
    def _told() -> Iterator[None]:
        """Turn the database's own faults into refusals."""
        try:
            yield
        except sa.exc.DataError as error:
            raise Refusal("a text has a character that cannot be kept: leave it out") from error
        except (*AWAY, sa.exc.TimeoutError) as error:
            told = str(getattr(error, "orig", error)).partition("\n")[0]
            print(f"the database does not answer: {told}", file=sys.stderr)
            raise Refusal(
                "the database does not answer: ask again in some seconds",
                status=503,
                code="database_unavailable",
                retry_after_s=5.0,
            ) from error

    def rows(self, query: Any) -> list[Mapping[str, Any]]:
        """Return all rows of a query."""
        with self.reach() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def one(self, query: Any) -> dict[str, Any] | None:
        """Return the first row of a query; None where there is none."""
        with self.reach() as connection:
            row = connection.execute(query).mappings().first()
            return None if row is None else dict(row)

    def used(self, project: str, kinds: tuple[str, ...], since_s: float) -> float:
        """Return the sum of a project's usage of some kinds since a time."""
        total = sa.func.coalesce(sa.func.sum(usage.c.amount), 0.0)
        where = (usage.c.project == project, usage.c.kind.in_(kinds), usage.c.at_s >= since_s)
        found = self.one(sa.select(total.label("total")).where(*where))
        return float(found["total"]) if found else 0.0

    def usage(self, project: str | None, since_s: float) -> list[dict[str, Any]]:
        """Return sums of usage since a time by project, model and kind; None: of all projects."""
        by = (usage.c.project, usage.c.model, usage.c.kind)
        query = sa.select(*by, sa.func.sum(usage.c.amount).label("amount")).group_by(*by)
        query = query.where(usage.c.at_s >= since_s)
        if project is not None:
            query = query.where(usage.c.project == project)
        return [dict(row) for row in self.rows(query)]

    def note_usage(self, project: str, model: str, **amounts: float) -> None:
        """Add to a project's usage."""
        with self.write() as connection:
            connection.execute(self.usage_of(project, model, **amounts))

    def usage_of(self, project: str, model: str, **amounts: float) -> sa.Insert:
        """Return the statement that adds to a project's usage."""
        known = {"project": project, "model": model, "at_s": self.now_s()}
        rows = [{**known, "kind": kind, "amount": amount} for kind, amount in amounts.items()]
        return sa.insert(usage).values(rows)

    def close(self) -> None:
        """Let another server use the folder."""
        self.engine.dispose()
        os.close(self._lock)


def new_id(kind: str) -> str:
    """Return a new id such as `file-3f2b...`."""
    return f"{kind}-{secrets.token_hex(12)}"
