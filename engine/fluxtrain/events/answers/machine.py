"""Facts about a machine: processor, memory, GPUs, a disk, and measured rates; the answers of
`fluxtrain probe | doctor --json`.

Every fact is measured, or None with the reason in `unknown`.
"""

from __future__ import annotations

import time
from typing import ClassVar, Literal

import msgspec

from fluxtrain.events.answers.answers import Answer
from fluxtrain.units import UNKNOWN, bytes_text, count_text, rate_text


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A program that holds memory of a GPU; bytes are None where the driver hides them."""

    pid: int
    used_bytes: int | None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one card; `unknown` has the reason of every None."""

    index: int  # in the driver's order (PCI bus), which may not be torch's
    name: str | None
    uuid: str | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    other_processes: tuple[GpuProcess, ...] | None  # not this process
    compute_capability: str | None  # "9.0"
    pcie_generation: int | None  # that card and slot reach together; an idle link is slower
    pcie_width: int | None  # lanes in use
    bf16: bool | None = None  # arithmetic in bf16: compute capability 8.0 and above
    pcie_card_generation: int | None = None  # what the card could do in another slot
    pcie_card_width: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None  # as the card was sold
    numa_node: int | None = None  # whose memory is near
    mig: bool | None = None  # split into slices, of which CUDA gives a process one
    mig_slices: tuple[str, ...] | None = None  # their UUIDs
    unknown: dict[str, str] = {}


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One card as torch sees it, where there are several."""

    index: int  # torch's: of the cards that CUDA_VISIBLE_DEVICES leaves, in CUDA's order
    gpu: int | None  # `Gpu.index` of the same card, as nvidia-smi counts; None: not found there
    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    compute_capability: str | None
    bf16: bool | None = None
    numa_node: int | None = None
    unusable: str = ""  # why no training can use it, with the cure

    @property
    def text(self) -> str:
        """Name it for people, with the driver's number where that is another."""
        other = f", GPU {self.gpu} of nvidia-smi" if self.gpu not in (None, self.index) else ""
        return f"card {self.index} ({self.name}{other})"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the host and its cards, as one process may use them."""

    cores: int  # that this process may use: affinity and CPU quota
    cpu_quota: float | None  # cores; None without a quota
    cpu_name: str | None
    instruction_set: str  # avx512, avx2 or scalar: that FLUXTRAIN_ISA and the processor allow
    memory_total_bytes: int | None  # the smaller of the machine's and the container's
    memory_available_bytes: int | None
    memory_limit_bytes: int | None  # the container's; None without one
    gpus: tuple[Gpu, ...]
    driver: str | None
    cores_installed: int | None = None  # of the whole machine
    threads_wished: int | None = None  # OMP_NUM_THREADS; None when it is not set
    memory_installed_bytes: int | None = None
    memlock_limit_bytes: int | None = None  # of page locks for this user; None without one
    huge_pages: str | None = None  # always, madvise or never
    numa_nodes: int | None = None
    wsl: bool | None = None
    power_mode: str | None = None
    power_saving: tuple[str, ...] = ()  # what slows the machine down to save power
    unknown: dict[str, str] = {}

    def line(self) -> str:
        """Return one line for people: 16 cores (avx512), 128 GiB, NVIDIA GeForce RTX 4090 24.0
        GiB."""
        parts = [
            f"{self.cores} core{'s' * (self.cores != 1)} ({self.instruction_set})",
            bytes_text(self.memory_total_bytes),
        ]
        parts += [
            f"{gpu.name or 'NVIDIA GPU'} {bytes_text(gpu.memory_total_bytes)}" for gpu in self.gpus
        ]
        return ", ".join(parts if self.gpus else [*parts, "no GPU"])


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the file system that holds `path`; `unknown` has the reason of every None."""

    path: str
    total_bytes: int | None
    free_bytes: int | None  # for this user
    file_system: str | None
    in_memory: bool | None  # what is written there takes host memory
    on_network: bool | None
    unknown: dict[str, str] = {}


class Rate(msgspec.Struct, frozen=True):
    """`per_s` in bytes or operations a second; `how` says what was timed, or why nothing was."""

    per_s: float | None
    how: str


TOGETHER = ("cards_h2d", "cards_d2h", "cards_both_ways")  # of all cards at once, added up


def card_rate_name(card: int, name: str) -> str:
    """Name a rate of one card by torch's number of it: the first card's have no number."""
    return f"card{card}_{name}" if card else name


PEER = "peer_"  # begins the names of such rates


def peer_name(source: int, target: int) -> str:
    """Name the rate of copies from one card to another."""
    return f"{PEER}{source}_{target}"


def rate_value_text(name: str, per_s: float | None) -> str:
    """Write a rate in its usual unit, as 24.9 GB/s or 744 TFLOP/s."""
    if per_s is None:
        return UNKNOWN
    if name.endswith("matmul"):
        unit, scale = ("TFLOP/s", 1e12) if per_s >= 1e12 else ("GFLOP/s", 1e9)
        return f"{per_s / scale:.3g} {unit}"
    return f"{count_text(per_s)} param/s" if name.startswith("adamw") else rate_text(per_s)


class ProbeAnswer(Answer, frozen=True, kw_only=True):
    """The machine, the disk of the runs, and measured rates by name."""

    COMMAND: ClassVar[str] = "probe"

    machine: Machine
    disk: Disk
    rates: dict[str, Rate]
    cards: tuple[Card, ...] = ()  # as torch sees them, where there are several
    measured_at_s: float  # Unix time of the rates
    measuring_s: float  # what that took
    others_share: float | None = None  # of all processors, used by other programs meanwhile
    tried_again_at_s: float | None = None  # Unix time: rates that had failed, by themselves
    from_cache: bool = False

    def rate(self, name: str) -> float | None:
        """Return the bytes a second (for a matmul: operations, for AdamW: parameters); None: not
        measured."""
        found = self.rates.get(name)
        return None if found is None else found.per_s

    @property
    def age_s(self) -> float:
        """Return how old the rates are."""
        return max(0.0, time.time() - self.measured_at_s)


Level = Literal["broken", "slow", "small", "note"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Names a thing that holds this machine back, in numbers, and what to change.

    `level`: something does not work; it works slowly; less fits than could; worth knowing.
    `factor` is how many times more the machine would give without it; 1 where nobody can say.
    """

    name: str
    level: Level
    numbers: str
    cure: str
    factor: float = 1.0


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the engine must get right on this machine."""

    name: str
    passed: bool | None  # None: there is nothing here to test it on, or nowhere
    detail: str


class RankCores(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several processes of this machine computes with, were there one for each card."""

    cores: tuple[int, ...]
    node: int  # of the machine's memory (NUMA)
    update_threads: int  # that AdamW runs on, whatever OMP_NUM_THREADS is


class DoctorAnswer(Answer, frozen=True, kw_only=True):
    """The probe, its findings, the self-tests and the versions."""

    COMMAND: ClassVar[str] = "doctor"

    probe: ProbeAnswer
    findings: tuple[Finding, ...]  # the most useful first
    self_tests: tuple[SelfTest, ...]
    versions: dict[str, str]
    ranks: tuple[RankCores, ...] = ()  # by rank, of a launcher's processes or of several cards

    @property
    def failed(self) -> tuple[SelfTest, ...]:
        """Return the self-tests that ran and did not pass."""
        return tuple(test for test in self.self_tests if test.passed is False)
