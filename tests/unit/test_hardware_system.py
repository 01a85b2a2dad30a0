"""How an operating system is set up, read from trees as laptops, servers and WSL2 show them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from fluxtrain.machine.gpu import Gpus
from fluxtrain.machine.machine import read_machine
from fluxtrain.machine.system import read_system, wished_threads

FREQUENCY = "sys/devices/system/cpu/cpu0/cpufreq"


def tree(root: Path, **files: str) -> Path:
    """Files by path, with `__` for a slash."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def files(**named: str) -> dict[str, str]:
    places = {
        "governor": f"{FREQUENCY}/scaling_governor",
        "driver": f"{FREQUENCY}/scaling_driver",
        "preference": f"{FREQUENCY}/energy_performance_preference",
        "profile": "sys/firmware/acpi/platform_profile",
        "mains": "sys/class/power_supply/AC/online",
        "supply": "sys/class/power_supply/AC/type",
    }
    return {places[name].replace("/", "__"): f"{value}\n" for name, value in named.items()}


@pytest.mark.parametrize(
    ("set_up", "saving"),
    [
        ({"governor": "performance", "driver": "acpi-cpufreq"}, ()),
        (
            {"governor": "powersave", "driver": "acpi-cpufreq"},
            ("the frequency governor is powersave",),
        ),
        (
            {"governor": "powersave", "driver": "intel_pstate", "preference": "performance"},
            (),  # this driver's word for its normal way
        ),
        (
            {"governor": "powersave", "driver": "amd-pstate-epp", "preference": "power"},
            ("the energy preference is power",),
        ),
        (
            {"governor": "schedutil", "profile": "low-power"},
            ("the platform profile is low-power",),
        ),
        ({"supply": "Mains", "mains": "0"}, ("the machine runs on battery",)),
        ({"supply": "Mains", "mains": "1"}, ()),
    ],
)
def test_only_what_slows_the_machine_counts_as_saving(
    tmp_path: Path, set_up: dict[str, str], saving: tuple[str, ...]
) -> None:
    assert read_system(tree(tmp_path, **files(**set_up))).power_saving == saving


def test_an_empty_tree_gives_a_reason_for_every_fact(tmp_path: Path) -> None:
    system = read_system(tmp_path)
    assert set(system.unknown) == {"huge_pages", "numa_nodes", "wsl", "power_mode"}
    for name, reason in system.unknown.items():
        assert getattr(system, name) is None
        assert reason


def test_the_limit_of_page_locks_is_the_process_own() -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lower = 1 << 20
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (lower, before[1]))
    try:
        assert read_system().memlock_limit_bytes == lower
        assert (
            read_machine(gpus=Gpus(gpus=(), driver=None, reason="none")).memlock_limit_bytes
            == lower
        )
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.mark.parametrize(
    ("value", "threads"),
    [(None, None), ("", None), ("4", 4), (" 2,1 ", 2), ("0", None), ("all", None)],
)
def test_the_wished_threads_are_read_as_openmp_reads_them(
    value: str | None, threads: int | None
) -> None:
    assert wished_threads({} if value is None else {"OMP_NUM_THREADS": value}) == threads
