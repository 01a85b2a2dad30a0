"""Trains one model shape with PyTorch's FSDP2 in torch's bare loop, to stand beside FluxTrain.

    torchrun --nproc_per_node=2 bench/bench_fsdp.py --shape 3b --batch 8
    torchrun --nproc_per_node=2 bench/bench_fsdp.py --shape 3b --batch 32 --resident

With --resident nothing is on the host: the row for `parallel.mode: fsdp`; without, CPU offload.

Mixed precision as torch's documentation has it (fp32 weights and states on the host, bf16 in the
computation), every block recomputed, liger's kernels, torch's fused AdamW. Gradients are not
clipped: with CPU offload each norm would add a reduction on the host. The first process prints one
row: seconds a step (median after two), tokens a second of all cards, memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
from bench_gpu import SHAPES, batch, corpus
from random_model import random_model
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

GIB = 1 << 30
WARM_STEPS = 2


def main() -> None:
    """Train; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=8, help="rows of each card")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--resident", action="store_true", help="no CPU offload")
    parser.add_argument("--steps", type=int, default=5, help="that count, after two that do not")
    options = parser.parse_args()
    rank, cards = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    model = sharded(Qwen2Config(**SHAPES[options.shape]), resident=options.resident)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    tokens = corpus(model.config.vocab_size)
    times = []
    for step in range(WARM_STEPS + options.steps):
        rows = batch(tokens, step * cards + rank, options.batch, options.sequence).cuda()
        dist.barrier()
        started_s = time.perf_counter()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - started_s)
    step_s = statistics.median(times[WARM_STEPS:])
    if rank == 0:
        row = {
            "engine": "fsdp2, resident" if options.resident else "fsdp2, CPU offload",
            "shape": options.shape,
            "cards": cards,
            "batch": options.batch,
            "step_s": round(step_s, 3),
            "tokens_per_s": round(cards * options.batch * options.sequence / step_s),
            "gpu_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 1),
            "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 1),
            "loss": round(float(loss), 3),
        }
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def sharded(config: Qwen2Config, *, resident: bool) -> Qwen2ForCausalLM:
    """The random model of the other rows, its blocks sharded over the cards, and on the host where
    they are not `resident`."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2

    model = random_model(config, torch.device("cpu"), torch.device("cuda")).float()
    apply_liger_kernel_to_qwen2(model=model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = OffloadPolicy() if resident else CPUOffloadPolicy()
    for block in (*model.model.layers, model):
        fully_shard(block, mp_policy=precision, offload_policy=offload)
    model.model.rotary_emb.to("cuda")
    return model


if __name__ == "__main__":
    main()
