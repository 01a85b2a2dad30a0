"""The self-tests pass on this machine, and notice a single wrong bit."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from fluxtrain.commands.doctor import examine as examine_module
from fluxtrain.commands.doctor import self_test
from fluxtrain.commands.doctor.examine import examine
from fluxtrain.commands.doctor.self_test import (
    Mismatch,
    check_checkpoint,
    check_kernels,
    check_streaming,
    run_check,
    self_tests,
)
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate
from fluxtrain.core.adamw.kernels import Backend
from fluxtrain.events.answers.machine import DoctorAnswer, ProbeAnswer, SelfTest
from fluxtrain.machine.disk import read_disk
from fluxtrain.machine.machine import read_machine
from tests.engine import forked


def flip(tensor: Tensor) -> None:
    """Change the lowest bit of the first value."""
    bits = tensor.detach().reshape(-1).view(torch.uint8)
    bits[0] ^= 1


def test_all_pass_here_and_leave_the_process_as_it_was(tmp_path: Path) -> None:
    said: list[str] = []
    random = torch.get_rng_state()
    found = {test.name: test for test in self_tests(tmp_path, said.append)}
    assert len(found) == 4
    for name, test in found.items():
        expected = None if name.endswith("cuda") and not torch.cuda.is_available() else True
        assert test.passed is expected, test
        assert f"testing {name}" in said or expected is None
    assert list(tmp_path.iterdir()) == [], "nothing stays on the disk"
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("set_by_user", [None, ":16:8"])
def test_cublas_sums_in_one_order_while_the_machine_is_examined_and_not_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by_user: str | None
) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.delenv(name, raising=False)
    if set_by_user is not None:
        monkeypatch.setenv(name, set_by_user)
    measured = ProbeAnswer(
        machine=read_machine(),
        disk=read_disk(tmp_path),
        rates={},
        measured_at_s=0.0,
        measuring_s=0.0,
    )
    meanwhile: list[str | None] = []

    def tests(*_: object) -> tuple[SelfTest, ...]:
        meanwhile.append(os.environ.get(name))
        return ()

    monkeypatch.setattr(examine_module, "probe", lambda *_, **__: measured)
    monkeypatch.setattr(self_test, "self_tests", tests)
    assert examine(tmp_path).probe is measured
    assert meanwhile == [set_by_user or ":4096:8"]
    assert os.environ.get(name) == set_by_user


def test_one_wrong_bit_of_a_native_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_test.step_

    def wrong(flat: Flat, update: AdamWUpdate, *, backend: Backend) -> None:
        right(flat, update, backend=backend)
        if backend == "native":
            flip(flat.m)

    monkeypatch.setattr(self_test, "step_", wrong)
    with pytest.raises(Mismatch, match="values of m differ"):
        check_kernels()


def test_a_streamed_weight_that_is_off_by_one_bit_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = self_test.wrap

    def wrong(model: nn.Module, *, offload: str, **options: Any) -> nn.Module:
        if offload == "max":
            flip(next(model.parameters()).data)
        return right(model, offload=offload, **options)

    monkeypatch.setattr(self_test, "wrap", wrong)
    with pytest.raises(Mismatch, match="differ"):
        check_streaming("cpu")


@pytest.mark.parametrize("key", ["weight_bits", "lo", "m", "v"])
def test_a_checkpoint_that_comes_back_otherwise_is_found(
    key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right: Callable[[Path], dict[str, Tensor]] = self_test.read_tensors

    def wrong(path: Path) -> dict[str, Tensor]:
        tensors = {name: tensor.clone() for name, tensor in right(path).items()}
        flip(next(tensor for name, tensor in tensors.items() if name.endswith(f".{key}")))
        return tensors

    monkeypatch.setattr(self_test, "read_tensors", wrong)
    with pytest.raises(Mismatch, match=f"values of .*{key} differ"):
        check_checkpoint(tmp_path)


def test_a_disk_that_gives_back_other_bytes_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = self_test.write_tensors

    def wrong(path: Path, tensors: dict[str, Tensor]) -> Any:
        written = right(path, tensors)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return written

    monkeypatch.setattr(self_test, "write_tensors", wrong)
    with pytest.raises(Mismatch, match="the disk gave back other bytes"):
        check_checkpoint(tmp_path)


def test_a_disk_that_cannot_be_written_is_no_fault_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, tensors: dict[str, Tensor]) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(self_test, "write_tensors", full)
    told = run_check("checkpoint", lambda: check_checkpoint(tmp_path))
    assert told.passed is None
    assert "free some space" in told.detail and "set FLUXTRAIN_RUNS" in told.detail
    assert not list(tmp_path.iterdir())


def test_a_check_that_breaks_has_failed_in_its_own_words() -> None:
    def breaks() -> str:
        raise RuntimeError("no kernel image\nand a long story")

    told = run_check("x", breaks)
    assert (told.passed, told.detail) == (False, "RuntimeError: no kernel image")


BREAK = """
import sys
from fluxtrain.cli import main
from fluxtrain.commands.doctor import self_test
from fluxtrain.measure.probe import probe
def wrong(folder):
    raise self_test.Mismatch("3 of 9 values differ")
if "break" in sys.argv:
    self_test.check_checkpoint = wrong
    probe.is_calm_after = lambda share: False  # the rates are those of the run before
main([one for one in sys.argv[1:] if one != "break"])
"""


def doctor(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = {"XDG_CACHE_HOME": str(folder / "cache"), "FLUXTRAIN_RUNS": str(folder / "runs")}
    return forked.python("-c", BREAK, "doctor", *arguments, environment=places, folder=folder)


@pytest.mark.slow
def test_the_command_ends_with_0_when_all_pass_and_with_1_when_one_fails(tmp_path: Path) -> None:
    sound = doctor(tmp_path, "--json")
    assert sound.returncode == 0, sound.stderr
    assert sound.stderr == ""
    report = msgspec.json.decode(sound.stdout, type=DoctorAnswer)
    assert not report.failed and not report.probe.from_cache
    broken = doctor(tmp_path, "break")
    assert broken.returncode == 1
    assert re.search(r"rates +measured", broken.stdout)
    assert "FAIL  checkpoint: 3 of 9 values differ" in broken.stdout
    assert broken.stderr.splitlines()[-1].startswith("error: self-tests failed: checkpoint")
