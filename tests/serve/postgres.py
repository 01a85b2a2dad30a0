"""A Postgres of the distribution on a free port, for tests."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import pytest


def _program(name: str) -> str:
    """Return the path of a program of Postgres; skip the test where there is none."""
    found = shutil.which(name)
    if found is None and (config := shutil.which("pg_config")) is not None:
        asked = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=True)
        found = shutil.which(name, path=asked.stdout.strip())
    if found is None:
        pytest.skip(f"no Postgres here: {name} is not on the path (Debian: apt install postgresql)")
    return found


def _user() -> dict[str, Any]:
    """Return how to start it as another user where this one is root, whom it refuses."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    pytest.skip("Postgres refuses root, and there is no user `postgres` or `nobody` here")


class Postgres:
    """A server in a folder of its own; its data is lost at the end."""

    def __init__(self) -> None:
        pytest.importorskip("psycopg", reason="psycopg is missing: pip install 'psycopg[binary]'")
        initdb, self._pg_ctl, self._as = _program("initdb"), _program("pg_ctl"), _user()
        self._folder = Path(tempfile.mkdtemp(prefix="fluxtrain-pg-", dir="/tmp"))
        if self._as:
            os.chown(self._folder, self._as["user"], self._as["group"])
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._numbers = count()
        self._run(
            initdb, "-D", f"{self._folder}/data", "-A", "trust", "-U", "flux", "-N", "-E", "UTF8"
        )
        self.start()

    def start(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self._port,
            "unix_socket_directories": self._folder,
            "fsync": "off",
            "max_connections": 200,
            "shared_buffers": "16MB",
        }
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        log = self._folder / "log"
        self._control("start", "-w", "-l", str(log), "-o", options)

    def stop(self, mode: str = "immediate") -> None:
        self._control("stop", "-m", mode)

    def new_database(self) -> str:
        """Return the address of an empty database."""
        import psycopg

        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self._url(name)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _url(self, name: str) -> str:
        return f"postgresql://flux:secret@127.0.0.1:{self._port}/{name}"

    def _control(self, *arguments: str) -> None:
        self._run(self._pg_ctl, "-D", f"{self._folder}/data", *arguments)

    def _run(self, *command: str) -> None:
        with (self._folder / "said").open("a+") as said:  # no pipe, which the server would keep
            ended = subprocess.run(
                command,
                cwd=self._folder,
                stdout=said,
                stderr=said,
                timeout=300,
                check=False,
                **self._as,
            )
            said.seek(0)
            assert ended.returncode == 0, said.read()
