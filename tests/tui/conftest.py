"""Shared by the tests of the app: made runs, a fixed time zone, a calm terminal."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tui.desk import Desk

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clock times on screen do not depend on where the tests run."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the developer's terminal and settings reaches the tests. Our commands are found,
    so that they are told by their names alone."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("NO_COLOR", "TEXTUAL_THEME", "TEXTUAL_ANIMATIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("textual.app.App.NOTIFICATION_TIMEOUT", 600.0)  # on a slow machine too


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """The module that makes runs out of the real event classes."""
    name = "fluxtui_made_runs"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "made_runs.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def run(tmp_path: Path, made: ModuleType) -> Path:
    """The directory of a run in the middle of its training."""
    made.write(tmp_path / "runs" / "demo" / "events.ndjson", made.training(80))
    return tmp_path / "runs" / "demo"


@pytest.fixture
def app_pilot() -> ModuleType:
    """The module that drives the app."""
    name = "fluxtui_app_pilot"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "app_pilot.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def wizard_pilot() -> ModuleType:
    """The module that drives the wizard."""
    name = "fluxtui_wizard_pilot"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "wizard_pilot.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, wizard_pilot: ModuleType) -> Path:
    """A folder for a wizard's runs, draft and stand-in engine."""
    return wizard_pilot.furnish(tmp_path)


@pytest.fixture
def opened(wizard_pilot: ModuleType) -> Any:
    """`opened(folder, answers, size)`: the wizard on screen, as an asynchronous context."""
    return wizard_pilot.opened


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A user's place: terminals, and a folder for runs."""
    place = Desk(tmp_path)
    yield place
    place.close()
