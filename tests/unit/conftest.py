"""Events as a run makes them, for every test that needs some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fluxtrain.events.events import Hello, MemorySampled, StepFinished


@pytest.fixture
def make_step() -> Callable[..., StepFinished]:
    """Build a StepFinished; any field can be given."""

    def make(step: int = 1, **fields: Any) -> StepFinished:
        values: dict[str, Any] = {
            "step": step,
            "total_steps": 100,
            "epoch": step / 100,
            "loss": 5.5,
            "learning_rate": 3e-4,
            "grad_norm": 1.25,
            "tokens": 2048,
            "total_tokens": 2048 * step,
            "step_s": 0.5,
            "tokens_per_s": 4096.0,
            "phases_s": {"data": 0.01, "forward": 0.2, "backward": 0.25, "optimizer": 0.04},
            "stalls_s": {"weights": 0.01},
        }
        return StepFinished(**(values | fields))

    return make


@pytest.fixture
def make_memory() -> Callable[..., MemorySampled]:
    """Build a MemorySampled gauge; any field can be given."""

    def make(host_arena_bytes: int = 1 << 30, **fields: Any) -> MemorySampled:
        values: dict[str, Any] = {
            "device_total_bytes": None,
            "device_used_bytes": 3 << 20,
            "device_peak_bytes": 4 << 20,
            "device_budget_bytes": None,
            "device_by": {"weights": 1 << 20, "activations": 2 << 20},
            "host_rss_bytes": 2 << 30,
            "host_peak_bytes": 2 << 30,
            "host_arena_bytes": host_arena_bytes,
            "host_pinned_bytes": 0,
            "host_limit_bytes": None,
        }
        return MemorySampled(**(values | fields))

    return make


@pytest.fixture
def make_hello() -> Callable[..., Hello]:
    """Build a Hello; any field can be given."""

    def make(**fields: Any) -> Hello:
        values: dict[str, Any] = {
            "run_id": "20261121-031500-demo",
            "run_dir": "/runs/20261121-031500-demo",
            "pid": 4242,
            "pid_start_s": 1_700_000_000.0,
            "version": "0.1.0",
            "model": "demo",
            "method": "full",
            "dtype": "bfloat16",
            "device": "cpu",
            "machine": "2 cores, 8 GiB",
            "blocks": 8,
            "parameters": 4_000_000,
            "trained_parameters": 4_000_000,
            "total_steps": 100,
        }
        return Hello(**(values | fields))

    return make
