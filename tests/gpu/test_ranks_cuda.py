"""Two processes on two GPUs over NCCL: equal weights, those of one process; skipped without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import fluxtrain
from tests.on_cards import ROWS, batch, llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
STEPS = 4


def trained(parallel: bool, rows: slice) -> dict[str, torch.Tensor]:
    """The weights after clipped steps on these rows of each batch."""
    wrapped = fluxtrain.wrap(llama(4), device="cuda", offload="weights", cards=1)
    model: nn.Module = wrapped
    if parallel:  # as accelerate calls it
        device = torch.cuda.current_device()
        model = DistributedDataParallel(wrapped, device_ids=[device], output_device=device)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for step in range(STEPS):
        every: dict[str, Any] = batch(step)
        model(**{name: values[rows] for name, values in every.items()}).loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu().clone() for name, p in wrapped.named_parameters()}


def rank(number: int, folder: str) -> None:
    os.environ |= {"LOCAL_RANK": str(number)}
    torch.cuda.set_device(number)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meeting", rank=number, world_size=2
    )
    share = ROWS // 2
    found = [trained(ddp, slice(number * share, (number + 1) * share)) for ddp in (False, True)]
    torch.save(found, f"{folder}/{number}")
    distributed.destroy_process_group()


def test_two_gpus_train_one_model_over_nccl(tmp_path: Path) -> None:
    multiprocessing.spawn(rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(number)) for number in range(2))
    alone = trained(False, slice(None))
    for mine, other in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)
        apart = sum(float((mine[name].float() - alone[name].float()).abs().sum()) for name in mine)
        assert apart < 2e-3 * sum(float(alone[name].float().abs().sum()) for name in mine)
