"""`make` on machines that lack something ends with one line that says what to do.

Each test works in a copy of the Makefile and its set-up with a PATH of its own, so nothing is
installed and nothing outside the copy is touched.
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    "sh", "bash", "make", "env", "find", "grep", "sed", "tail", "mkdir", "touch", "dirname", "rm",
    "cat", "chmod", "printf", "true", "false",
)  # fmt: skip


class Checkout:
    """A copy of the checkout's build files and a PATH that holds only what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin = root / "checkout", root / "bin"
        (self.root / ".ci").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/setup"):
            shutil.copy2(ROOT / name, self.root / name)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)

    def add(self, path: str, script: str) -> None:
        """A program of the machine (`bin/...`) or of the checkout (`.venv/bin/...`)."""
        target = self.bin / path[4:] if path.startswith("bin/") else self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"#!/bin/sh\n{script}\n")
        target.chmod(0o755)

    def add_complete_environment(self) -> None:
        """As after a successful set-up, with programs that only say their names."""
        self.add("bin/c++", "exit 0")
        self.add(".venv/bin/python", "exit 0")
        self.add(".venv/bin/fluxtrain", 'echo "fluxtrain $*"')
        self.add(".venv/bin/fluxtrain-tui", 'echo "the app"')
        for stamp in ("python", "runtime", "native"):
            (self.root / ".venv/stamps").mkdir(exist_ok=True)
            (self.root / ".venv/stamps" / stamp).touch()

    def environment(self, **changes: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.root), "TERM": "xterm", **changes}

    def make(self, *goals: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *goals],
            check=False,
            cwd=self.root,
            env=self.environment(**changes),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def complaint(finished: subprocess.CompletedProcess[str]) -> str:
    """The one line for the user, beside make's own line about the failed goal."""
    assert finished.returncode != 0
    lines = [line for line in finished.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1, finished.stderr
    return lines[0]


def test_help_lists_every_target_with_what_it_does(checkout: Checkout) -> None:
    listed = checkout.make("help").stdout
    for target in ("run", "dev", "native", "check", "lint", "test", "test-gpu", "soak", "wheel"):
        assert f"make {target} " in listed


def test_without_a_compiler_one_line_says_how_to_get_one(checkout: Checkout) -> None:
    assert "no C++ compiler was found: install one" in complaint(checkout.make("run"))


def test_without_python_one_line_says_which_is_needed(checkout: Checkout) -> None:
    checkout.add("bin/c++", "exit 0")
    assert "Python 3.11 or newer was not found" in complaint(checkout.make("run"))


def test_a_python_without_venv_names_the_package_that_has_it(checkout: Checkout) -> None:
    checkout.add("bin/c++", "exit 0")
    checkout.add("bin/python3", 'case "$2" in *venv*) exit 1;; esac')
    assert "python3-venv" in complaint(checkout.make("run"))


@pytest.mark.parametrize(
    ("printed", "cure"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        ("WARNING: Retrying (NewConnectionError): Failed: Name or service", "check the connection"),
        ("error: [Errno 122] Disk quota exceeded", "disk is full"),
        ("CMake Error at CMakeLists.txt:2 (project):", "the native library did not build"),
        ("ERROR: No matching distribution found for torch==2.13.0", "not on the package index"),
        ("something nobody foresaw", "see the end of build/setup.log"),
    ],
)
def test_a_failed_installation_says_why_and_keeps_its_log(
    checkout: Checkout, printed: str, cure: str
) -> None:
    checkout.add_complete_environment()
    (checkout.root / ".venv/stamps/runtime").unlink()
    checkout.add(".venv/bin/python", f'case "$*" in *install*) echo "{printed}"; exit 1;; esac')
    assert cure in complaint(checkout.make("run"))
    assert printed in (checkout.root / "build/setup.log").read_text()
    assert not (checkout.root / ".venv/stamps/runtime").exists(), "a failed step must run again"


def test_a_step_that_failed_is_done_by_the_next_call(checkout: Checkout) -> None:
    checkout.add_complete_environment()
    (checkout.root / ".venv/stamps/runtime").unlink()
    checkout.add(".venv/bin/python", 'case "$*" in *install*) exit 1;; esac')
    assert checkout.make("run").returncode != 0
    checkout.add(".venv/bin/python", "exit 0")
    assert checkout.make("run").returncode == 0


def test_without_a_terminal_the_demo_runs_and_says_how_to_see_the_app(checkout: Checkout) -> None:
    checkout.add_complete_environment()
    finished = checkout.make("run")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[0] == "fluxtrain train --demo"
    assert "run `make run` in a terminal" in finished.stdout


@pytest.mark.parametrize(
    ("terminal", "opened"), [("xterm", "the app"), ("dumb", "fluxtrain train --demo")]
)
def test_a_terminal_opens_the_app_unless_it_is_dumb(
    checkout: Checkout, terminal: str, opened: str
) -> None:
    checkout.add_complete_environment()
    ours, theirs = pty.openpty()
    subprocess.run(
        ["make", "run"],
        cwd=checkout.root,
        env=checkout.environment(TERM=terminal),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        check=True,
        timeout=200,
    )
    os.close(theirs)
    assert os.read(ours, 4096).decode().startswith(opened)
    os.close(ours)


def test_a_second_run_sets_nothing_up_and_starts_within_a_second(checkout: Checkout) -> None:
    """In processor time, as other tests share this machine."""
    checkout.add_complete_environment()
    checkout.add(".ci/setup", "exit 1")
    before = os.times()
    assert checkout.make("run").returncode == 0
    after = os.times()
    assert after.children_user + after.children_system < (
        before.children_user + before.children_system + 1.0
    )


def test_a_changed_kernel_is_built_before_the_next_run(checkout: Checkout) -> None:
    checkout.add_complete_environment()
    (checkout.root / "native").mkdir()
    kernels, built = (
        checkout.root / name for name in ("native/kernels.cpp", ".venv/stamps/native")
    )
    kernels.touch()
    while kernels.stat().st_mtime_ns <= built.stat().st_mtime_ns:  # the system's clock has ticks
        kernels.touch()
    assert "building the native library" in checkout.make("run").stdout
    assert "building" not in checkout.make("run").stdout
