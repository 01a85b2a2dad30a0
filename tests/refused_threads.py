"""A system that starts no more threads."""

from __future__ import annotations

import threading

import pytest


def refuse_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let no thread of that name be started, as where a control group has as many as it may."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
