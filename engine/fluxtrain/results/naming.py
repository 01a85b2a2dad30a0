"""Checks the name of a model without torch, so that a mistyped one is told at once."""

from __future__ import annotations

import re
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.run_dir import LAST, RunDir, list_runs

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def refuse_missing(named: str) -> None:
    """Raise BadInput for a path that does not exist, and for a name that nothing can have.

    What may be a model of the hub passes, but not where it names something in a folder that is
    here. No hub is asked.
    """
    if not named.strip():
        raise BadInput("MODEL is empty: name a run, a folder or a model of the hub")
    path = Path(named).expanduser()
    if named == DEMO or path.exists() or is_run(named):
        return
    if named.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(named):
        raise BadInput(
            f"{named} does not exist: name a run (`fluxtrain runs` lists them), the folder of a "
            "model or an adapter, or a model of the hub"
        )
    parent = path.parent
    if parent != Path() and parent.is_dir():
        beside = sorted(one.name for one in parent.iterdir() if one.is_dir())[:3]
        there = f" ({parent} holds {', '.join(beside)})" if beside else ""
        raise BadInput(f"{path} does not exist: check its name{there}")


def is_run(named: str) -> bool:
    """Return whether this names a run: `last`, its folder, its id or the beginning of that."""
    path = Path(named).expanduser()
    if named == LAST or RunDir(path).run.is_file():
        return True
    return not path.exists() and any(run.run_id.startswith(named) for run in list_runs())
