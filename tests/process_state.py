"""What one test could spoil for the next one of its process."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD,
           signal.SIGTSTP, signal.SIGWINCH)  # fmt: skip

# pytest's, what torch's compiler tells Triton where it lies, once, what accelerate sets while it
# looks for a GPU, which stays where two threads do that at a time, and what liger is imported with
SET_BY_LIBRARIES = ("PYTEST_CURRENT_TEST", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH",
                    "PYTORCH_NVML_BASED_CUDA_CHECK", "TRITON_CACHE_AUTOTUNING",
                    "LIGER_FUSED_MOE_AUTOTUNE")  # fmt: skip


def process_state() -> dict[str, Any]:
    """What one test could spoil for another, by its name; to read it takes some 20 us."""
    state: dict[str, Any] = {
        "os.environ": os.environ.copy(),
        "the working directory": os.getcwd(),
        "signal handlers": [signal.getsignal(number) for number in SIGNALS],
        "sys.excepthook": sys.excepthook,
    }
    for name in SET_BY_LIBRARIES:
        state["os.environ"].pop(name, None)
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):  # imported to its end
        state["torch's default dtype"] = torch.get_default_dtype()
        state["torch's threads"] = torch.get_num_threads()
        state["torch's deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
        state["torch's gradients"] = torch.is_grad_enabled()
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs, in words; what was not there before, torch's settings, is no change."""
    told = [name for name, value in before.items() if value != after[name]]
    if "os.environ" in told:
        one, other = before["os.environ"].items(), after["os.environ"].items()
        told.append(f"in os.environ {sorted(dict(one ^ other))}")
    return told
