"""Find what holds back the processor, memory and disk. Pure functions of a probe."""

from __future__ import annotations

from collections.abc import Iterator

from fluxtrain.events.answers.machine import Finding, Machine, ProbeAnswer
from fluxtrain.units import bytes_text, count_text, duration_text, rate_text

# One core copies 2.4 to 8 GB/s on sound machines; from four on the memory itself binds, and two
# channels of DDR4 copy at 10 GB/s and more.
COPY_BYTES_PER_S = 2e9
COPYING_CORES = 4
AVAILABLE_SHARE = 0.6
DISK_BYTES_PER_S = 0.3e9  # hard disks and small cloud volumes are below
CHECKPOINT_BYTES = 12e9  # of a model with 1 B parameters, and two are kept


def host_findings(probe: ProbeAnswer) -> Iterator[Finding]:
    """Yield all findings about the host, in no order."""
    yield from _cores(probe)
    yield from _kernels(probe)
    yield from _system(probe)
    yield from _memory(probe)
    yield from _disk(probe)


def _cores(probe: ProbeAnswer) -> Iterator[Finding]:
    machine = probe.machine
    cores, installed, threads = machine.cores, machine.cores_installed, machine.threads_wished
    if installed is not None and cores < installed:
        quota = "" if machine.cpu_quota is None else f" (quota {machine.cpu_quota:g})"
        again = "" if machine.cpu_quota is None else f", or set OMP_NUM_THREADS={cores}"
        yield Finding(
            name="cores",
            level="slow",
            factor=installed / cores,
            numbers=f"this process may use {cores} of {installed} cores{quota}",
            cure="give it more: `docker run --cpus`, CPUQuota= of systemd, `taskset`, the job's "
            f"own limit{again}",
        )
    if threads is not None and threads < cores:
        yield Finding(
            name="threads",
            level="slow",
            factor=cores / threads,
            numbers=f"OMP_NUM_THREADS={threads} on {cores} cores: {_adamw_text(probe)}",
            cure="unset OMP_NUM_THREADS",
        )


def _kernels(probe: ProbeAnswer) -> Iterator[Finding]:
    machine = probe.machine
    if machine.instruction_set == "scalar":
        yield Finding(
            name="instruction set",
            level="slow",
            numbers=f"the optimizer uses no vector instructions: {_adamw_text(probe)}",
            cure="unset FLUXTRAIN_ISA; in a virtual machine pass the host's CPU model through",
        )
    if machine.huge_pages == "never":
        yield Finding(
            name="huge pages",
            level="slow",
            numbers=f"transparent huge pages are off: {_adamw_text(probe)}",
            cure="`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`",
        )


def _system(probe: ProbeAnswer) -> Iterator[Finding]:
    machine = probe.machine
    if machine.power_saving:
        yield Finding(
            name="power mode",
            level="slow",
            numbers=", ".join(machine.power_saving),
            cure="`powerprofilesctl set performance` or `sudo cpupower frequency-set -g "
            "performance`; plug a laptop in",
        )
    if (machine.numa_nodes or 1) > 1:
        node = next((gpu.numa_node for gpu in machine.gpus if gpu.numa_node is not None), 0)
        yield Finding(
            name="NUMA",
            level="note",
            numbers=f"{machine.numa_nodes} nodes: memory of another node is slower",
            cure=f"`numactl --cpunodebind={node} --membind={node} fluxtrain train ...` if the model"
            " fits one node, else `numactl --interleave=all`",
        )
    if machine.wsl:
        yield Finding(
            name="WSL2",
            level="note",
            numbers=f"{bytes_text(machine.memory_total_bytes)} of Windows' memory: half by default",
            cure="set memory= below [wsl2] in .wslconfig, then `wsl --shutdown`; keep runs on the "
            "Linux disk, not below /mnt/c",
        )


def _memory(probe: ProbeAnswer) -> Iterator[Finding]:
    machine, copies = probe.machine, probe.rate("host_copy")
    usual = COPY_BYTES_PER_S * min(machine.cores, COPYING_CORES)
    if copies is not None and copies < usual:
        yield Finding(
            name="memory speed",
            level="slow",
            factor=usual / copies,
            numbers=f"copies run at {rate_text(copies)}; {machine.cores} cores reach "
            f"{rate_text(usual)} or more on sound machines",
            cure="close other programs and measure again (--fresh); fill all memory channels",
        )
    yield from _memory_size(machine)


def _memory_size(machine: Machine) -> Iterator[Finding]:
    limit, installed = machine.memory_limit_bytes, machine.memory_installed_bytes
    total, available = machine.memory_total_bytes, machine.memory_available_bytes
    if limit is not None and installed is not None and limit < 0.95 * installed:
        yield Finding(
            name="memory limit",
            level="small",
            factor=installed / max(limit, 1),
            numbers=f"this process may use {bytes_text(limit)} of {bytes_text(installed)}",
            cure="raise it: `docker run --memory`, MemoryMax= of systemd, the job's own limit",
        )
    if total is not None and available is not None and available < AVAILABLE_SHARE * total:
        yield Finding(
            name="memory in use",
            level="small",
            factor=total / max(available, 1),
            numbers=f"{bytes_text(available)} of {bytes_text(total)} is available: full training "
            f"takes 14 bytes a parameter, {count_text(available / 14)} parameters",
            cure="close other programs",
        )


def _disk(probe: ProbeAnswer) -> Iterator[Finding]:
    disk, rate = probe.disk, probe.rate("disk_write")
    elsewhere = "set FLUXTRAIN_RUNS to a folder on a local SSD"
    if disk.in_memory:
        yield Finding(
            name="runs in memory",
            level="small",
            numbers=f"{disk.file_system}: checkpoints take host memory (12 GB for 1 B parameters) "
            "and are gone after a restart",
            cure=elsewhere,
        )
    elif rate is not None and rate < DISK_BYTES_PER_S:
        where = f"{disk.file_system}, over the network" if disk.on_network else disk.file_system
        yield Finding(
            name="disk",
            level="slow",
            factor=DISK_BYTES_PER_S / rate,
            numbers=f"{where}: writes {rate_text(rate)}, a checkpoint of 1 B parameters takes "
            f"{duration_text(CHECKPOINT_BYTES / rate)}",
            cure=f"{elsewhere}, or checkpoint less often (train.checkpoint_every)",
        )
    elif disk.on_network:
        yield Finding(
            name="disk",
            level="note",
            numbers=f"{disk.file_system}, over the network: its rate depends on others",
            cure=elsewhere,
        )
    free = disk.free_bytes
    if free is not None and free < 2 * CHECKPOINT_BYTES:
        yield Finding(
            name="disk space",
            level="small",
            factor=2 * CHECKPOINT_BYTES / max(free, 1),
            numbers=f"{bytes_text(free)} free; two checkpoints of 1 B parameters take "
            f"{bytes_text(2 * CHECKPOINT_BYTES)}",
            cure="free some, or set FLUXTRAIN_RUNS to another disk",
        )


def _adamw_text(probe: ProbeAnswer) -> str:
    """Say how fast the optimizer is, and what that means for a step."""
    rate = probe.rate("adamw")
    if rate is None:
        return "AdamW was not measured"
    return f"AdamW takes {duration_text(1e9 / rate)} a step for 1 B parameters"
