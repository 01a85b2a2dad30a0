"""Runs a check of a learner's file in a process of its own, with a limit of time."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from fluxtrain.commands.learn.tasks import ANSWERS, TASKS, Task
from fluxtrain.errors import BadInput

LIMIT_S = 60.0
_BEGIN = f"import sys; from {__name__} import main; main(*sys.argv[1:])"


class Wrong(Exception):
    """What is wrong with a learner's work, in words that help to mend it."""


Check = Callable[[ModuleType], str]


def check_file(task: Task, path: Path, limit_s: float = LIMIT_S) -> str:
    """Check a learner's file; return what was shown.

    Raises BadInput with what is wrong: a mistake, an error with its line, no end within `limit_s`,
    or an import of what the task is to write.
    """
    _refuse_answers(path)
    with tempfile.TemporaryDirectory() as made:
        told = Path(made, "verdict.json")
        command = [sys.executable, "-P", "-c", _BEGIN, str(task.number), str(path), str(told)]
        process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "2"}, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BadInput(
                f"{path} did not end within {limit_s:.0f} s: look for a loop or a wait without an "
                "end"
            ) from None
        finally:  # with what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not told.exists():
            raise BadInput(f"{path} ended with code {code} before it was checked: let it return")
        verdict = json.loads(told.read_text())
    if not verdict["right"]:
        raise BadInput(f"{path}: {verdict['message']}")
    return str(verdict["message"])


def _refuse_answers(path: Path) -> None:
    """Raise BadInput for a file that cannot be parsed, or imports what is to be written."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read ({error}): name the file of your work") from error
    except SyntaxError as error:
        raise BadInput(f"{path} line {error.lineno}: {error.msg}") from error
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            names = [str(node.args[0].value)] if called in ("__import__", "import_module") else []
        for name in names:
            if name.partition(".")[0] in ANSWERS:
                line = getattr(node, "lineno", 0)
                raise BadInput(
                    f"{path} line {line} imports {name}, and the task is to write that yourself: "
                    "leave it out"
                )


def load(path: Path) -> ModuleType:
    """Run a learner's file as a module."""
    spec = importlib.util.spec_from_file_location("learners_work", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require(true: object, why: str) -> None:
    """Raise Wrong with `why` where something is not as it should be."""
    if not true:
        raise Wrong(why)


def _place(error: BaseException, path: Path) -> str:
    """Return the last line of the learner's file that led to an error."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == str(path)]
    return f"line {frames[-1].lineno}: " if frames else ""


def main(number: str, file: str, told: str) -> None:
    """Check one file, and write the verdict to `told`: whether it is right, and a message."""
    path = Path(file).absolute()
    check: Check = TASKS[int(number) - 1].find_check()
    try:
        right, message = True, check(load(path))
    except Wrong as error:
        right, message = False, str(error)
    except Exception as error:  # noqa: BLE001 - of the learner's code
        right, message = False, f"{_place(error, path)}{type(error).__name__}: {error}"
    Path(told).write_text(json.dumps({"right": right, "message": message}))
