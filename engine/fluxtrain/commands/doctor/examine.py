"""Probe, judge and test this machine: all that `fluxtrain doctor` does."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import get_args

import fluxtrain
from fluxtrain.commands.doctor.card_findings import card_findings, several_cards_findings
from fluxtrain.commands.doctor.host_findings import host_findings
from fluxtrain.core.ranks.cores import cores_of, numa_nodes, threads_of
from fluxtrain.events.answers.machine import (
    DoctorAnswer,
    Finding,
    Level,
    Machine,
    ProbeAnswer,
    RankCores,
)
from fluxtrain.measure.probe.probe import probe

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "textual")


def versions(machine: Machine, cuda: str | None) -> dict[str, str]:
    """Return versions by name; `cuda` is what torch was built for (None: a CPU build)."""
    found = {"fluxtrain": fluxtrain.__version__, "python": platform.python_version()}
    found |= {name: _package(name) for name in _PACKAGES}
    found["cuda"] = cuda or "none"
    found["driver"] = machine.driver or "none"
    found["os"] = f"{_system()}, Linux {platform.release()}" + (" (WSL2)" if machine.wsl else "")
    found["cpu"] = machine.cpu_name or "unknown"
    return found


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


LEVELS: tuple[Level, ...] = get_args(Level)


def findings(probe: ProbeAnswer) -> tuple[Finding, ...]:
    """Return the findings, with cures, that slow a machine of this class, the most useful first."""
    return ranked([*card_findings(probe), *several_cards_findings(probe), *host_findings(probe)])


def ranked(found: list[Finding]) -> tuple[Finding, ...]:
    """Sort by level, broken things first, then by possible gain."""
    return tuple(sorted(found, key=lambda one: (LEVELS.index(one.level), -one.factor)))


def examine(
    run_dir: Path, *, fresh: bool = False, say: Callable[[str], None] = lambda _: None
) -> DoctorAnswer:
    """Report on this machine and on the disk that holds `run_dir`; `say` gets the progress."""
    with _one_order_of_sums():
        measured = probe(run_dir, fresh=fresh, report=say)
        say("starting the engine")
        import torch

        from fluxtrain.commands.doctor.self_test import self_tests
        from fluxtrain.models.quiet import quiet_transformers

        folder = next(one for one in (run_dir, *run_dir.absolute().parents) if one.is_dir())
        with quiet_transformers():
            tests = self_tests(folder, say)
    return DoctorAnswer(
        probe=measured,
        findings=findings(measured),
        self_tests=tests,
        versions=versions(measured.machine, torch.version.cuda),
        ranks=tuple(ranks_of(len(measured.machine.gpus), os.environ)),
    )


def ranks_of(gpus: int, environment: Mapping[str, str]) -> Iterator[RankCores]:
    """Yield what each process of this machine computes with: those of a launcher, or one a card."""
    from fluxtrain.core.adamw.kernels import threads_beside_gpu

    told = environment.get("LOCAL_WORLD_SIZE", "")
    count = max(int(told) if told.isdecimal() else 0, gpus)
    nodes, allowed = numa_nodes(environment), os.sched_getaffinity(0)
    for rank in range(count if count > 1 else 0):
        cores = cores_of(rank, count, nodes, allowed)
        threads = threads_of(len(cores), environment)
        if gpus:
            threads = threads_beside_gpu(threads, threads) or threads
        node = next((at for at, node in enumerate(nodes) if cores[0] in node), 0)
        yield RankCores(cores=tuple(cores), node=node, update_threads=threads)


@contextmanager
def _one_order_of_sums() -> Iterator[None]:
    """Make cuBLAS add in one order, or two equal runs on a GPU may differ.

    cuBLAS reads the variable when it first computes.
    """
    name = "CUBLAS_WORKSPACE_CONFIG"
    before = os.environ.get(name)
    os.environ.setdefault(name, ":4096:8")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
