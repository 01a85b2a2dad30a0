"""Ctrl-C in the first moments of a command, in a process that is really started."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
import tomllib
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from fluxtrain.commands.importing import Importing
from fluxtrain.errors import EXIT_INTERRUPTED
from fluxtrain.events.run_folder.run_dir import RunDir
from tests.engine import forked

ROOT = Path(__file__).parents[2]
SOAK = pytest.mark.slow
# Stands in for a package on a disk that is slow: it says that it is being read, and goes on. In
# short sleeps: a signal that comes between Python's look at signals and a sleep does not end it.
SLEEPING = "for _ in range(600): time.sleep(0.1)"
SLOW = f"""
import pathlib, time
pathlib.Path(__file__).with_name("read").touch()
{SLEEPING}
"""
# As a class body does in Python 3.11, where a descriptor is given its name.
TURNING = SLOW.replace(
    SLEEPING,
    f"""
try:
    {SLEEPING}
except KeyboardInterrupt as error:
    raise RuntimeError("Error calling __set_name__") from error
""",
)


def interrupted(
    tmp_path: Path, command: list[str], slow: str, content: str = SLOW
) -> subprocess.CompletedProcess[str]:
    """The command, interrupted while it reads the package `slow`."""
    package = tmp_path / "slow" / slow
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(content)
    ours = os.pathsep.join([str(package.parent), str(ROOT / "engine"), str(ROOT)])
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ours},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (package / "read").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, *told)


def scripts() -> dict[str, str]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        found: dict[str, str] = tomllib.load(file)["project"]["scripts"]
    return found


@pytest.mark.parametrize(("name", "slow"), [("fluxtrain", "typer"), ("fluxtrain-tui", "msgspec")])
@pytest.mark.parametrize("as_module", [True, False])
def test_an_interrupt_while_a_command_is_read_is_one_line_and_130(
    tmp_path: Path, name: str, slow: str, as_module: bool
) -> None:
    module, _, function = scripts()[name].partition(":")
    package = module.partition(".")[0]
    script = f"import sys\nfrom {module} import {function}\nsys.exit({function}())"  # as pip's
    how = ["-m", package] if as_module else ["-c", script]
    ended = interrupted(tmp_path, [sys.executable, *how], slow)
    assert ended.returncode == EXIT_INTERRUPTED
    assert (ended.stdout, ended.stderr) == ("", "interrupted before anything was started\n")


def test_an_interrupt_while_the_app_is_read_is_one_line_and_130(tmp_path: Path) -> None:
    code = (
        "import fluxtui.launch as launch\n"
        "launch.has_terminal = lambda: True\n"
        "launch.wants_lines = lambda: False\n"
        "raise SystemExit(launch.main([]))"
    )
    ended = interrupted(tmp_path, [sys.executable, "-c", code], "textual")
    assert ended.returncode == EXIT_INTERRUPTED
    assert ended.stderr == "fluxtrain-tui: interrupted\n"


@pytest.mark.parametrize(
    "command",
    ["train", *(pytest.param(other, marks=SOAK) for other in ("plan", "inspect"))],
)
def test_an_interrupt_is_told_as_such_whatever_packages_make_of_it(
    tmp_path: Path, command: str
) -> None:
    what = [sys.executable, "-m", "fluxtrain", command, "--demo"]
    ended = interrupted(tmp_path, what, "transformers", TURNING)
    assert (ended.stdout, ended.stderr) == ("", "interrupted before anything was started\n")
    assert ended.returncode == EXIT_INTERRUPTED
    assert not list(tmp_path.glob("runs/*"))


def test_what_is_started_to_ignore_an_interrupt_ignores_it(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Importing():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_packages_that_nothing_here_uses_are_not_found_while_others_are_imported() -> None:
    hidden = [name for name in ("sklearn", "scipy") if name not in sys.modules]
    with Importing():
        assert not gc.isenabled()
        assert all(importlib.util.find_spec(name) is None for name in hidden)
    assert gc.isenabled() and not set(hidden) & set(sys.modules)


STOPPED_AT = """
import pathlib, sys, time
import fluxtrain.train.run
import {module} as place
def reached(*_, **__):
    pathlib.Path("reached").touch()
    time.sleep(60)
place.{name} = reached
from fluxtrain.cli import main
main(sys.argv[1:])
"""


def interrupted_at(
    tmp_path: Path, place: str, *arguments: str, by: signal.Signals = signal.SIGINT
) -> subprocess.CompletedProcess[str]:
    """The command, interrupted where the function `place` is called."""
    module, _, name = place.rpartition(".")
    reached = tmp_path / "reached"

    def signalled(process: ForkServerProcess) -> None:
        deadline = time.monotonic() + 60
        while not reached.exists():
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, by)

    return forked.python(
        "-c", STOPPED_AT.format(module=module, name=name), *arguments,
        folder=tmp_path, environment={"FLUXTRAIN_RUNS": str(tmp_path / "runs")},
        meanwhile=signalled,
    )  # fmt: skip


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("fluxtrain.train.run.read_machine", marks=SOAK),
        "fluxtrain.train.session.Emitter",
    ],
)
def test_a_run_that_wrote_nothing_when_it_was_interrupted_leaves_no_folder(
    tmp_path: Path, place: str
) -> None:
    ended = interrupted_at(tmp_path, place, "train", "--demo")
    assert (ended.stdout, ended.stderr) == ("", "interrupted before anything was started\n")
    assert ended.returncode == EXIT_INTERRUPTED
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_interrupt_before_anything_is_written_names_the_folder_that_the_user_named(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("of the user")
    what = ("train", "--demo", "--run-dir", str(mine))
    ended = interrupted_at(tmp_path, "fluxtrain.train.run.read_machine", *what)
    assert ended.stderr == (
        f"stopped: interrupted while it was not training: {mine} is there and holds notes.txt\n"
    )
    assert ended.returncode == EXIT_INTERRUPTED
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def test_an_interrupt_while_a_run_is_loaded_names_its_folder_and_what_it_holds(
    tmp_path: Path,
) -> None:
    ended = interrupted_at(tmp_path, "fluxtrain.train.inputs.load_inputs", "train", "--demo")
    (run,) = (tmp_path / "runs").iterdir()
    assert ended.stderr == (
        f"stopped before a step was made: {run} holds its configuration and its log alone\n"
    )
    assert ended.returncode == EXIT_INTERRUPTED
    assert {"run.json", "engine.log"} <= {path.name for path in run.iterdir()}
    assert not (run / "checkpoints").exists() and not (run / "model").exists()
    assert RunDir(run).liveness() == "stopped"


def test_a_dry_run_that_is_interrupted_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    ended = interrupted_at(tmp_path, "fluxtrain.train.inputs.load_inputs", "dry-run", "--demo")
    assert ended.stderr.endswith("stopped: the dry run was stopped and left nothing\n")
    assert ended.returncode == EXIT_INTERRUPTED
    assert not (tmp_path / "runs").exists()
