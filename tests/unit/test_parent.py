"""A process that answers another one ends with it; a trainer does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Never ends, in native code that holds the interpreter: no thread of the process could end it.
ENDLESS = """
import os, sys
from fluxtrain.files.parent import end_with_parent
end_with_parent()
open(sys.argv[-1], "w").write(f"{os.getpid()} {'FLUXTRAIN_PARENT' in os.environ}")
sum(range(10**14))
"""

ASKING = """
import asyncio, sys
from fluxtrain.events.answers.asking import ask_engine
from fluxtrain.events.answers.answers import InspectionAnswer
program = (sys.executable, "-c", sys.argv[1])
asyncio.run(ask_engine(InspectionAnswer, sys.argv[2], program=program))
"""

TALKING = """
import asyncio, sys
from fluxtrain.events.answers.asking import Talk
async def talk():
    begun = await Talk.begin(sys.argv[2], program=(sys.executable, "-c", sys.argv[1]))
    async for _ in begun.events():
        pass
asyncio.run(talk())
"""


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie waits only for its parent to look."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


@pytest.mark.parametrize("asks", [ASKING, TALKING], ids=["asking", "talking"])
def test_a_killed_process_leaves_no_engine_behind_also_one_in_an_endless_loop(
    asks: str, tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    asking = subprocess.Popen([sys.executable, "-c", asks, ENDLESS, told], start_new_session=True)
    try:
        until_s = time.monotonic() + 60
        while not (told.exists() and told.read_text()) and time.monotonic() < until_s:
            time.sleep(0.02)
        pid, inherits = told.read_text().split()
        assert runs(int(pid))
        assert inherits == "False", "what it starts is not to end with us"
        os.kill(asking.pid, signal.SIGKILL)
        until_s = time.monotonic() + 20
        while runs(int(pid)) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert not runs(int(pid))
    finally:
        asking.kill()
        asking.wait()
        if told.exists() and runs(int(told.read_text().split()[0])):
            os.kill(int(told.read_text().split()[0]), signal.SIGKILL)
