"""The database of the service: SQLite in its folder, or a Postgres that several servers share."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from fluxtrain.errors import BadInput
from fluxtrain.machine.disk import MOUNTS, read_disk

# Seconds since 1970 by the database's clock, the only one that several servers have in common.
CLOCKS = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) AS double precision)",
}
WRITE_LOCK = 0x666C7578  # the key of an advisory lock: one transaction writes at a time
# A server that hangs in a transaction loses it, and one that waits for another gives up.
SESSION = "-c idle_in_transaction_session_timeout=20s -c lock_timeout=25s"
# libpq's, in s and ms: what is gone without a word is noticed
REACHING = {"connect_timeout": 5, "keepalives_idle": 5, "tcp_user_timeout": 15_000}


def engine_of(folder: Path, url: str | None) -> sa.Engine:
    """Return SQLAlchemy's engine for `service.db` in a folder, or for a Postgres.

    Raises BadInput for an address that is none, or a driver that is not installed.
    """
    return _sqlite(folder / "service.db") if url is None else _postgres(url)


def clock_of(engine: sa.Engine) -> sa.ColumnElement[float]:
    """Return an expression for the time by the database's clock, in seconds since 1970."""
    return sa.literal_column(CLOCKS[engine.dialect.name], sa.Float)


def lock_writes(connection: sa.Connection) -> None:
    """Wait until no other transaction writes, until the end of this one.

    SQLite has one writer anyway; with this lock of Postgres, what is read in a transaction that
    writes stays true until its end there too.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(WRITE_LOCK)))


def shown(engine: sa.Engine) -> str:
    """Return the name of the database for messages, without its password."""
    return engine.url.render_as_string().replace("+psycopg", "").removeprefix("sqlite:///")


def _sqlite(path: Path) -> sa.Engine:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    engine = _made(sa.make_url(f"sqlite:///{path}"), connect_args={"timeout": 30})

    @sa.event.listens_for(engine, "connect")
    def _(connection: sqlite3.Connection, _: Any) -> None:
        for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {setting}")

    return engine


def _postgres(url: str) -> sa.Engine:
    try:
        address = sa.make_url(url)
        if address.drivername not in ("postgresql", "postgres"):
            raise ValueError
    except (sa.exc.ArgumentError, ValueError):
        raise BadInput(
            "--db is no address of a Postgres: use postgresql://USER@HOST/DATABASE, or leave it "
            "out for SQLite in --folder"
        ) from None
    try:
        return _made(
            address.set(drivername="postgresql+psycopg"),
            connect_args={**REACHING, "options": SESSION},
            pool_pre_ping=True,
            pool_timeout=10,
            max_overflow=35,  # threads of requests
        )
    except ImportError as error:
        raise BadInput(
            f"--db needs psycopg ({error}): install it with `pip install 'fluxtrain[postgres]'`"
        ) from error


def _made(url: sa.URL, **options: Any) -> sa.Engine:
    return sa.create_engine(
        url,
        json_serializer=lambda value: msgspec.json.encode(value).decode(),
        json_deserializer=msgspec.json.decode,
        **options,
    )


def migrate(engine: sa.Engine, tables: sa.MetaData) -> None:
    """Bring the tables to this version's.

    Raises BadInput where a newer version made them, or the database cannot be used.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    try:
        with engine.begin() as connection:
            lock_writes(connection)
            config.attributes["connection"] = connection
            if sa.inspect(connection).has_table("alembic_version"):
                command.upgrade(config, "head")
            else:
                tables.create_all(connection)
                command.stamp(config, "head")
    except CommandError as error:
        raise BadInput(
            f"{shown(engine)} was made by another version of FluxTrain ({error}): start that "
            "version, or choose another place with --db or --folder"
        ) from error
    except sa.exc.DatabaseError as error:
        cure = "put a copy of it back, or move it away to begin with an empty one"
        if engine.dialect.name == "postgresql":
            cure = "start it, make it with `createdb`, or correct --db"
        told = str(error.orig).partition("\n")[0]
        raise BadInput(f"{shown(engine)} cannot be used ({told}): {cure}") from error


def refuse_network_mount(folder: Path, mounts: Path = MOUNTS) -> None:
    """Raise BadInput where SQLite's locks cannot be relied on."""
    disk = read_disk(folder, mounts)
    if disk.on_network:
        raise BadInput(
            f"{folder} is on a {disk.file_system} mount, where SQLite can lose what it wrote: "
            "choose a folder on a local disk with --folder, or keep it in a Postgres with --db"
        )
