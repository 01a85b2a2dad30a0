"""Trains one model shape with PyTorch's FSDP2, in torch's bare loop and in FluxTrain.

    torchrun --nproc_per_node=2 bench/bench_fsdp.py --shape 3b --batch 8
    torchrun --nproc_per_node=2 bench/bench_fsdp.py --shape 3b --batch 8 --resident
    python bench/bench_fsdp.py --shape 3b --batch 8 --ours
    python bench/bench_fsdp.py --shape 3b --batch 8 --ours --set fsdp.sharding_strategy=NO_SHARD

With --resident nothing is on the host: the row beside `--ours`, which is `fluxtrain dry-run`
with `parallel.mode: fsdp`; without, CPU offload. With --rank both train LoRA.

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
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
from transformers import AutoTokenizer, Qwen2Config

from fluxtrain.data.demo import demo_files

GIB = 1 << 30
WARM_STEPS = 2
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Train; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=8, help="rows of each card")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--resident", action="store_true", help="no CPU offload")
    parser.add_argument("--rank", type=int, help="of LoRA's adapters; all weights without")
    parser.add_argument("--steps", type=int, default=5, help="that count, after two that do not")
    parser.add_argument("--ours", action="store_true", help="FluxTrain, without torchrun")
    parser.add_argument("--processes", type=int, default=2, help="of --ours")
    parser.add_argument("--set", action="append", default=[], help="more settings of --ours")
    options = parser.parse_args()
    print(json.dumps(ours(options) if options.ours else bare(options)), flush=True)


def bare(options: argparse.Namespace) -> dict[str, object]:
    """Train in torch's loop, as one of torchrun's processes; return the row."""
    rank, cards = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    model = sharded(options)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-5, fused=True)
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
    dist.destroy_process_group()
    if rank:
        sys.exit()
    return {
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


def sharded(options: argparse.Namespace) -> torch.nn.Module:
    """The random model of the other rows, its blocks sharded over the cards, and on the host where
    they are not resident. Adapters are fp32, as all trained weights; what is frozen is bf16."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2

    config = Qwen2Config(**SHAPES[options.shape])
    model: torch.nn.Module = random_model(config, torch.device("cpu"), torch.device("cuda"))
    apply_liger_kernel_to_qwen2(model=model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    rotary, blocks = model.model.rotary_emb, model.model.layers
    if options.rank:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=options.rank, target_modules=ADAPTED)
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    else:
        model.float()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = OffloadPolicy() if options.resident else CPUOffloadPolicy()
    for block in (*blocks, model):
        fully_shard(block, mp_policy=precision, offload_policy=offload)
    rotary.to("cuda")
    return model


def ours(options: argparse.Namespace) -> dict[str, object]:
    """Train the same shape with `fluxtrain dry-run`; return the row, with what was predicted."""
    with tempfile.TemporaryDirectory() as given:
        folder, tokenizer = Path(given), AutoTokenizer.from_pretrained(demo_files().tokenizer)
        made_on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = Qwen2Config(**SHAPES[options.shape])
        random_model(config, torch.device("cpu"), made_on).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        # beside a config transformers reads it as the model's own kind, which a copy must be too
        AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "model")
        library = sorted(Path(os.__file__).parent.glob("*.py"))
        texts = [json.dumps({"text": path.read_text("utf-8", "replace")}) for path in library]
        (folder / "texts.jsonl").write_text("\n".join(texts))
        settings = {
            "model.path": folder / "model", "data.path": folder / "texts.jsonl",
            "data.sequence_length": options.sequence, "train.max_grad_norm": "null",
            "train.batch_rows": options.batch * options.processes, "train.learning_rate": 1e-5,
            "parallel.mode": "fsdp", "parallel.processes": options.processes,
        }  # fmt: skip
        if options.rank:
            settings |= {"method.name": "lora", "method.rank": options.rank}
        words = [f"--set={key}={value}" for key, value in settings.items()]
        words += [f"--set={setting}" for setting in options.set]
        words += ["--steps", str(WARM_STEPS + options.steps), "--json"]
        command = [sys.executable, "-m", "fluxtrain", "dry-run", *words]
        told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    step_s, device_bytes = statistics.median(told["steps_s"][WARM_STEPS:]), told["device_bytes"]
    return {
        "engine": "fluxtrain, fsdp",
        "shape": options.shape,
        "cards": options.processes,
        "batch": options.batch,
        "step_s": round(step_s, 3),
        "predicted_s": told["step_s"]["predicted"],
        "tokens_per_s": round(options.processes * options.batch * options.sequence / step_s),
        "gpu_gib": {name: round((held or 0) / GIB, 1) for name, held in device_bytes.items()},
        "loss": round(told["losses"][-1], 3),
        "settings": options.set,
        "steps_s": [round(seconds, 3) for seconds in told["steps_s"]],
    }


if __name__ == "__main__":
    main()
