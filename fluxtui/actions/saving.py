"""Save what is on screen in a file of its own."""

from __future__ import annotations

from pathlib import Path

from fluxtui.app_base import AppBase


def run_name(app: AppBase) -> str:
    """Return the name of the run on screen, as files are named after it."""
    hello = app.view.state.hello
    return Path(hello.run_id).name if hello else "run"


def save(app: AppBase, name: str, text: str, note: str = "") -> None:
    """Write `text` where the app was started, over nothing; tell the file's name and a note."""
    path_of = f"{run_name(app)}-{name}"
    try:
        path = free_path(Path(path_of))
        path.write_text(text, "utf-8")
    except OSError as error:
        told = f"{error.filename or path_of}: {error.strerror}"
        app.notify(told, title="Not saved", severity="error")
    else:
        app.notify(f"{path}: {note}" if note else str(path), title="Saved")


def free_path(wanted: Path) -> Path:
    """Return `wanted`, or the same with -2, -3, ... where that name is taken."""
    path, number = wanted, 1
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return path
