"""Threads of updates end with them where the model computes on the same cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

counts_threads = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="the threads of a process are counted in /proc"
)

KERNELS = """
import os
import threading
import time
import torch
from fluxtrain import _native
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.core.adamw.kernels import step_

def update():
    names = ("weights", "m", "v", "gradient")
    flat = Flat(**{name: torch.zeros(1 << 18) for name in names})
    step_(flat, AdamWUpdate(hyper=Hyper(), step=1), threads=2)

def threads():
    return len(os.listdir("/proc/self/task"))

def work():
    for does in (update, _native.end_threads, update, _native.end_threads):
        does()
        ends_s = time.monotonic() + 5
        while does is _native.end_threads and threads() >= seen[-1] and time.monotonic() < ends_s:
            time.sleep(0.001)  # one that was told to end may still be on its way
        seen.append(threads())

seen = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(*seen)
"""

TRAINING = """
import os
import torch
import fluxtrain
from fluxtrain.core.wrap.engine import engine_of

def computed():
    model(torch.randn(64, 512)).square().mean().backward()
    return len(os.listdir("/proc/self/task"))

blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(4)]
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Sequential(*blocks))
model = fluxtrain.wrap(model, device="cpu", offload="weights", overlap=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
computed()
before = computed()
optimizer.step()  # starts the thread that updates
optimizer.zero_grad()
engine_of(model).flush()
print(computed() - before)
"""


def run_python(code: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


@counts_threads
def test_the_threads_that_serve_a_kernel_end_when_told_and_start_anew() -> None:
    with_them, without, again, at_the_end = run_python(KERNELS)
    assert (with_them, again) == (without + 1, at_the_end + 1)
    assert without == at_the_end


@counts_threads
def test_an_updated_model_computes_beside_no_thread_of_its_update() -> None:
    (more,) = run_python(TRAINING)
    assert more == 1, "the thread that waits for the next update, and none that a kernel keeps"
