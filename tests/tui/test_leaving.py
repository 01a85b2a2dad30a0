"""An app that is left while a process of it still runs: nothing is said, and nothing stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

# An app whose worker is cancelled when it is left, as Textual does it, beside an engine that runs.
LEFT = """
import asyncio, gc, pathlib, sys, time
from fluxtrain.events.answers.asking import ask_engine
from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.asking import Talk
from fluxtui import launch

PROGRAM = (sys.executable, "-c", sys.argv[1], sys.argv[2])

async def talk():
    begun = await Talk.begin("a-model", program=PROGRAM)
    try:
        async for _ in begun.events():
            pass
    finally:
        await begun.close()

async def ask():
    await ask_engine(ProbeAnswer, program=PROGRAM)

class App:
    def exit(self): pass
    async def run_async(self):
        self.worker = asyncio.create_task(globals()[sys.argv[3]]())
        while not pathlib.Path(sys.argv[2]).read_text():
            await asyncio.sleep(0.01)
        if sys.argv[4] == "cancelled":
            self.worker.cancel()
            await asyncio.sleep(0)

launch._run(App())
gc.collect()
time.sleep(0.2)  # the farewell takes longer
"""
# It goes on for ever; killed, it takes a moment to give its memory back, as an engine does.
ENDLESS = """
import os, pathlib, sys, time
memory = b"x" * (1 << 28)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["cancelled", "as it is"])
@pytest.mark.parametrize("what", ["talk", "ask"])
def test_an_engine_that_still_runs_is_ended_without_a_word(
    tmp_path: Path, what: str, how: str
) -> None:
    told = tmp_path / "pid"
    told.touch()
    command = [sys.executable, "-c", LEFT, ENDLESS, str(told), what, how]
    left = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (left.returncode, left.stdout, left.stderr) == (0, "", "")
    assert not psutil.pid_exists(int(told.read_text()))
