"""What the app itself sees of the machine, once a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment."""

    name: str
    utilisation: float | None  # 0 to 1
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None


@dataclass(frozen=True, slots=True)
class MachineSample:
    """None where there is nothing to measure."""

    wall_s: float
    cpu: float | None  # 0 to 1 over all cores
    cores: int
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    trainer_rss_bytes: int | None
    trainer_cpu: float | None  # in cores: 1.9 is one core and most of another
    gpu: GpuSample | None = None
