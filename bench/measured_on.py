"""What stands above a table: the machine, the versions, the commands, and what was lacking."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fluxtrain.events.answers.machine import Machine
from fluxtrain.machine.machine import read_machine
from fluxtrain.units import bytes_text, rate_text

PACKAGES = ("transformers", "liger-kernel", "deepspeed")
BUS = ("h2d_pinned", "d2h_pinned")  # of a row's `per_s`
LIGER_IS_MISSING = (
    "liger-kernel is not installed (`make bench-gpu` installs it): loops run torch's own kernels, "
    "and their speeds are not those of the other tables."
)

Row = dict[str, Any]


def has_liger() -> bool:
    """Whether rows can run liger's kernels."""
    return importlib.util.find_spec("liger_kernel") is not None


def machine() -> str:
    """What the table is measured on, and with what."""
    import torch

    card = torch.cuda.get_device_properties(0)
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for name in PACKAGES:
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            versions.append(f"{name} {importlib.metadata.version(name)}")
    today = datetime.now(UTC).date().isoformat()
    gpu = f"{card.name} ({card.total_memory / 2**30:.0f} GiB)"
    return f"{today}. {machine_line(read_machine(), gpu, torch.version.cuda, versions)}"


def machine_line(found: Machine, gpu: str, cuda: str | None, versions: Sequence[str]) -> str:
    """The facts in one line, from those of the machine."""
    facts = [
        gpu,
        f"driver {found.driver or 'unknown'}",
        f"CUDA {cuda or 'unknown'}",
        f"{found.cores} cores ({found.instruction_set}) of {found.cpu_name or 'unknown kind'}",
        f"{bytes_text(found.memory_total_bytes)} of host memory",
    ]
    return f"{', '.join(facts)}. {', '.join(versions)}."


def bus_line(rows: Mapping[str, Row]) -> str:
    """The bus as the first row of FluxTrain that rated it found it; nothing without one."""
    for found in rows.values():
        to_s, from_s = (found.get("per_s", {}).get(name) for name in BUS)
        if to_s and from_s:
            return f"Bus: {rate_text(to_s)} to the GPU, {rate_text(from_s)} back."
    return ""


def without_liger(rows: Mapping[str, Row]) -> str:
    """Which rows ran torch's own kernels, as what comes first; nothing where none did."""
    names = [f"`{name}`" for name, found in rows.items() if found.get("kernels") == "torch"]
    return f"**{LIGER_IS_MISSING}** So ran: {', '.join(names)}." if names else ""


def command(arguments: Sequence[str]) -> str:
    """The command line with these arguments, without the folder's real name."""
    told = list(arguments)
    for at, word in enumerate(told):
        if word == "--out" and at + 1 < len(told):
            told[at + 1] = "DIR"
        elif word.startswith("--out="):
            told[at] = "--out=DIR"
    return shlex.join(["python", "bench/bench_table.py", *told])


def commands(rows: Mapping[str, Row]) -> str:
    """Those that measured the rows, as a block of code; rows of before they were kept have none."""
    lines = dict.fromkeys(found["command"] for found in rows.values() if "command" in found)
    return "\n".join(f"    {line}" for line in lines)
