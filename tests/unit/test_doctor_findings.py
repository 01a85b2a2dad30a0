"""What the doctor makes of machines that are not here: each finding, its numbers and its cure."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.commands.doctor.examine import LEVELS, findings, ranked
from fluxtrain.events.answers.machine import (
    Disk,
    Finding,
    Gpu,
    GpuProcess,
    Machine,
    ProbeAnswer,
    Rate,
)
from fluxtrain.measure.probe.bandwidth import BUS_RATES
from fluxtrain.units import GIB

SOUND_RATES = {
    "h2d_pinned": 25e9, "d2h_pinned": 26e9, "h2d_both_ways": 22e9, "d2h_both_ways": 22e9,
    "h2d_pageable": 6e9, "d2h_pageable": 6e9, "gpu_matmul": 150e12, "pin": 2e9,
    "host_copy": 20e9, "adamw": 1.4e9, "cpu_matmul": 1e12, "disk_write": 2e9, "disk_read": 3e9,
}  # fmt: skip


def card(**facts: Any) -> Gpu:
    sound: dict[str, Any] = {
        "index": 0, "name": "NVIDIA GeForce RTX 4090", "uuid": "GPU-1",
        "memory_total_bytes": 24 * GIB, "memory_free_bytes": 24 * GIB, "other_processes": (),
        "compute_capability": "8.9", "bf16": True, "pcie_generation": 4, "pcie_width": 16,
        "pcie_card_generation": 4, "pcie_card_width": 16, "power_limit_w": 450.0,
        "power_default_w": 450.0, "numa_node": 0,
    }  # fmt: skip
    return Gpu(**(sound | facts))


def host(**facts: Any) -> Machine:
    sound: dict[str, Any] = {
        "cores": 16, "cpu_quota": None, "cpu_name": "A CPU", "instruction_set": "avx512",
        "memory_total_bytes": 128 * GIB, "memory_available_bytes": 120 * GIB,
        "memory_limit_bytes": None, "gpus": (card(),), "driver": "580.65", "cores_installed": 16,
        "memory_installed_bytes": 128 * GIB, "huge_pages": "madvise", "numa_nodes": 1, "wsl": False,
        "power_mode": "performance",
    }  # fmt: skip
    return Machine(**(sound | facts))


def storage(**facts: Any) -> Disk:
    sound: dict[str, Any] = {
        "path": "runs", "total_bytes": 2000 * GIB, "free_bytes": 900 * GIB, "file_system": "ext4",
        "in_memory": False, "on_network": False,
    }  # fmt: skip
    return Disk(**(sound | facts))


def probe_of(
    machine: Machine | None = None, disk: Disk | None = None, **rates: float | None
) -> ProbeAnswer:
    measured = {
        name: Rate(per_s, "timed" if per_s else "not measured: why")
        for name, per_s in (SOUND_RATES | rates).items()
    }
    return ProbeAnswer(
        machine=machine or host(),
        disk=disk or storage(),
        rates=measured,
        measured_at_s=time.time(),
        measuring_s=5.0,
    )


def found(probe: ProbeAnswer) -> dict[str, Finding]:
    by_name = {one.name: one for one in findings(probe)}
    assert all(one.numbers and one.cure and one.factor >= 1 for one in by_name.values())
    return by_name


def only(probe: ProbeAnswer) -> Finding:
    (name,) = found(probe)
    return found(probe)[name]


def test_nothing_is_found_on_a_sound_machine() -> None:
    assert findings(probe_of()) == ()


@pytest.mark.parametrize(
    ("facts", "measured", "factor"),
    [
        ({"pcie_width": 4}, 6.5e9, 4.0),
        ({"pcie_generation": 3}, 12.5e9, 2.0),
        ({"pcie_generation": 3, "pcie_width": 8}, None, 4.0),
    ],
)
def test_a_slot_that_is_narrower_than_the_card_costs_what_the_link_says(
    facts: dict[str, int], measured: float | None, factor: float
) -> None:
    machine = host(gpus=(card(**facts),))
    slot = found(probe_of(machine, h2d_pinned=measured))["slot"]
    assert slot.factor == pytest.approx(factor, rel=0.01)
    assert "PCIe 4 x16" in slot.numbers
    assert "riser" in slot.cure


def test_memory_that_cuda_does_not_lock_is_found_with_every_cure() -> None:
    refused = probe_of(host(wsl=True), pin=None)
    pageable = found(refused)["pageable memory"]
    assert pageable.factor == pytest.approx(25 / 6)
    assert "6.00 GB/s instead of 25.0 GB/s" in pageable.numbers
    for cure in ("ulimit -l unlimited", "--ulimit memlock=-1", ".wslconfig"):
        assert cure in pageable.cure
    assert ".wslconfig" not in found(probe_of(pin=None))["pageable memory"].cure


def test_a_gpu_that_torch_cannot_use_comes_first_and_alone() -> None:
    nothing = dict.fromkeys((*BUS_RATES, "gpu_matmul", "pin"))
    first, *others = findings(probe_of(host(power_saving=("on battery",)), **nothing))
    assert (first.name, first.level) == ("GPU not usable", "broken")
    assert "RTX 4090, driver 580.65" in first.numbers
    assert [one.name for one in others] == ["power mode"]


def test_memory_of_a_card_that_others_hold_is_found() -> None:
    other = (GpuProcess(pid=7, used_bytes=None),)
    busy = host(gpus=(card(memory_free_bytes=20 * GIB, other_processes=other),))
    shared = only(probe_of(busy))
    assert shared.numbers == "1 other program holds 4.00 GiB of 24.0 GiB"
    assert shared.factor == pytest.approx(1.2)
    quiet = host(gpus=(card(memory_free_bytes=23 * GIB),))
    assert findings(probe_of(quiet)) == ()


@pytest.mark.parametrize(
    ("facts", "name", "words"),
    [
        ({"cores": 2, "cpu_quota": 2.5}, "cores", ("2 of 16", "quota 2.5", "OMP_NUM_THREADS=2")),
        ({"cores": 4}, "cores", ("4 of 16 cores",)),
        ({"threads_wished": 1}, "threads", ("OMP_NUM_THREADS=1 on 16", "714 ms a step", "unset")),
        ({"instruction_set": "scalar"}, "instruction set", ("no vector", "FLUXTRAIN_ISA")),
        ({"huge_pages": "never"}, "huge pages", ("are off", "madvise")),
        ({"power_saving": ("the governor is powersave",)}, "power mode", ("powersave", "cpupower")),
        ({"numa_nodes": 2}, "NUMA", ("2 nodes", "--cpunodebind=0")),
        ({"wsl": True}, "WSL2", ("128 GiB", ".wslconfig")),
        (
            {"memory_limit_bytes": 32 * GIB, "memory_total_bytes": 32 * GIB,
             "memory_available_bytes": 30 * GIB},
            "memory limit", ("32.0 GiB of 128 GiB", "MemoryMax", "docker run --memory"),
        ),
        (
            {"memory_available_bytes": 14 * GIB}, "memory in use",
            ("14.0 GiB of 128 GiB", "1.07 B parameters", "close other programs"),
        ),
    ],
)  # fmt: skip
def test_each_limit_of_the_host_is_found_with_its_numbers_and_its_cure(
    facts: dict[str, Any], name: str, words: tuple[str, ...]
) -> None:
    finding = only(probe_of(host(**facts)))
    assert finding.name == name
    for word in words:
        assert word in f"{finding.numbers} {finding.cure}"


@pytest.mark.parametrize(
    ("facts", "write", "names"),
    [
        ({"file_system": "tmpfs", "in_memory": True}, 9e9, ["runs in memory"]),
        ({"file_system": "nfs4", "on_network": True}, 1e9, ["disk"]),
        ({}, 0.12e9, ["disk"]),
        ({}, None, []),
        ({"free_bytes": 10 * GIB}, 2e9, ["disk space"]),
        ({"file_system": None, "in_memory": None, "on_network": None}, 2e9, []),
    ],
)
def test_the_disk_of_the_runs_is_judged(
    facts: dict[str, Any], write: float | None, names: list[str]
) -> None:
    probe = probe_of(disk=storage(**facts), disk_write=write)
    assert list(found(probe)) == names


def test_findings_are_ranked_by_what_there_is_to_gain() -> None:
    machine = host(
        cores=4, threads_wished=3, power_saving=("on battery",), wsl=True,
        memory_available_bytes=16 * GIB, gpus=(card(pcie_width=4),),
    )  # fmt: skip
    order = findings(probe_of(machine, h2d_pinned=6.5e9))
    keys = [(LEVELS.index(one.level), -one.factor) for one in order]
    assert keys == sorted(keys)
    assert [one.name for one in order][-1] == "WSL2"
    assert {order[0].name, order[1].name} == {"cores", "slot"}
    assert ranked(list(reversed(order)))[-1] == order[-1]


def test_a_probe_in_which_nothing_is_known_breaks_no_finding() -> None:
    bare = Machine(
        cores=1, cpu_quota=None, cpu_name=None, instruction_set="scalar", memory_total_bytes=None,
        memory_available_bytes=None, memory_limit_bytes=None, driver=None,
        gpus=(replace(card(), **{name: None for name in card().__struct_fields__ if name not in
                                 ("index", "unknown")}),),
    )  # fmt: skip
    disk = storage(free_bytes=None, file_system=None, in_memory=None, on_network=None)
    names = dict.fromkeys(SOUND_RATES)
    assert set(found(probe_of(bare, disk, **names))) == {"GPU not usable", "instruction set"}
    assert set(found(probe_of(bare, disk, **(names | {"gpu_matmul": 1e12})))) == {
        "pageable memory", "instruction set",
    }  # fmt: skip
