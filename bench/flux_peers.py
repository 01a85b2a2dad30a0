"""Bare torch loops of LoRA on the transformer of `bench_flux.py`: what FluxTrain stands beside.

`ddp` keeps bf16 weights on each card, `ddp-4bit` weights in NF4 with double quantization
(bitsandbytes, as diffusers loads them), and `fsdp` shards each block (FSDP2). All
recompute each block, clip at 1.0, and update bf16 adapters by torch's fused AdamW; of several
processes each has its share of the same rows, with the same noise as one process would draw.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fluxtrain.methods.image.flow import FlowMatching, PairBatch

MAX_NORM = 1.0


def join(engine: str, device: str) -> tuple[int, int]:
    """Join the processes that torchrun started; return this one's rank and their number. Sharding
    has a group of processes even where there is one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world == 1 and engine != "fsdp":
        return 0, 1
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=here, **(alone if world == 1 else {}))
    return rank, world


def pack_layers(model: nn.Module) -> None:
    """Replace each linear layer by one of bitsandbytes that is still empty."""
    import bitsandbytes

    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        with torch.device("meta"):
            packed = bitsandbytes.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
            )
        if packed.bias is not None:
            packed.bias.data = packed.bias.data.bfloat16()
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, packed.requires_grad_(False))
    model.is_loaded_in_4bit = True  # type: ignore[assignment] # peft asks


class PeerLoop:
    """One process of a loop over an empty model with adapters; `weight` makes its weights."""

    def __init__(self, model: Any, asked: Any, rank: int, world: int, weight: Any) -> None:
        self._rank, self._world = rank, world
        self._sharded = asked.engine == "fsdp"
        model.enable_gradient_checkpointing()
        if self._sharded:
            pins = asked.device == "cuda"
            offload = CPUOffloadPolicy(pins) if asked.cpu_offload else OffloadPolicy()
            for block in (*model.transformer_blocks, *model.single_transformer_blocks, model):
                fully_shard(block, offload_policy=offload)
        state = {}
        for name, parameter in list(model.named_parameters()):
            whole = weight(name, parameter, torch.device(asked.device))
            if type(parameter).__name__ == "Params4bit":
                kind: Any = type(parameter)
                how = {"compress_statistics": True, "quant_type": "nf4"}
                packed = kind(whole, requires_grad=False, **how).to(asked.device)
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, packed)
                continue
            if self._sharded:
                mesh, places = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, places, src_data_rank=None)
                whole = whole.cpu() if asked.cpu_offload else whole
            state[name] = whole
        model.load_state_dict(state, strict=False, assign=True)
        left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        assert not left, f"without weights: {left}"
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=1e-4, fused=True)
        several = world > 1 and not self._sharded
        self._model = DistributedDataParallel(model) if several else model
        self._objective: FlowMatching

    def step(self, objective: FlowMatching, pairs: PairBatch) -> Tensor:
        """Train on this process's share of the pairs; return the loss of all."""
        mine = self._share(objective._drawn(pairs))
        loss = objective._errors(self._model, mine).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self._trained, MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        told = loss.detach()
        if self._world > 1:
            dist.all_reduce(told)
        return told / self._world

    def _share(self, batch: PairBatch) -> PairBatch:
        held = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return replace(
            batch, **{name: t.chunk(self._world)[self._rank] for name, t in held.items()}
        )


def of_all(world: int, told: dict[str, list[float]]) -> list[dict[str, list[float]]]:
    """Gather what each process has to tell."""
    found: list[Any] = [told] * world
    if world > 1:
        dist.all_gather_object(found, told)
    return found
