"""A machine that was full when it was measured is not taken for one that cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from fluxtrain.events.answers.machine import Gpu, Machine, Rate
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.probe import probe as probing
from fluxtrain.measure.probe.probe import FAILED_AGE_S, probe
from fluxtrain.measure.probe.rate import TOO_LITTLE, failed
from fluxtrain.measure.probe.table import age_text
from fluxtrain.units import GIB

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")


class Ground:
    """A machine whose free memory is told, and two measurements, of which one may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_free_bytes, self.card_free_bytes = 8 * GIB, 24 * GIB
        self.error: Exception | None = None
        self._machine = read_machine()
        monkeypatch.setattr(probing, "read_machine", self.machine)
        monkeypatch.setattr(probing, "others_share", lambda _: None)
        self.copied = 0  # times
        how = "256 MiB"
        self.rates = {"h2d_pinned": Rate(5e10, how), "h2d_pageable": Rate(1e10, how)}
        measured = {
            "bus": (("h2d_pinned", "h2d_pageable"), self.measure),
            "host memory": (("host_copy",), self.copy),
        }
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
        return dict(self.rates)

    def copy(self) -> dict[str, Rate]:
        self.copied += 1
        return {"host_copy": Rate(1e10 + self.copied, "64 MiB")}


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Ground(monkeypatch)


def grow_older(tmp_path: Path, age_s: float) -> None:
    """What is kept of the machine."""
    (kept,) = (tmp_path / "cache" / "fluxtrain").iterdir()
    content = json.loads(kept.read_bytes())
    for name in ("measured_at_s", "tried_again_at_s"):
        if content["probe"][name] is not None:
            content["probe"][name] -= age_s
    kept.write_text(json.dumps(content))


def measured_after(ground: Ground, tmp_path: Path, age_s: float) -> bool:
    """Whether a probe measures anew, so long after one that found no memory."""
    ground.error = FULL
    assert probe(tmp_path).rates["h2d_pinned"].lacked_memory
    grow_older(tmp_path, age_s)
    ground.error = None
    found = probe(tmp_path)
    assert (found.rate("h2d_pinned") is None) is found.from_cache
    return not found.from_cache


@pytest.mark.parametrize(
    ("age_s", "anew"), [(0.0, False), (FAILED_AGE_S / 2, False), (FAILED_AGE_S + 60, True)]
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


@pytest.mark.parametrize(
    "error", [FULL, RuntimeError("CUDA error: an illegal memory access was encountered")]
)
def test_what_failed_is_tried_again_by_itself_and_all_else_stays_as_it_was(
    ground: Ground, tmp_path: Path, error: Exception
) -> None:
    ground.error = error
    first = probe(tmp_path)
    grow_older(tmp_path, 2 * FAILED_AGE_S)
    still = probe(tmp_path)  # it fails again, which is believed for some minutes again
    assert still.rate("h2d_pinned") is None and not still.from_cache
    ground.error = None
    assert probe(tmp_path).from_cache
    grow_older(tmp_path, 2 * FAILED_AGE_S)
    found = probe(tmp_path)
    assert found.rate("h2d_pinned") == 5e10
    assert found.rate("host_copy") == first.rate("host_copy") and ground.copied == 1
    assert found.age_s >= 4 * FAILED_AGE_S, "the week is that of the oldest"
    assert "what had failed again now" in age_text(found)
    again = probe(tmp_path)
    assert again.from_cache and again.rates == found.rates


def test_what_no_memory_is_the_cure_for_is_not_tried_again_when_there_is_more(
    ground: Ground, tmp_path: Path
) -> None:
    ground.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    ground.card_free_bytes = 0
    probe(tmp_path)
    ground.card_free_bytes = 4 * GIB
    ground.error = None
    assert probe(tmp_path).from_cache


def test_a_rate_that_another_try_does_not_reach_is_kept(ground: Ground, tmp_path: Path) -> None:
    refused = Rate(None, "not measured: memory cannot be pinned")
    ground.rates["h2d_pinned"] = refused
    assert probe(tmp_path).rate("h2d_pageable") == 1e10
    ground.error = FULL
    grow_older(tmp_path, 2 * FAILED_AGE_S)
    found = probe(tmp_path)
    assert found.rates["h2d_pinned"].lacked_memory
    assert found.rate("h2d_pageable") == 1e10


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
