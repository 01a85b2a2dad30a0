"""What a run's folder asks for beyond its own files, which the user decides anew."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import read_json

TRUST = ("--set", "model.trust_remote_code=true")  # after the user was asked


def trusts_code(run_dir: Path | str) -> str:
    """Return the model whose own Python code a run wants to execute, by its record; "" for none."""
    try:
        model = (read_json(RunDir(run_dir).run) or {})["config"]["model"]
        return str(model["path"]) if model["trust_remote_code"] else ""
    except (KeyError, TypeError):
        return ""


def question_of_trust(model: str) -> str:
    """Say what resuming the run means."""
    return f"It runs Python code that comes with {model}: resume it only if you trust that code."
