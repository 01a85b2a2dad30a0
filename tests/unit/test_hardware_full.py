"""A machine that was full when it was measured is not taken for one that cannot be measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fluxtrain.hardware import probe as probing
from fluxtrain.hardware.gpu import Gpu
from fluxtrain.hardware.machine import Machine, read_machine
from fluxtrain.hardware.probe import LACKING_AGE_S, probe
from fluxtrain.hardware.rate import TOO_LITTLE, Rate, failed
from fluxtrain.units import GIB

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")


class Ground:
    """A machine whose free memory is told, and one measurement that needs some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_free_bytes, self.card_free_bytes = 8 * GIB, 24 * GIB
        self.error: Exception | None = None
        self._machine = read_machine()
        monkeypatch.setattr(probing, "read_machine", self.machine)
        monkeypatch.setattr(probing, "others_share", lambda _: None)
        measured = {"bus": (("h2d_pinned",), self.measure)}
        monkeypatch.setattr(probing, "_measurements", lambda *_: measured)

    def machine(self) -> Machine:
        card = Gpu(
            index=0, name="NVIDIA Card", uuid="GPU-1", memory_total_bytes=24 * GIB,
            memory_free_bytes=self.card_free_bytes, other_processes=(),
            compute_capability="8.9", bf16=True, pcie_generation=3, pcie_width=4,
            pcie_card_generation=4, pcie_card_width=16, power_limit_w=300.0, power_default_w=450.0,
        )  # fmt: skip
        free = self.host_free_bytes
        return replace(self._machine, gpus=(card,), memory_available_bytes=free)

    def measure(self) -> dict[str, Rate]:
        if self.error is not None:
            raise self.error
        return {"h2d_pinned": Rate(5e10, "256 MiB")}


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Ground(monkeypatch)


def measured_after(ground: Ground, tmp_path: Path, age_s: float) -> bool:
    """Whether a probe measures anew, so long after one that found no memory."""
    ground.error = FULL
    assert probe(tmp_path).rates["h2d_pinned"].lacked_memory
    (kept,) = (tmp_path / "cache" / "fluxtrain").iterdir()
    content = json.loads(kept.read_bytes())
    content["probe"]["measured_at_s"] -= age_s
    kept.write_text(json.dumps(content))
    ground.error = None
    found = probe(tmp_path)
    assert (found.rate("h2d_pinned") is None) is found.from_cache
    return not found.from_cache


@pytest.mark.parametrize(
    ("age_s", "anew"), [(0.0, False), (LACKING_AGE_S / 2, False), (LACKING_AGE_S + 60, True)]
)
def test_that_memory_lacked_is_believed_for_minutes(
    ground: Ground, tmp_path: Path, age_s: float, anew: bool
) -> None:
    assert measured_after(ground, tmp_path, age_s) is anew
    if anew:
        assert probe(tmp_path).from_cache, "what was measured is kept as ever"


@pytest.mark.parametrize(("freed_bytes", "anew"), [(GIB // 4, False), (4 * GIB, True)])
@pytest.mark.parametrize("place", ["card", "host"])
def test_a_machine_that_has_room_again_is_measured_at_once(
    ground: Ground, tmp_path: Path, place: str, freed_bytes: int, anew: bool
) -> None:
    ground.error = FULL
    ground.card_free_bytes = 0
    probe(tmp_path)
    ground.card_free_bytes += freed_bytes * (place == "card")
    ground.host_free_bytes += freed_bytes * (place == "host")
    ground.error = None
    assert probe(tmp_path).from_cache is not anew


def test_what_cannot_be_measured_for_another_reason_is_kept(ground: Ground, tmp_path: Path) -> None:
    ground.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    probe(tmp_path)
    ground.card_free_bytes += 4 * GIB
    ground.error = None
    assert probe(tmp_path).from_cache


@pytest.mark.parametrize(
    ("error", "lacked"),
    [
        (MemoryError(), True),
        (FULL, True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ImportError("no module"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_what_stays(error: Exception, lacked: bool) -> None:
    assert failed(error).lacked_memory is lacked
    assert TOO_LITTLE.lacked_memory and not Rate(None, "not measured: no GPU").lacked_memory
    assert not Rate(1.0, TOO_LITTLE.how).lacked_memory
