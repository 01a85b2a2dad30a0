"""One block is tried on a GPU: every constant is there, and its memory is given back."""

from __future__ import annotations

import pytest
import torch

from fluxtrain.data.batches import Batch
from fluxtrain.hardware.busy_bus import busy_bus
from fluxtrain.methods.demo_model import demo_model
from fluxtrain.train.calibrate import calibrate

pytestmark = pytest.mark.gpu


def batch_of(rows: int) -> Batch:
    ids = torch.randint(0, 256, (rows, 128))
    count = rows * 127
    return Batch(
        input_ids=ids, labels=ids, position_ids=torch.arange(128).expand(rows, 128),
        predicted=count, step_predicted=count, tokens=ids.numel(),
    )  # fmt: skip


def test_a_block_is_tried_on_the_gpu_and_leaves_nothing_there() -> None:
    model = demo_model(256, dtype=torch.bfloat16)
    calibrate(model, batch_of, torch.device("cuda"), (2, 8))  # what libraries keep is there now
    before = torch.cuda.memory_allocated()
    tried = calibrate(model, batch_of, torch.device("cuda"), (2, 8))
    assert torch.cuda.memory_allocated() == before
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    for line in (tried.forward, tried.backward, tried.outside_forward):
        assert line.at(8) > 0
    assert tried.activation_bytes > 0
    assert tried.device_update_s > 0
    assert tried.host_block_s > 0
    assert tried.kept_backward is not None
    assert 0 < tried.kept_backward.at(8) < tried.backward.at(8)
    assert tried.kept_bytes is not None
    assert 0 < tried.kept_bytes <= 1.2 * tried.activation_bytes


def test_copies_keep_the_bus_busy_until_they_are_told_to_stop() -> None:
    with busy_bus("cuda"):
        assert float(torch.ones(8, device="cuda").sum()) == 8
