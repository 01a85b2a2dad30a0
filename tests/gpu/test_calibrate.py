"""Timing one block on a GPU gives every constant, and frees its memory."""

from __future__ import annotations

import pytest
import torch

from fluxtrain.data.batches import Batch
from fluxtrain.measure.calibrate import calibrate
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.models.demo_model import demo_model

pytestmark = pytest.mark.gpu


def batch_of(rows: int) -> BoundBatch[Batch]:
    ids = torch.randint(0, 256, (rows, 128))
    count = rows * 127
    return BoundBatch(CausalLM(), Batch(
        input_ids=ids, labels=ids, position_ids=torch.arange(128).expand(rows, 128),
        predicted=count, tokens=ids.numel(),
    ))  # fmt: skip


def test_a_block_is_timed_on_the_gpu_and_leaves_nothing_there() -> None:
    model = demo_model(256, dtype=torch.bfloat16)
    calibrate(model, batch_of, torch.device("cuda"), (2, 8))  # what libraries keep is there now
    before = torch.cuda.memory_allocated()
    timed = calibrate(model, batch_of, torch.device("cuda"), (2, 8))
    assert torch.cuda.memory_allocated() == before
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    for line in (timed.forward, timed.backward, timed.outside_forward):
        assert line.at(8) > 0
    assert timed.activation_bytes > 0
    assert timed.device_update_s > 0
    assert 0 < timed.host_forward_s < timed.host_block_s
    assert timed.host is not None  # whole steps were timed with blocks on the host
    assert 0 < timed.host.forward.at(1) < 2 * timed.host.forward_beside.at(1)
    assert timed.host.backward.slope > 0
    assert timed.host.host_group_update_s > 0 and timed.host.device_update_s > 0
    for rate in ("adamw_per_s", "adamw_weights_per_s", "adamw_moments_per_s"):
        assert getattr(timed, rate)
    assert timed.edge_bytes > 0
    assert timed.kept_backward is not None
    assert 0 < timed.kept_backward.at(8) < timed.backward.at(8)
    assert timed.kept_bytes is not None
    assert 0 < timed.kept_bytes <= 1.2 * timed.activation_bytes


def test_without_host_memory_for_whole_steps_calibration_says_so_and_keeps_the_blocks_times() -> (
    None
):
    model = demo_model(256, dtype=torch.bfloat16)
    timed = calibrate(model, batch_of, torch.device("cuda"), (2, 8), host_available_bytes=1 << 20)
    assert timed.host is None
    assert 0 < timed.host_forward_s < timed.host_block_s
    assert timed.steps_not_timed is not None
    assert "of the 1.00 MiB of host memory" in timed.steps_not_timed.why
