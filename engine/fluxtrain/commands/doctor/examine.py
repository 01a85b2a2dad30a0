"""Probe, judge and test this machine: all that `fluxtrain doctor` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fluxtrain.commands.doctor.findings import findings
from fluxtrain.commands.doctor.versions import versions
from fluxtrain.events.answers.doctor import DoctorAnswer
from fluxtrain.measure.probe.probe import probe


def examine(
    run_dir: Path, *, fresh: bool = False, say: Callable[[str], None] = lambda _: None
) -> DoctorAnswer:
    """Report on this machine and on the disk that holds `run_dir`; `say` is told the progress."""
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
    )


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
