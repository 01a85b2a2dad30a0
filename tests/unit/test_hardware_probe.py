"""A probe measures once, says what it does, and never keeps anybody waiting for long."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from fluxtrain import _native
from fluxtrain.errors import FluxTrainError
from fluxtrain.events.answers.machine import Gpu, GpuProcess, Rate
from fluxtrain.machine.gpu import Gpus
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.probe import disk_rate
from fluxtrain.measure.probe import probe as probing
from fluxtrain.measure.probe.adamw_rate import PARAMETER_BYTES, PARAMETERS, adamw_rate
from fluxtrain.measure.probe.bandwidth import BUS_RATES
from fluxtrain.measure.probe.disk_rate import disk_rates
from fluxtrain.measure.probe.probe import probe, sustained_threads
from fluxtrain.measure.probe.table import (
    age_text,
    machine_rows,
    probe_rows,
)
from fluxtrain.units import GIB, MIB


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements that only count their calls; a cache of the test's own."""
    calls: list[str] = []

    def measure(name: str, rate: float) -> Rate:
        calls.append(name)
        return Rate(rate, f"{name} timed")

    def rate_of_adamw(_: object, threads: int | None, eight_bit: bool = False) -> Rate:
        return measure("adamw_8bit", 7e9) if eight_bit else measure("adamw", 4.5e9)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "others_share", lambda _: None)  # of the machine of the tests
    monkeypatch.setattr(
        "fluxtrain.machine.machine.read_gpus",
        lambda: Gpus(gpus=(), driver=None, reason="none here"),
    )
    monkeypatch.setattr(probing, "host_copy_rate", lambda *_, threads: measure("copy", 71e9))
    monkeypatch.setattr(probing, "adamw_rate", rate_of_adamw)
    monkeypatch.setattr(probing, "matmul_rate", lambda device, threads: measure(device, 1.5e12))
    monkeypatch.setattr(
        probing, "disk_rates", lambda folder: (measure("write", 2e9), Rate(None, "too small"))
    )
    return calls


def test_rates_are_measured_once_and_then_come_from_the_cache(
    counted: list[str], tmp_path: Path
) -> None:
    said: list[str] = []
    first = probe(tmp_path / "runs" / "x", report=said.append)
    assert counted == ["copy", "adamw", "adamw_8bit", "cpu", "write"]
    assert said == [
        "reading the machine",
        *(f"measuring {what}" for what in ("host memory", "AdamW", "CPU arithmetic", "disk")),
    ]
    second = probe(tmp_path)
    assert len(counted) == 5
    assert second.from_cache and not first.from_cache
    assert second.rates == first.rates
    assert second.rate("host_copy") == 71e9
    assert second.rate("disk_read") is second.rate("nonsense") is None
    probe(tmp_path, fresh=True)
    assert len(counted) == 10


def test_rates_taken_beside_other_programs_say_so_and_are_taken_again_when_those_are_gone(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "others_share", lambda _: 0.42)
    first = probe(tmp_path)
    assert "other programs used 42% of the processors" in age_text(first)
    monkeypatch.setattr(probing, "is_calm_after", lambda share: False)
    assert probe(tmp_path).from_cache
    assert len(counted) == 5
    monkeypatch.setattr(probing, "is_calm_after", lambda share: share == 0.42)
    monkeypatch.setattr(probing, "others_share", lambda _: 0.0)
    again = probe(tmp_path)
    assert not again.from_cache
    assert len(counted) == 10
    assert "other programs" not in age_text(again)
    assert probe(tmp_path).from_cache


@pytest.mark.parametrize(("age_days", "is_used"), [(6, True), (8, False), (-1, False)])
def test_old_rates_and_rates_of_a_wrong_clock_are_not_used(
    counted: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    age_days: int,
    is_used: bool,
) -> None:
    monkeypatch.setattr(probing, "FAILED_AGE_S", float("inf"))  # one of the rates has failed
    probe(tmp_path)
    (kept,) = (tmp_path / "cache" / "fluxtrain").iterdir()
    content = json.loads(kept.read_bytes())
    content["probe"]["measured_at_s"] = time.time() - age_days * 86_400
    kept.write_text(json.dumps(content))
    probe(tmp_path)
    assert counted.count("copy") == (1 if is_used else 2)


@pytest.mark.parametrize("changed", ["OMP_NUM_THREADS", "FLUXTRAIN_ISA", "torch"])
def test_rates_of_other_threads_instructions_or_another_torch_are_not_used(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("FLUXTRAIN_ISA", "scalar")
    probe(tmp_path)
    with monkeypatch.context() as other:
        if changed == "torch":
            other.setattr(probing.metadata, "version", lambda _: "2.99.0+cu999")
        else:
            other.delenv(changed)
        if changed != "FLUXTRAIN_ISA" or read_machine().instruction_set != "scalar":
            assert not probe(tmp_path).from_cache
            assert probe(tmp_path).from_cache
    assert probe(tmp_path).from_cache


def test_a_measurement_that_fails_leaves_its_reason_and_the_others_run(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Rate:
        raise RuntimeError("no such device\nand a long story")

    monkeypatch.setattr(probing, "host_copy_rate", broken)
    found = probe(tmp_path)
    assert found.rates["host_copy"] == Rate(None, "not measured: no such device")
    assert counted == ["adamw", "adamw_8bit", "cpu", "write"]
    assert probe(tmp_path).from_cache, "so soon the measurement would fail again"
    monkeypatch.setattr(probing, "FAILED_AGE_S", -1.0)
    monkeypatch.setattr(probing, "host_copy_rate", lambda *_, **__: Rate(71e9, "timed"))
    assert probe(tmp_path).rate("host_copy") == 71e9


def test_after_the_time_is_up_the_rest_is_left_out_and_said(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "LAST_START_S", -1.0)
    found = probe(tmp_path)
    assert counted == []
    late = {name for name, rate in found.rates.items() if "20 s were used up" in rate.how}
    assert late == {"host_copy", "adamw", "adamw_8bit", "cpu_matmul", "disk_write", "disk_read"}
    monkeypatch.undo()
    assert list((tmp_path / "cache").glob("*/*")) == [], "an unfinished probe is not kept"


def test_every_rate_that_needs_a_gpu_says_that_there_is_none(
    counted: list[str], tmp_path: Path
) -> None:
    found = probe(tmp_path)
    for name in (*BUS_RATES, "gpu_matmul", "pin"):
        assert found.rates[name] == Rate(None, "not measured: none here")
    rows = [row for row in probe_rows(found) if row[0].startswith("h2d pinned")]
    assert rows == [("h2d pinned and 7 more", "-", "not measured: none here")]
    assert counted


def test_the_table_shows_a_card_with_its_slot_its_power_and_its_users() -> None:
    gpu = Gpu(
        index=0, name="NVIDIA Card", uuid="GPU-1", memory_total_bytes=24 * GIB,
        memory_free_bytes=20 * GIB, other_processes=(GpuProcess(pid=7, used_bytes=GIB),),
        compute_capability="8.9", bf16=True, pcie_generation=3, pcie_width=4,
        pcie_card_generation=4, pcie_card_width=16, power_limit_w=300.0, power_default_w=450.0,
    )  # fmt: skip
    machine = replace(read_machine(), gpus=(gpu,), driver="580", memory_limit_bytes=8 * GIB)
    shown = {what: (value, how) for what, value, how in machine_rows(machine)}
    assert shown["GPU 0"] == ("24.0 GiB", "NVIDIA Card, driver 580")
    assert shown["GPU 0 free"] == ("20.0 GiB", "1 other program uses it")
    assert shown["GPU 0 capability"] == ("8.9", "bf16")
    assert shown["GPU 0 link"] == ("PCIe 3 x4", "the card can do PCIe 4 x16")
    assert shown["GPU 0 power"] == ("300 W", "sold with 450 W")
    assert "installed" in shown["host memory"][1]


@pytest.mark.parametrize(
    ("quota", "wished", "threads"),
    [(None, None, None), (None, 1, None), (2.5, None, 2), (2.5, 1, 1), (2.5, 8, 2)],
)
def test_under_a_quota_rates_are_measured_with_the_threads_that_it_keeps_running(
    quota: float | None, wished: int | None, threads: int | None
) -> None:
    machine = replace(read_machine(), cores=2, cpu_quota=quota, threads_wished=wished)
    assert sustained_threads(machine) == threads


@pytest.mark.parametrize("eight_bit", [False, True])
def test_the_native_adamw_is_timed_on_more_than_the_caches_hold(*, eight_bit: bool) -> None:
    rate = adamw_rate(parameters=2 << 20, limit_s=0.2, eight_bit=eight_bit)
    assert rate.per_s is not None and 1e6 < rate.per_s < 1e12
    assert rate.how.startswith("2 M parameters")
    assert PARAMETERS * PARAMETER_BYTES > 256 * MIB


def test_a_native_library_that_does_not_load_is_told_and_not_the_memory_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        raise FluxTrainError("it does not load: run `make native`")

    monkeypatch.setattr(_native, "kernel", broken)
    with pytest.raises(FluxTrainError, match="run `make native`"):
        adamw_rate(parameters=2 << 20, limit_s=0.2)


def test_a_disk_is_measured_with_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    write, read = disk_rates(tmp_path, sample_bytes=32 * MIB)
    for rate in (write, read):
        assert rate.per_s is not None and rate.per_s > 1e6
        assert "32.0 MiB" in rate.how
    assert list(tmp_path.iterdir()) == []


def test_a_nearly_full_or_forbidden_disk_is_not_measured_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_rate, "free_bytes", lambda folder: 100 * MIB)
    write, read = disk_rates(tmp_path)
    assert write == read
    assert write.per_s is None and "100 MiB is free" in write.how
    monkeypatch.undo()
    gone, _ = disk_rates(tmp_path / "gone")
    assert gone.per_s is None and "No such file" in gone.how
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_it_is_measured_says_so_and_is_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, calls = os.pwrite, []

    def fills_up(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if offset > 0:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fills_up)
    write, _ = disk_rates(tmp_path, sample_bytes=32 * MIB)
    assert write.per_s is None and "No space left on device after 8.00 MiB" in write.how
    assert len(calls) >= 2
    assert list(tmp_path.iterdir()) == []
