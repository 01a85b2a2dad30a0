"""A run's budget of device memory holds for all that `nvidia-smi` would show of the process.

Each case has a process of its own, because a cap and a CUDA context stay until its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from fluxtrain.errors import EXIT_DOES_NOT_FIT, DoesNotFit
from fluxtrain.machine.before_torch import NAMES, PAGE_BYTES, SETTING
from fluxtrain.machine.gpu import own_process_bytes
from fluxtrain.train.placing.cards import hold_to_budget
from fluxtrain.units import GIB, MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FILL = """
import json, sys, torch
from fluxtrain.machine.gpu import own_process_bytes
from fluxtrain.train.placing.cards import hold_to_budget
left, held, refused = hold_to_budget(float(sys.argv[1])), [], False
own = own_process_bytes()
context = None if own is None else own - torch.cuda.memory_reserved()
while not refused and len(held) < 4096:
    try:
        held.append(torch.ones(int(sys.argv[2]), dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        refused = True
torch.cuda.synchronize()
free, total = torch.cuda.mem_get_info()
print(json.dumps({"left": left, "refused": refused, "torch": torch.cuda.memory_reserved(),
                  "context": context, "own": own_process_bytes(), "used": total - free}))
"""


def fill(
    budget_gib: float, *, growing: bool = False, piece_bytes: int = 16 * MIB
) -> dict[str, Any]:
    """Allocate until torch refuses, under a budget; `growing`: in segments that grow."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment |= {NAMES[0]: SETTING} if growing else {}
    finished = subprocess.run(
        [sys.executable, "-c", FILL, str(budget_gib), str(piece_bytes)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("budget_gib", [2.0, 4.0])
@pytest.mark.parametrize("piece_mib", [12, 16, 22])  # of pages of 20 MiB
def test_a_process_that_takes_all_it_can_stays_within_its_budget(
    budget_gib: float, growing: bool, piece_mib: int
) -> None:
    found = fill(budget_gib, growing=growing, piece_bytes=piece_mib * MIB)
    assert found["refused"]
    assert found["left"] < budget_gib * GIB
    assert found["torch"] <= found["left"] + (PAGE_BYTES if growing else 0)
    assert found["torch"] > found["left"] - 64 * MIB, "what the budget leaves can be used"
    if found["own"] is not None:
        assert found["torch"] + found["context"] <= budget_gib * GIB
        assert found["own"] <= budget_gib * GIB + 16 * MIB


PIECES = """
import json, torch
from fluxtrain.train.placing.cards import hold_to_budget
MIB = 1 << 20
left, live = hold_to_budget(4.0), []
for _ in range(24):  # what stays, between what comes and goes
    passing = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
    live.append(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda"))
    live.append(passing)
live = live[::2]
free = left - torch.cuda.memory_allocated()
try:
    torch.empty(int(0.8 * free), dtype=torch.uint8, device="cuda")
    print("fits")
except torch.OutOfMemoryError:
    print("in pieces")
"""


def test_segments_that_grow_hold_what_stays_between_what_goes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PIECES],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, NAMES[0]: SETTING},
    )
    assert done.stdout.split() == ["fits"], done.stdout + done.stderr


def test_cudas_own_share_is_counted_once() -> None:
    small, large = fill(2.0), fill(3.0)
    assert large["left"] - small["left"] == pytest.approx(GIB, abs=64 * MIB)


def test_a_budget_that_cuda_itself_uses_up_does_not_fit() -> None:
    with pytest.raises(
        DoesNotFit, match="budget_gib=0.1 leaves nothing .* set at least"
    ) as refused:
        hold_to_budget(0.1)
    assert refused.value.exit_code == EXIT_DOES_NOT_FIT


def test_without_a_budget_nothing_is_capped() -> None:
    assert hold_to_budget(None) is None


def test_the_own_memory_grows_with_what_torch_takes() -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()  # what other tests left would be used again
    before = own_process_bytes()
    if before is None:
        pytest.skip("the driver does not tell this process's memory")
    held = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    after = own_process_bytes()
    assert after is not None
    assert after - before == pytest.approx(held.nbytes, rel=0.05)
