"""Rates of a machine that seconds are computed from. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fluxtrain.plan.cost.calibration import Calibration


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What a class of machines reaches beside the rates that are measured on each."""

    matmul_fraction: float  # of the measured matmul rate, within a block
    block_chunk_s: float  # beside the products, for each block and chunk: launches, norms


# Fitted to the resident rows of docs/benchmarks.md: 0.245, 0.459 and 1.698 s.
GPU = Efficiency(matmul_fraction=0.615, block_chunk_s=1.0e-3)
# Fitted to the demo on two shared cores (docs/planner.md).
CPU = Efficiency(matmul_fraction=0.5, block_chunk_s=5.0e-3)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of a machine; the bus lanes are None without a GPU."""

    has_gpu: bool
    matmul_per_s: float  # operations
    adamw_per_s: float  # parameters in bf16 with fp32 masters, all threads
    adamw_8bit_per_s: float | None = None  # the same with 8-bit states; None: by their bytes
    adamw_weights_per_s: float | None = None  # the weights' pass alone; None: by its bytes
    adamw_moments_per_s: float | None = None  # the moments' pass alone; None: by its bytes
    adamw_beside_per_s: float | None = None  # beside a backward pass; None: as alone
    adamw_8bit_beside_per_s: float | None = None  # the same with 8-bit states
    copy_bytes_per_s: float = float("inf")  # within host memory; the bus of a machine without GPU
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_both_bytes_per_s: float | None = None  # while the other lane is busy; None: as alone
    d2h_both_bytes_per_s: float | None = None
    calibration: Calibration | None = None  # of the model that is planned

    @property
    def up(self) -> float:
        """Bytes a second to the device; without a GPU of a copy within host memory."""
        return self.h2d_bytes_per_s or self.copy_bytes_per_s

    @property
    def down(self) -> float:
        """The same from the device."""
        return self.d2h_bytes_per_s or self.copy_bytes_per_s

    @property
    def up_both(self) -> float:
        """To the device while it sends."""
        return self.h2d_both_bytes_per_s or self.up

    @property
    def down_both(self) -> float:
        """From the device while it receives."""
        return self.d2h_both_bytes_per_s or self.down

    def beside_backward(self) -> Rates:
        """The same with updates as fast as they are beside a backward pass, which leaves them fewer
        threads and less of the host's memory."""
        return replace(
            self,
            adamw_per_s=self.adamw_beside_per_s or self.adamw_per_s,
            adamw_8bit_per_s=self.adamw_8bit_beside_per_s or self.adamw_8bit_per_s,
        )

    @property
    def efficiency(self) -> Efficiency:
        """Of this class of machines."""
        return GPU if self.has_gpu else CPU


def rates_from(
    per_s: Mapping[str, float | None], *, has_gpu: bool, calibration: Calibration | None = None
) -> Rates | str:
    """Rates from those of a probe by name, or which one is missing and so prevents a prediction.

    With a `calibration` no matmul rate is needed, and its own rate of AdamW counts.
    """
    known = {name: float(rate) for name, rate in per_s.items() if rate}
    if calibration is not None and calibration.adamw_per_s:
        known["adamw"] = calibration.adamw_per_s
    if calibration is not None and calibration.adamw_8bit_per_s:
        known["adamw_8bit"] = calibration.adamw_8bit_per_s
    matmul = "gpu_matmul" if has_gpu else "cpu_matmul"
    needed = ["adamw", "h2d_pinned", "d2h_pinned"] if has_gpu else ["adamw", "host_copy"]
    needed += [] if calibration is not None else [matmul]
    missing = [name for name in needed if name not in known]
    if missing:
        return f"not measured on this machine: {', '.join(missing)}"
    return Rates(
        has_gpu=has_gpu,
        matmul_per_s=known.get(matmul, float("inf")),
        adamw_per_s=known["adamw"],
        adamw_8bit_per_s=known.get("adamw_8bit"),
        adamw_weights_per_s=None if calibration is None else calibration.adamw_weights_per_s,
        adamw_moments_per_s=None if calibration is None else calibration.adamw_moments_per_s,
        adamw_beside_per_s=None if calibration is None else calibration.adamw_beside_per_s,
        adamw_8bit_beside_per_s=(
            None if calibration is None else calibration.adamw_8bit_beside_per_s
        ),
        copy_bytes_per_s=known.get("host_copy", float("inf")),
        h2d_bytes_per_s=known.get("h2d_pinned"),
        d2h_bytes_per_s=known.get("d2h_pinned"),
        h2d_both_bytes_per_s=known.get("h2d_both_ways"),
        d2h_both_bytes_per_s=known.get("d2h_both_ways"),
        calibration=calibration,
    )
