"""Loss curves of full training, LoRA and QLoRA on one text, each beside the usual loop on the GPU.

    python bench/lora_curves.py --out curves.json --svg docs/lora-curves.svg

A Llama shape with random weights is first trained on Python's standard library. From these weights
six trainings begin, all on the same rows of torch's own source: by FluxTrain with every block
streamed, and by the loops that people write: fp32 masters for `full`, transformers with peft (and
bitsandbytes' nf4 with double quantisation for `qlora`) for adapters, whose first weights are equal.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from bench_gpu import batch
from draw_curves import curves
from gpu_engines import FluxLoop, MastersLoop
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.config.schema import MethodSettings, ModelSettings
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.methods.adapters import attach_adapters, find_targets

SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("lora_shapes.yaml").read_text()
)
METHODS = ("full", "lora", "qlora")
RATES = {"full": 1e-4, "lora": 5e-4, "qlora": 5e-4}
RANK = 16


def main() -> None:
    """Train all of them and print how far their losses are apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.3b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--first-steps", type=int, default=80, help="of the weights begun with")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    start = first_weights(options)
    told: dict[str, list[float]] = {}
    for method in METHODS:
        for name, make in (("FluxTrain", streamed), ("usual", resident)):
            began_s = time.perf_counter()
            loop = make(copy.deepcopy(start).to("cpu"), method, options)
            told[f"{method}, {name}"] = trained(loop, text_of(torch), options.steps, options)
            print(f"{method}, {name}: {time.perf_counter() - began_s:.0f} s", flush=True)
            del loop
            if options.device == "cuda":
                torch.cuda.empty_cache()
        ours, theirs = told[f"{method}, FluxTrain"], told[f"{method}, usual"]
        apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{method}: {theirs[0]:.4f} to {ours[-1]:.4f} and {theirs[-1]:.4f}, "
            f"apart at most {max(apart):.4f}, at the end {sum(apart[-10:]) / 10:.4f} on average"
        )
    options.out.write_text(json.dumps(told, indent=1))
    if options.svg:
        options.svg.write_text(curves(told), encoding="utf-8")


def text_of(package: Any) -> Tensor:
    """Token ids (n,) of a package's own source, as byte pairs."""
    files = sorted(Path(package.__file__).parent.glob("**/*.py"))[:400]
    text = b"".join(path.read_bytes() for path in files)
    data = torch.frombuffer(bytearray(text[: len(text) // 2 * 2]), dtype=torch.uint8).long()
    return data[0::2] * 256 + data[1::2]


def first_weights(options: argparse.Namespace) -> LlamaForCausalLM:
    """A model that knows some Python: random weights, trained on the standard library."""
    torch.manual_seed(0)
    shape = {**SHAPES[options.shape], "vocab_size": 1 << 16}
    config = LlamaConfig(**shape, use_cache=False, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).to(torch.bfloat16).to(options.device).train()
    trained(MastersLoop(model, 3e-4), text_of(json), options.first_steps, options)
    model.gradient_checkpointing_disable()
    for weight in model.parameters():
        weight.grad = None
    return model


def trained(loop: Any, tokens: Tensor, steps: int, options: argparse.Namespace) -> list[float]:
    """Losses of so many steps."""
    told = []
    for step in range(steps):
        ids = batch(tokens, step, options.rows, options.sequence).to(options.device)
        told.append(loop.step(ids))
    return [float(loss) for loss in told]


def streamed(model: LlamaForCausalLM, method: Any, options: argparse.Namespace) -> FluxLoop:
    """FluxTrain's loop, as its trainer drives it, with every block streamed."""
    if method != "full":
        settings = MethodSettings(name=method, rank=RANK)
        attach_adapters(model, settings, ModelSettings(path="random"))
        draw_adapters(model)
    fluxtrain.wrap(
        model, device=options.device, offload="weights", overlap=True,
        frozen="nf4-double" if method == "qlora" else "plain",
    )  # fmt: skip
    return FluxLoop(model, engine_of(model), RATES[method], in_backward=False)


def resident(model: LlamaForCausalLM, method: str, options: argparse.Namespace) -> Any:
    """The usual loop, with everything on the device."""
    if method == "full":
        return MastersLoop(model.to(options.device), RATES[method])
    targets = find_targets(model, "auto").names
    if method == "qlora":
        pack_with_bitsandbytes(model)
    model.to(options.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    adapters = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM"
    )
    peft_model = get_peft_model(model, adapters).train()
    draw_adapters(peft_model)
    return PlainLoop(peft_model, RATES[method])


def draw_adapters(model: nn.Module) -> None:
    """The same first weights of adapters for both engines, in the order of the layers."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name:
                drawn = torch.rand(weight.shape, generator=generator) * 2 - 1
                weight.copy_((drawn / weight.shape[1] ** 0.5).bfloat16())


def pack_with_bitsandbytes(model: LlamaForCausalLM) -> None:
    """Replace the linear layers of blocks by bitsandbytes' nf4 ones, which pack when they move."""
    import bitsandbytes as bnb

    for block in model.model.layers:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear):
                    continue
                made = bnb.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False,
                    compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=True,
                )  # fmt: skip
                made.weight = bnb.nn.Params4bit(
                    child.weight.detach(), requires_grad=False, quant_type="nf4",
                    compress_statistics=True,
                )  # fmt: skip
                setattr(parent, name, made)


class PlainLoop:
    """Forward, backward, clipping, torch's AdamW on what is trained."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self._model = model
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, rate)

    def step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


if __name__ == "__main__":
    main()
