"""Two processes on two GPUs over NCCL: equal weights, those of one process; skipped without."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import fluxtrain
from fluxtrain.config.schema import RunConfig, validate
from fluxtrain.core.device import page_locks
from fluxtrain.core.ranks import join
from fluxtrain.core.ranks.exchange import Exchange
from fluxtrain.core.ranks.join import Ranks, join_launched
from fluxtrain.core.wrap import wrap
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.events import events as ev
from fluxtrain.plan.request import Params
from fluxtrain.train.checkpoint.recovery import locate, truly_told
from fluxtrain.train.ranks import train_as_rank
from fluxtrain.train.run import train
from tests.engine.runs import losses, told, weights
from tests.on_cards import ROWS, batch, llama, saved_with_demo_tokenizer, wrapped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
STEPS = 4


def trained(parallel: bool, rows: slice, cards: Any = 1) -> dict[str, torch.Tensor]:
    """The weights after clipped steps on these rows of each batch."""
    streamed = fluxtrain.wrap(llama(4), device="cuda", offload="weights", cards=cards)
    model: nn.Module = streamed
    if parallel:  # as accelerate calls it
        device = torch.cuda.current_device()
        model = DistributedDataParallel(streamed, device_ids=[device], output_device=device)
    optimizer = torch.optim.AdamW(streamed.parameters(), lr=1e-3)
    for step in range(STEPS):
        every: dict[str, Any] = batch(step)
        model(**{name: values[rows] for name, values in every.items()}).loss.backward()
        nn.utils.clip_grad_norm_(streamed.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu().clone() for name, p in streamed.named_parameters()}


def locked(params: Params) -> bool:
    """Whether a block's own weights and gradients are page-locked in this rank, of shared weights
    all."""
    with pytest.MonkeyPatch.context() as patch:
        how = partial(Exchange, params=params)
        patch.setattr(wrap, "_exchange", how)
        model = llama(4, width=256)
        wrapped(model, 1, "cuda")
    model(**batch()).loss.backward()
    group = next(one for one in engine_of(model).groups if one.kind == "block")
    segment, shares = group.trained[0], group.shares
    assert shares is not None and segment.weights is not None
    whole = shares.memory is not None and page_locks.LOCKS.holds(segment.weights)
    own = [*shares.own_parts(segment.weights, segment.elements)]
    own += shares.own_parts(segment.gradient, segment.elements)
    return whole is (params == "full") and all(map(page_locks.LOCKS.holds, own))


def rank(number: int, folder: str) -> None:
    os.environ |= {"LOCAL_RANK": str(number)}
    torch.cuda.set_device(number)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meeting", rank=number, world_size=2
    )
    share = ROWS // 2
    found = [trained(ddp, slice(number * share, (number + 1) * share)) for ddp in (False, True)]
    assert locked("full") and locked("shard")
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


def rank_on_both(number: int, folder: str) -> None:
    """A rank whose blocks are on both GPUs, which gloo lets ranks share."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2
    )
    share = ROWS // 2
    own, found = slice(number * share, (number + 1) * share), list[dict[str, torch.Tensor]]()
    ways: list[dict[str, Any]] = [{}, {"params": "full"}, {"params": "shard"}, {"on_host": True}]
    for way in ways:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wrap, "_exchange", partial(Exchange, order="fixed", **way))
            found.append(trained(False, own, [0, 1]))
    torch.save(found, f"{folder}/{number}")
    distributed.destroy_process_group()


def test_ranks_of_several_gpus_each_train_one_model(tmp_path: Path) -> None:
    multiprocessing.spawn(rank_on_both, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(number)) for number in range(2))
    alone = trained(False, slice(None))
    for mine, other in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)
        apart = sum(float((mine[name].float() - alone[name].float()).abs().sum()) for name in mine)
        assert apart < 2e-3 * sum(float(alone[name].float().abs().sum()) for name in mine)
    each, full, shard, _ = first  # the host's norm has another last digit
    assert all(torch.equal(each[name], way[name]) for way in (full, shard) for name in each)


RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {},
    "each": {},  # each rank holds all, as where ranks cannot share memory
    "shard": {"parallel": {"params": "shard"}},
    "host": {"parallel": {"gradients": "cpu_reduce"}},
    "host-shard": {"parallel": {"gradients": "cpu_reduce", "params": "shard"}},
    "unclipped": {"train": {"max_grad_norm": None}},
    "host-unclipped": {
        "parallel": {"gradients": "cpu_reduce"},
        "train": {"max_grad_norm": None},
    },
    "accumulated": {"train": {"accumulation": 2}},
    "cards": {"parallel": {"cards": 2}},
    "cards-shard": {"parallel": {"cards": 2, "params": "shard"}},
    "cards-host": {"parallel": {"cards": 2, "gradients": "cpu_reduce"}},
    "lora": {"method": {"name": "lora", "rank": 8}},
    "qlora": {"method": {"name": "qlora", "rank": 8}},
}


def config_of(folder: Path, name: str) -> RunConfig:
    """Six steps of a small model whose blocks stream."""
    common: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "kernels": "torch"},
        "data": {"path": "demo", "sequence_length": 256, "held_out": 0.05},
        "placement": {"offload": "weights", "device_groups": 0, "chunk_rows": 4},
        "train": {
            "steps": 6, "batch_rows": 8, "checkpoint_every": 3, "evaluate_every": 3,
            "schedule": "constant", "learning_rate": 1e-3,
        },
    }  # fmt: skip
    changed = RUNS[name]
    settings = {key: {**common.get(key, {}), **changed.get(key, {})} for key in common | changed}
    if not distributed.is_initialized():
        settings["parallel"] = {"cards": 1}
    return validate(settings)


def rank_of_runs(number: int, folder: str, port: int, names: Sequence[str]) -> None:
    told_by = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told_by.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    join_launched()
    for name in names:
        config, place = config_of(Path(folder) / "model", name), Path(folder) / f"two-{name}"
        with pytest.MonkeyPatch.context() as patch:
            if name == "each":
                patch.setattr(Ranks, "may_share_memory", False)
            if name.startswith("cards") and torch.cuda.device_count() < 4:  # they share both
                patch.setattr(join, "_is_of_nccl", lambda _: False)
            train_as_rank(config, lambda c=config, p=place: locate(None, p, c), truly_told)
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("names", "has_equal_bits"),
    [
        (("full", "each", "shard"), True),
        (("unclipped", "host-unclipped"), True),
        (("full", "host", "host-shard"), False),
        (("cards", "cards-shard"), True),
        (("cards", "cards-host"), False),
        (("accumulated",), True),
        (("lora",), True),
        (("qlora",), True),
    ],
    ids=str,
)
def test_runs_of_two_gpus_have_the_losses_of_one(
    names: tuple[str, ...], has_equal_bits: bool, tmp_path: Path
) -> None:
    saved_with_demo_tokenizer(tmp_path / "model")
    multiprocessing.spawn(rank_of_runs, args=(str(tmp_path), free_port(), names), nprocs=2)
    config = config_of(tmp_path / "model", names[0])
    train(config, locate(None, tmp_path / "one", config))
    alone = losses(told(tmp_path / "one", ev.StepFinished))
    first = weights(tmp_path / f"two-{names[0]}")
    for name in names:
        found = losses(told(tmp_path / f"two-{name}", ev.StepFinished))
        assert found == pytest.approx(alone, rel=3e-3), name
        if has_equal_bits:
            mine = weights(tmp_path / f"two-{name}")
            assert all(torch.equal(first[key], mine[key]) for key in first), name


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_more_processes_than_gpus_are_refused_with_the_cure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fluxtrain", "train", "--demo", "--run-dir", f"{tmp_path}/run"]
    command += ["--set", "parallel.processes=2"]
    one = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    answer = subprocess.run(command, env=one, capture_output=True, text=True, check=False)
    assert answer.returncode == 2, answer.stderr
    assert "rank 0 and rank 1 of 2 have one GPU between them" in answer.stderr.splitlines()[-1]
