"""The processes of a run end at once where they are told to, whatever state they are in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fluxtrain.core.ranks.launch import launch
from tests.unit.test_parent import runs

# In place of torchrun: it starts one rank, which is stopped, and does not end by SIGTERM.
AGENT = """
import os, signal, subprocess, sys
from pathlib import Path
from fluxtrain.files.parent import end_with_parent
end_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = "from fluxtrain.files.parent import *; end_with_parent(); print(flush=True); input()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
environment = {**os.environ, "TORCHELASTIC_RUN_ID": ""}
rank = subprocess.Popen([sys.executable, "-c", rank], env=environment, **pipes)
rank.stdout.readline()
rank.send_signal(signal.SIGSTOP)
Path(sys.argv[-1]).write_text(f"{os.getpid()} {rank.pid}")
rank.wait()
"""

FRONT = """
import sys
from pathlib import Path
from fluxtrain.core.ranks import launch
launch._AGENT = sys.argv[1]
told = Path(sys.argv[2])
first = lambda: int(told.read_text().split()[1]) if "known" in sys.argv else None
sys.exit(launch.launch([told], 2, first))
"""


@pytest.mark.parametrize(
    ("rank", "signals", "code"),
    [
        ("known", [signal.SIGUSR1, signal.SIGINT, signal.SIGINT], 130),
        ("on-its-way", [signal.SIGUSR1, signal.SIGINT], 130),
        ("on-its-way", [signal.SIGTERM], 143),
    ],
)
def test_all_end_at_once_also_a_rank_that_is_stopped(
    rank: str, signals: list[int], code: int, tmp_path: Path
) -> None:
    told = tmp_path / "pids"
    front = subprocess.Popen([sys.executable, "-c", FRONT, AGENT, told, rank])
    until_s = time.monotonic() + 60
    while not (told.exists() and told.read_text()) and time.monotonic() < until_s:
        time.sleep(0.02)
    pids = [int(pid) for pid in told.read_text().split()]
    try:
        for number in signals:
            time.sleep(0.3)
            assert front.poll() is None and all(map(runs, pids))
            front.send_signal(number)
        assert front.wait(10) == code
        until_s = time.monotonic() + 5
        while any(map(runs, pids)) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert not any(map(runs, pids))
    finally:
        for pid in filter(runs, [front.pid, *pids]):
            os.kill(pid, signal.SIGKILL)


def test_the_exit_code_of_a_rank_is_that_of_all(tmp_path: Path) -> None:
    assert launch(["train", str(tmp_path / "none.yaml")], 2, lambda: None) == 2
