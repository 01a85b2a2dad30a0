"""The machine as the app itself samples it, once a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUser:
    """A process that holds memory of the GPU."""

    pid: int
    name: str = ""  # "" where it is not ours to see: another user's, or outside of our container
    memory_bytes: int | None = None
    is_trainer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU at one moment; None for a value that the card does not tell."""

    name: str
    index: int = 0  # as the driver counts them
    utilisation: float | None = None  # 0 to 1
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: int | None = None  # of the multiprocessors
    clock_limit_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttled_by: tuple[str, ...] | None = None  # () is at full speed
    processes: tuple[GpuUser, ...] | None = None

    @property
    def has_trainer(self) -> bool:
        """Return whether the trainer holds memory of this GPU."""
        return any(one.is_trainer for one in self.processes or ())

    @property
    def others(self) -> tuple[GpuUser, ...]:
        """Return the processes other than the trainer."""
        return tuple(one for one in self.processes or () if not one.is_trainer)


@dataclass(frozen=True, slots=True)
class MachineSample:
    """The machine at one moment; None for a value that cannot be measured."""

    monotonic_s: float
    cpu: float | None  # 0 to 1 over all cores
    cores: int
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    trainer_rss_bytes: int | None
    trainer_cpu: float | None  # in cores: 1.9 is one core and most of another
    gpus: tuple[GpuSample, ...] = ()
