"""Runs the service under uvicorn."""

from __future__ import annotations

import socket
import ssl
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import sqlalchemy as sa
import uvicorn

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.serve.app import make_app
from fluxtrain.serve.database import shown
from fluxtrain.serve.keys import add_key
from fluxtrain.serve.service import Service
from fluxtrain.serve.settings import ServeSettings
from fluxtrain.serve.store import Store, keys


def run_server(
    settings: ServeSettings,
    host: str,
    port: int,
    certificate: Path | None,
    say: Callable[[str], None],
    complain: Callable[[str], None],
) -> None:
    """Serve until a signal comes. The first start of a folder makes a key and says it.

    Raises:
        BadInput: the address is taken, the certificate cannot be read, or as `Store`.
    """
    _refuse_tasks_without_lm_eval(settings)
    listener = _listener(host, port)
    store = Store(settings.folder, db=settings.db)
    store.keep_to(runs_root())
    app = make_app(Service(store, settings))
    tempfile.tempdir = str(store.files)  # uploads wait on the disk that keeps them
    scheme = "http" if certificate is None else "https"
    name = f"[{host}]" if ":" in host else host
    say(f"serving at {scheme}://{name}:{listener.getsockname()[1]}/v1")
    if store.one(sa.select(keys.c.id)) is None:
        say(f"key: {add_key(store, 'first', 'admin')} (it is not shown again)")
    else:
        say("keys: `fluxtrain serve keys add NAME` makes one more")
    say(f"runs: {runs_root()}")
    if store.is_shared:
        say(f"database: {shown(store.engine)}")
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        ssl_certfile=certificate,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"{certificate} cannot be used ({error}): check --certificate") from error


def _refuse_tasks_without_lm_eval(settings: ServeSettings) -> None:
    named = [name for name, one in settings.models.items() if one.tasks is not None]
    if named and find_spec("lm_eval") is None:
        raise BadInput(
            f"models.{named[0]}.tasks needs lm_eval: install it with "
            "`pip install 'fluxtrain[eval]'`, or leave the tasks out"
        )


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise BadInput(
            f"cannot listen at {host} port {port}: {error.strerror}: choose another --port"
        ) from error
    return listener
