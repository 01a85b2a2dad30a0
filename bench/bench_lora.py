"""Trains LoRA and QLoRA on one Llama shape on the GPU, measured from outside.

`--engine flux` is FluxTrain, planned as its trainer plans, with its weights on the host and packed
there; `--engine resident` is transformers with peft, bitsandbytes and liger-kernel, everything on
the GPU. Both have adapters on all linear layers but the head, recompute and clip.

Prints one row for each of `--batches`: the first one decides the plan. Random weights of blocks are
ranges of one pool, so that a model larger than host memory can be packed from it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import bench_gpu
import psutil
import torch
import yaml
from bench_gpu import CONTEXT_GIB, Losses, batch, cap_memory, corpus, count, wrapped
from gpu_engines import FluxLoop
from memory_watch import GIB, MemoryWatch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.config.schema import MethodSettings, ModelSettings
from fluxtrain.core.ranks.join import ALONE
from fluxtrain.machine.machine import read_machine
from fluxtrain.methods.adapters import attach_adapters, find_targets
from fluxtrain.models.kernels import choose_kernels
from fluxtrain.plan.states import PACKED_FORMATS

SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("lora_shapes.yaml").read_text()
)
SPREAD = 0.02  # standard deviation of the weights
RATE = 1e-4
WARM_STEPS = 2


def main() -> None:
    """Measure; see the module."""
    options = options_given()
    shape = SHAPES[options.shape]
    options.vocabulary, options.batch = shape["vocab_size"], options.batches[0]
    layers = options.layers or shape["num_hidden_layers"]
    config = LlamaConfig(**{**shape, "num_hidden_layers": layers}, use_cache=False, rope_theta=5e5)
    config._attn_implementation = "sdpa"
    watch = MemoryWatch()
    watch.start()
    started_s = time.perf_counter()
    loop, told = (flux if options.engine == "flux" else resident)(config, options)
    told |= {"setup_s": round(time.perf_counter() - started_s, 1), "layers": layers}
    watch.ends_setup()
    rows = [measured(loop, rows, options) | told for rows in options.batches]
    watch.stop()
    same = {"engine": options.engine, "shape": options.shape, "frozen": options.frozen}
    for row in rows:
        row.update(same, **watch.figures(row))
        print(json.dumps({k: v for k, v in row.items() if k not in ("because", "calibration")}))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def options_given() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="flux", choices=("flux", "resident"))
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer blocks than the shape has")
    parser.add_argument("--frozen", default="nf4-double", choices=("plain", *PACKED_FORMATS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[2])
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="that count, after two that do not")
    parser.add_argument("--budget-gib", type=float, default=23.0)
    parser.add_argument(
        "--host-gib",
        type=float,
        help="host memory that the plan may use; what does not fit is read from the disk",
    )
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--device-groups", type=count, default="auto")
    parser.add_argument("--resident-blocks", type=count, default="auto")
    parser.add_argument("--blocks-without-recompute", type=count, default="auto")
    parser.add_argument("--chunk-rows", type=count, default="auto")
    parser.add_argument("--activations", default="auto", choices=("auto", "device", "host"))
    parser.add_argument("--head", default="auto", choices=("auto", "whole", "chunks"))
    parser.add_argument("--cards", type=int, default=1, help="GPUs of this process")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(
        disk_path=None,
        states="fp32", moments="auto", in_backward=False, passes=1, kernels="auto",
        learning_rate=RATE, slow_card=None, ranks=ALONE, params="full",
        order="fixed",
    )  # fmt: skip
    return parser.parse_args()


def measured(loop: Any, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of `rows` rows, median of those that count."""
    tokens, steps = corpus(options.vocabulary), WARM_STEPS + options.steps
    losses = Losses(steps)
    read: list[float] = []
    ended_s = [time.perf_counter()]
    up_bytes = disk_bytes = 0
    for step in range(steps):
        ids = batch(tokens, step, rows, options.sequence).pin_memory().cuda(non_blocking=True)
        if step == steps - 1:
            up_bytes, disk_bytes = uploaded(loop), read_from_disk(loop)
        losses.take(loop.step(ids))
        if step:
            read.append(losses.value(step - 1))
            ended_s.append(time.perf_counter())
    read.append(losses.value(steps - 1))
    ended_s.append(time.perf_counter())
    times = [end - start for start, end in itertools.pairwise(ended_s)]
    step_s = statistics.median(times[WARM_STEPS:-1])
    trained = rows * options.sequence
    read_gib = (read_from_disk(loop) - disk_bytes) / GIB  # in the last step
    return {
        "batch": rows,
        "tokens": trained,
        "step_s": round(step_s, 3),
        "tokens_per_s": round(trained / step_s, 1),
        "times_s": [round(t, 3) for t in times],
        "losses": [round(loss, 4) for loss in read],
        "packed_up_mib": round((uploaded(loop) - up_bytes) / (1 << 20), 1),  # in the last step
        "disk_read_gib": round(read_gib, 2),
        "disk_read_gib_per_s": round(read_gib / step_s, 2),
    }


def uploaded(loop: Any) -> int:
    """Packed bytes that went up to the GPUs so far."""
    return loop.engine.traffic().h2d_packed_bytes if isinstance(loop, FluxLoop) else 0


def read_from_disk(loop: Any) -> int:
    """Bytes of weights that were read from the disk so far."""
    return loop.engine.traffic().disk_read_bytes if isinstance(loop, FluxLoop) else 0


def flux(config: LlamaConfig, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """FluxTrain's loop on a model whose weights are packed as they move to the host."""
    cap_memory(options.budget_gib)
    made_s = time.perf_counter()
    model = empty(config)
    settings = MethodSettings(name="qlora", rank=options.rank)
    attach_adapters(model, settings, ModelSettings(path="random"))
    fill_from_pool(model)
    made_s = time.perf_counter() - made_s
    kernels = choose_kernels(options.kernels, model, "cuda").value
    free = read_machine().memory_available_bytes
    if options.host_gib:
        free = min(free or 1 << 60, int(options.host_gib * GIB))
    bench_gpu.available = lambda *_: free  # the pool is far smaller than the weights made of it
    before = psutil.Process().memory_info().rss
    engine, plan, told = wrapped(model, options)
    loop = FluxLoop(model, engine, options.learning_rate, in_backward=False)
    totals = plan.totals
    told |= {
        "kernels": kernels,
        "made_s": round(made_s, 1),
        "arenas_gib": round((psutil.Process().memory_info().rss - before) / GIB, 1),
        "offload": plan.offload,
        "device_groups": totals.device_groups,
        "resident_blocks": totals.resident_blocks,
        "disk_groups": plan.layout.disk_groups,
        "blocks_without_recompute": totals.blocks_without_recompute,
        "chunk_rows": plan.chunk_rows,
        "activations": plan.layout.activations,
        "activations_on_device": plan.layout.activations_on_device,
        "slots": plan.slots,
        "predicted_device_gib": round(plan.device_bytes / GIB + CONTEXT_GIB, 2),
        "predicted_host_gib": round(plan.host_bytes / GIB, 2),
    }
    return loop, told


def empty(config: LlamaConfig) -> LlamaForCausalLM:
    """The model in bf16 without weights, with its rotary buffers."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.train()


def fill_from_pool(model: nn.Module) -> None:
    """Give each frozen matrix a range of one pool of random numbers, and the others their own."""
    largest = max(p.numel() for p in model.parameters())
    made = torch.empty(largest + (1 << 20), dtype=torch.bfloat16, device="cuda")
    pool = made.normal_(0.0, SPREAD, generator=torch.Generator("cuda").manual_seed(0)).cpu()
    del made
    torch.cuda.empty_cache()
    places = torch.Generator().manual_seed(1)
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        if "lora_B" in name:
            values = torch.zeros(parameter.shape, dtype=torch.bfloat16)
        elif parameter.dim() == 1:
            values = torch.ones(parameter.shape, dtype=torch.bfloat16)
        else:
            room = len(pool) - parameter.numel()
            first = int(torch.randint(0, room, (1,), generator=places)) // 64 * 64
            values = pool[first : first + parameter.numel()].view(parameter.shape)
            values = values.clone() if parameter.requires_grad else values
        setattr(module, name.rpartition(".")[2], nn.Parameter(values, parameter.requires_grad))


class PeftLoop:
    """The usual loop: recompute, clip, torch's fused AdamW."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, RATE, fused=True)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Train on ids (B, T) in micro-batches of one row of memory's worth; return the loss."""
        loss = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def resident(config: LlamaConfig, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Make the same model on the GPU with bitsandbytes' layers, peft and liger's kernels."""
    import bitsandbytes as bnb
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from peft import LoraConfig, get_peft_model

    model: Any = empty(config)
    targets = find_targets(model, "auto").names
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(shape: torch.Size) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return made.normal_(0.0, SPREAD, generator=generator)

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packs = options.frozen != "plain" and name in targets and isinstance(child, nn.Linear)
            if packs:
                with torch.device("meta"):
                    made = bnb.nn.Linear4bit(
                        child.in_features, child.out_features, bias=False,
                        compute_dtype=torch.bfloat16, quant_type="nf4",
                    )  # fmt: skip
                double = options.frozen == "nf4-double"
                made.weight = bnb.nn.Params4bit(
                    drawn(child.weight.shape).cpu(), requires_grad=False, quant_type="nf4",
                    compress_statistics=double,
                ).to("cuda")  # fmt: skip
                setattr(parent, name, made)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            values = drawn(parameter.shape) if parameter.dim() > 1 else None
            ones = torch.ones(parameter.shape, dtype=torch.bfloat16, device="cuda")
            made = nn.Parameter(ones if values is None else values, requires_grad=False)
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], made)
    model.model.rotary_emb.to("cuda")
    apply_liger_kernel_to_llama(model=model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    adapters = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=targets,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return PeftLoop(get_peft_model(model, adapters).train()), {"kernels": "liger"}


if __name__ == "__main__":
    main()
