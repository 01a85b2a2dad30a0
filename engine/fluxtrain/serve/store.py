"""The database of the service: what was asked, in SQLite, and the folder around it."""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import JSON, Column, Float, Integer, MetaData, String, Table

from fluxtrain.errors import BadInput
from fluxtrain.files.atomic import storage_error, write_bytes
from fluxtrain.files.folders import try_lock
from fluxtrain.files.opening import open_to_write

NETWORK_MOUNTS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "afs", "fuse.sshfs")

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
    Column("bytes", Integer, nullable=False),
    Column("rows", Integer, nullable=False),
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
    Column("wanted", String, nullable=False),  # run, pause, cancel
    Column("card", Integer),  # where it was started last
    Column("tries", JSON, nullable=False),  # of ends that are tried again: their count by kind
    Column("not_before_s", Float, nullable=False),
    Column("notes", JSON, nullable=False),  # of the queue: (time, level, text)
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


class Store:
    """The service's folder, held by one server: `service.db`, `files/`, `jobs/`, `models/`."""

    def __init__(self, folder: Path, *, alone: bool = True) -> None:
        """Make what is missing, lock it and bring the tables up to date.

        `alone`: no server runs; a command that works beside one brings the tables up to date only
        where none does.

        Raises:
            BadInput: another server uses the folder, or it lies on a network mount.
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
            raise storage_error(self.folder, error) from error
        _refuse_network_mount(self.folder, Path("/proc/self/mountinfo").read_text())
        first = try_lock(self._lock)
        if alone and not first:
            os.close(self._lock)
            raise BadInput(
                f"{self.folder} is in use by another server: stop it, or choose another folder "
                "with --folder"
            )
        self.engine = _engine(self.folder / "service.db")
        self._writing = threading.RLock()
        self.changes = 0  # committed by this server, so that readers look only after one
        if first:
            try:
                _migrate(self.engine)
            except BaseException:
                self.close()
                raise

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
        """Give a connection whose writes are committed, and on the disk, at the end."""
        with self._writing, self.engine.begin() as connection:
            yield connection
        self.changes += 1

    def rows(self, query: Any) -> list[Mapping[str, Any]]:
        """Return all rows of a query."""
        with self.engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def one(self, query: Any) -> dict[str, Any] | None:
        """Return the first row of a query; None where there is none."""
        with self.engine.connect() as connection:
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
        at_s = time.time()
        rows = [
            {"project": project, "model": model, "at_s": at_s, "kind": kind, "amount": amount}
            for kind, amount in amounts.items()
        ]
        with self.write() as connection:
            connection.execute(sa.insert(usage), rows)

    def close(self) -> None:
        """Let another server use the folder."""
        self.engine.dispose()
        os.close(self._lock)


def new_id(kind: str) -> str:
    """Return a new id such as `file-3f2b...`."""
    return f"{kind}-{secrets.token_hex(12)}"


def _engine(path: Path) -> sa.Engine:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    engine = sa.create_engine(
        f"sqlite:///{path}",
        connect_args={"timeout": 30},
        json_serializer=lambda value: msgspec.json.encode(value).decode(),
        json_deserializer=msgspec.json.decode,
    )

    @sa.event.listens_for(engine, "connect")
    def _(connection: sqlite3.Connection, _: Any) -> None:
        for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {setting}")

    return engine


def _migrate(engine: sa.Engine) -> None:
    """Bring the tables to this version's. Raises BadInput where a newer version made them."""
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            if sa.inspect(connection).has_table("alembic_version"):
                command.upgrade(config, "head")
            else:
                tables.create_all(connection)
                command.stamp(config, "head")
    except CommandError as error:
        raise BadInput(
            f"{engine.url.database} was made by another version of FluxTrain ({error}): start that "
            "version, or choose another folder with --folder"
        ) from error
    except (sa.exc.DatabaseError, sqlite3.DatabaseError) as error:
        raise BadInput(
            f"{engine.url.database} cannot be used ({error}): put a copy of it back, or move "
            "it away to begin with an empty one"
        ) from error


def _refuse_network_mount(folder: Path, mounts: str) -> None:
    """Raise BadInput where SQLite's locks cannot be relied on. Source: proc(5), mountinfo."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4].encode().decode("unicode_escape")
        if folder.resolve().is_relative_to(place) and len(place) >= longest:
            kind, longest = after.split()[0], len(place)
    if kind in NETWORK_MOUNTS:
        raise BadInput(
            f"{folder} is on a {kind} mount, where SQLite can lose what it wrote: choose a folder "
            "on a local disk with --folder"
        )
