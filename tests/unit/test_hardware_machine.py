"""Facts about the machine, read from trees as containers, clouds and laptops show them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.machine.cgroup import CgroupLimits, cgroup_limits
from fluxtrain.machine.disk import read_disk
from fluxtrain.machine.gpu import Gpus
from fluxtrain.machine.machine import read_machine
from fluxtrain.units import GIB

NO_GPU = Gpus(gpus=(), driver=None, reason="no driver")
V1_UNLIMITED = "9223372036854771712"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def v2(path: str, files: Mapping[str, str]) -> dict[str, str]:
    base = {"proc/self/cgroup": f"0::{path}\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory\n"}
    return base | {f"sys/fs/cgroup/{name}": content for name, content in files.items()}


def test_version_2_takes_the_smallest_limit_of_all_enclosing_groups(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": f"{8 * GIB}\n",
        "a/b/memory.current": f"{3 * GIB}\n",
        "a/b/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "a/memory.max": f"{6 * GIB}\n",
        "a/memory.current": f"{1 * GIB}\n",
        "a/b/cpu.max": "max 100000\n",
        "a/cpu.max": "150000 100000\n",
    }
    limits = cgroup_limits(tree(tmp_path, v2("/a/b", files)))
    assert limits == CgroupLimits(6 * GIB, 5 * GIB, 1.5)


def test_version_1_reads_its_own_names_and_knows_its_word_for_unlimited(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n",
            "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": f"{4 * GIB}",
            "sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes": f"{3 * GIB}",
            "sys/fs/cgroup/memory/docker/ab/memory.stat": f"cache 1\ntotal_inactive_file {2 * GIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert cgroup_limits(root) == CgroupLimits(4 * GIB, 3 * GIB, 2.5)


def test_a_path_as_the_host_sees_it_falls_back_to_the_containers_root(tmp_path: Path) -> None:
    files = {"memory.max": f"{2 * GIB}", "memory.current": f"{GIB}"}
    root = tree(tmp_path, v2("/kubepods/pod1/c2", files))
    assert cgroup_limits(root) == CgroupLimits(2 * GIB, GIB, None)
    outside = tree(tmp_path / "other", v2("/../../c2", files))
    assert cgroup_limits(outside).memory_bytes == 2 * GIB


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"


def test_a_container_smaller_than_its_host_is_believed(tmp_path: Path) -> None:
    files = v2("/", {"memory.max": f"{8 * GIB}", "memory.current": f"{7 * GIB}"})
    files["proc/meminfo"] = meminfo(64 * GIB, 50 * GIB)
    files["sys/fs/cgroup/cpu.max"] = "50000 100000"
    machine = read_machine(tree(tmp_path, files), NO_GPU)
    assert machine.memory_total_bytes == machine.memory_limit_bytes == 8 * GIB
    assert machine.memory_available_bytes == GIB
    assert machine.cores == 1  # half a core is still one thread
    assert machine.cpu_quota == 0.5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fma avx2 avx512f avx512bw avx512dq avx512vl", "avx512"),
        ("fma avx2 avx512f", "avx2"),
        ("avx2", "scalar"),
        ("sse2", "scalar"),
    ],
)
def test_an_instruction_set_counts_only_when_it_is_whole(
    tmp_path: Path, flags: str, expected: str
) -> None:
    info = f"processor : 0\nmodel name : A CPU\nflags : {flags}\n\nprocessor : 1\nflags :\n"
    machine = read_machine(tree(tmp_path, {"proc/cpuinfo": info}), NO_GPU)
    assert (machine.instruction_set, machine.cpu_name) == (expected, "A CPU")


def test_an_instruction_set_that_there_is_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUXTRAIN_ISA", "mmx")
    with pytest.raises(BadInput, match="FLUXTRAIN_ISA is 'mmx': use scalar, avx2 or avx512"):
        read_machine(tree(tmp_path, {}), NO_GPU)


def test_the_instruction_set_is_the_one_that_the_native_library_uses() -> None:
    program = (
        "from fluxtrain import _native; from fluxtrain.machine.machine import read_machine; "
        "print(_native.isa(), read_machine().instruction_set)"
    )
    for wish in ("", "scalar", "avx2"):
        environment = {**os.environ, "FLUXTRAIN_ISA": wish}
        said = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        used, told = said.stdout.split()
        assert used == told


def test_reading_the_machine_brings_no_torch() -> None:
    program = (
        "import sys\nfrom fluxtrain.machine import cgroup, disk, gpu, machine\n"
        "from fluxtrain.measure.probe import bandwidth, disk_rate, probe\nmachine.read_machine()\n"
        "assert 'torch' not in sys.modules"
    )
    path = os.pathsep.join(filter(None, sys.path))
    assert (
        os.spawnve(
            os.P_WAIT,
            sys.executable,
            [sys.executable, "-c", program],
            os.environ | {"PYTHONPATH": path},
        )
        == 0
    )


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:20 / {folder} rw - tmpfs none rw
24 22 0:21 / {folder}/net rw shared:2 master:1 - fuse.ceph remote rw
25 22 0:22 / {folder}/with\040space rw - btrfs /dev/sdb rw
26 22 0:23 / {folder}/net/deep rw - nfs4 server:/x rw
27 22 0:24 / {folder}/net/deep rw - xfs /dev/sdc rw
garbage
"""


@pytest.mark.parametrize(
    ("inside", "kind", "in_memory", "on_network"),
    [
        (".", "tmpfs", True, False),
        ("not/yet/there", "tmpfs", True, False),
        ("net/a", "fuse.ceph", False, True),
        ("network", "tmpfs", True, False),
        ("with space/a", "btrfs", False, False),
        ("net/deep", "xfs", False, False),  # the later mount is on top
    ],
)
def test_the_file_system_is_that_of_the_longest_mount_point(
    tmp_path: Path, inside: str, kind: str, in_memory: bool, on_network: bool
) -> None:
    folder = tmp_path / "folder"
    for name in ("net/a", "net/deep", "network", "with space/a"):
        (folder / name).mkdir(parents=True)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(folder=folder))
    disk = read_disk(folder / inside, mounts)
    assert (disk.file_system, disk.in_memory, disk.on_network) == (kind, in_memory, on_network)
    assert disk.free_bytes is not None and disk.total_bytes is not None
    assert disk.free_bytes <= disk.total_bytes
    assert not disk.unknown
