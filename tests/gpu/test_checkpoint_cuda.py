"""Checkpoints that are written beside a training on a GPU hold the state of one moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.config.schema import validate
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.train.checkpoint.checkpoint import list_checkpoints, read_checkpoint
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.placing.snapshot import Snapshot
from fluxtrain.train.run import train
from fluxtrain.train.run_plan import RunPlan
from tests.gpu.exactly import exactly

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = 6


def trained(run_dir: Path, **placement: Any) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors of all checkpoints, by step."""
    config = validate(
        {
            "model": {"path": "demo", "kernels": "torch"},
            "data": {"path": "demo", "sequence_length": 64},
            "placement": {"chunk_rows": 4, **placement},
            "parallel": {"cards": 1},
            "train": {
                "steps": STEPS, "batch_rows": 4, "checkpoint_every": 1, "keep_checkpoints": STEPS,
                "evaluate_every": "end", "max_grad_norm": 1.0,
            },
        }
    )  # fmt: skip
    with exactly():
        train(config, locate(None, run_dir, config))
    found = {}
    for path in list_checkpoints(run_dir / "checkpoints"):
        checkpoint = read_checkpoint(path)
        shards = checkpoint.load_shards()
        found[checkpoint.step] = {f"{n}.{k}": t.clone() for n, s in shards for k, t in s.items()}
    return found


@pytest.mark.parametrize(
    "placement",
    [
        {"offload": "none"},  # the device updates all groups
        {"offload": "weights", "device_groups": 3, "resident_blocks": 0},  # some of them
        {"offload": "max"},
    ],
    ids=str,
)
def test_what_is_written_beside_the_training_is_what_waiting_would_have_written(
    placement: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = trained(tmp_path / "beside", **placement)
    written = [
        event for event in read_events(tmp_path / "beside" / "events.ndjson")
        if isinstance(event, ev.CheckpointWritten)
    ]  # fmt: skip
    assert any(event.held_s is not None for event in written), "one was written beside"
    waits = Snapshot(budget_bytes=0, how="while training waits", because="the test says so")
    monkeypatch.setattr(RunPlan, "snapshot", lambda _, *, keeps: waits)
    other = trained(tmp_path / "waits", **placement)
    assert set(beside) == set(other) == set(range(1, STEPS + 1))
    for step, tensors in other.items():
        assert tensors.keys() == beside[step].keys()
        assert [n for n in tensors if not torch.equal(tensors[n], beside[step][n])] == [], step
