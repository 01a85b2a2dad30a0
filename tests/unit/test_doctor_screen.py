"""The doctor's screen: all that was found, in 80 columns."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.commands.doctor.examine import findings, ranks_of, versions
from fluxtrain.commands.doctor.screen import screen
from fluxtrain.events.answers.machine import (
    Disk,
    DoctorAnswer,
    Gpu,
    Machine,
    ProbeAnswer,
    Rate,
    SelfTest,
)
from fluxtrain.units import GIB

CARD = Gpu(
    index=0, name="NVIDIA GeForce RTX 4090", uuid="GPU-1", memory_total_bytes=24 * GIB,
    memory_free_bytes=23 * GIB, other_processes=(), compute_capability="8.9", bf16=True,
    pcie_generation=4, pcie_width=16, pcie_card_generation=4, pcie_card_width=16,
)  # fmt: skip
BASE = Machine(
    cores=2, cpu_quota=None, cpu_name="A CPU", instruction_set="avx2", memory_total_bytes=8 * GIB,
    memory_available_bytes=7 * GIB, memory_limit_bytes=None, gpus=(), driver=None,
    cores_installed=2, memory_installed_bytes=8 * GIB, huge_pages="madvise", numa_nodes=1,
    unknown={"gpus": "NVML Shared Library Not Found"},
)  # fmt: skip
RATES = {
    "h2d_pinned": 25e9, "d2h_pinned": 26e9, "h2d_both_ways": 22e9, "d2h_both_ways": 21e9,
    "h2d_pageable": 6e9, "d2h_pageable": 5e9, "gpu_matmul": 150e12, "pin": 2e9,
    "host_copy": 9e9, "adamw": 0.4e9, "cpu_matmul": 60e9, "disk_write": 2e9, "disk_read": 3e9,
}  # fmt: skip
TESTS = (
    SelfTest(name="native kernels", passed=True, detail="avx2 equal scalar in 1,200,038 values"),
    SelfTest(name="streaming on cuda", passed=None, detail="torch has no GPU to use"),
)


def report_of(*tests: SelfTest, from_cache: bool = False, **facts: Any) -> DoctorAnswer:
    machine = replace(BASE, **facts)
    disk = Disk(path="runs", total_bytes=GIB, free_bytes=90 * GIB, file_system="ext4",
                in_memory=False, on_network=False)  # fmt: skip
    probe = ProbeAnswer(
        machine=machine,
        disk=disk,
        rates={name: Rate(rate, "timed") for name, rate in RATES.items()},
        measured_at_s=time.time(),
        measuring_s=5.0,
        from_cache=from_cache,
    )
    return DoctorAnswer(
        probe=probe,
        findings=findings(probe),
        self_tests=tests or TESTS,
        versions=versions(machine, None),
    )


def test_a_sound_machine_fits_a_small_terminal_and_is_told_so() -> None:
    lines = screen(report_of(gpus=(CARD,), driver="580")).splitlines()
    assert lines[0] == "fluxtrain doctor: 1 of 1 self-tests pass, nothing to change"
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 80


def test_however_much_is_found_no_line_is_wider_than_a_terminal() -> None:
    report = report_of(
        SelfTest(name="checkpoint", passed=False, detail="x " * 200),
        gpus=(replace(CARD, pcie_width=1, memory_free_bytes=GIB, bf16=False),),
        cores_installed=64, threads_wished=1, huge_pages="never", numa_nodes=2, wsl=True,
        power_saving=("the frequency governor is powersave", "the machine runs on battery"),
        memory_limit_bytes=8 * GIB, memory_installed_bytes=64 * GIB, memory_available_bytes=GIB,
    )  # fmt: skip
    text = screen(report)
    assert len(report.findings) >= 10
    assert max(len(line) for line in text.splitlines()) <= 80
    positions = [text.index(f"{number:2}  {one.name}") for number, one
                 in enumerate(report.findings, start=1)]  # fmt: skip
    assert positions == sorted(positions)


def test_cores_and_threads_of_each_process_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    nodes = [[0, 1, 2, 3, *range(8, 20)]]
    monkeypatch.setattr("fluxtrain.commands.doctor.examine.numa_nodes", lambda _: nodes)
    told = {"OMP_NUM_THREADS": "1", "CONTROLLER_CORES_PER_RANK": "1"}
    assert not list(ranks_of(1, told)), "one process has all"
    found = tuple(ranks_of(2, told))
    lines = screen(replace(report_of(), ranks=found)).splitlines()
    assert "rank 0    cores 0-3,8-9 of NUMA node 0, 4 update threads" in lines
    assert "rank 1    cores 10-15 of NUMA node 0, 4 update threads" in lines
    launched = list(ranks_of(0, told | {"LOCAL_WORLD_SIZE": "4"}))
    assert [len(one.cores) for one in launched] == [3] * 4


def test_a_failed_self_test_is_counted_and_shown_as_failed() -> None:
    broken = SelfTest(name="checkpoint", passed=False, detail="3 of 9 values differ")
    report = report_of(*TESTS, broken)
    assert report.failed == (broken,)
    text = screen(report)
    assert "1 of 2 self-tests pass" in text
    assert "FAIL  checkpoint: 3 of 9 values differ" in text


def test_the_versions_are_those_of_a_bug_report_and_name_no_host() -> None:
    told = versions(replace(BASE, wsl=True), "13.0")
    assert {"fluxtrain", "python", "torch", "transformers", "cuda", "driver", "os", "cpu"} <= set(
        told
    )
    assert (told["cuda"], told["driver"]) == ("13.0", "none")
    assert "WSL2" in told["os"]
    assert all(told.values()) and "missing" not in told.values()
    words = screen(report_of()).replace(",", " ").replace(":", " ").split()
    assert os.uname().nodename not in words
