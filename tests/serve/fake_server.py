"""A server in a process of its own, with the stand-in for the engine:
fake_server.py FOLDER DB PORT CARD..."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from fluxtrain.serve.app import make_app
from fluxtrain.serve.service import Service
from fluxtrain.serve.settings import Quotas, ServeSettings
from fluxtrain.serve.store import Store

FAKE = (sys.executable, str(Path(__file__).parent / "fake_engine.py"))


def main(folder: str, db: str, port: str, *cards: str) -> None:
    quotas = Quotas(queued_jobs=10_000, running_jobs=100)
    settings = ServeSettings(
        folder=Path(folder), db=db, cards=tuple(map(int, cards)), quotas=quotas
    )
    service = Service(
        Store(settings.folder, db=db), settings, trainer=(*FAKE, "train"), program=FAKE
    )
    uvicorn.run(make_app(service), port=int(port), log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
