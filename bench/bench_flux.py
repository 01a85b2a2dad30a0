"""Trains a FLUX.1 Kontext transformer of the real size and random weights on one or two GPUs.

`--engine flux` streams through a budget, `--engine resident` keeps all on the GPU; `ddp`, `fsdp`
and `ddp-4bit` are torch's own loops (flux_peers.py), of several processes where torchrun starts so.
Prints a JSON row: seconds a step, rows a second, GiB of each card and of the host, and of FluxTrain
what its plan had predicted; or that it does not fit. Encodings are random, so that neither VAE nor
text encoders are needed: this measures the transformer's loop alone.

    python bench/bench_flux.py --engine flux --budget-gib 11 --size 1024
    python bench/bench_flux.py --engine flux --budget-gib 23 --method full --states 8bit
    torchrun --nproc_per_node=2 bench/bench_flux.py --engine fsdp --budget-gib 24 --rows 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import zlib
from dataclasses import replace
from typing import Any

import flux_peers
import torch
from cards_here import planned_on_cards, told_of_cards
from diffusers import FluxTransformer2DModel
from torch import Tensor

import fluxtrain
from fluxtrain.config.image_settings import ImageSettings
from fluxtrain.config.schema import MethodSettings
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import DoesNotFit
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.measured_constants import measure_constants
from fluxtrain.methods.image.adapter import attach
from fluxtrain.methods.image.flow import FlowMatching, PairBatch
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import Capacity, RowFacts, activation_estimate
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.simulation import step_time
from fluxtrain.train.placing.cards import hold_to_budget
from fluxtrain.units import GIB

PEERS = ("ddp", "ddp-4bit", "fsdp")
WORDS = {"kontext": 512, "tiny": 32}
GUIDED = {"in_channels": 64, "guidance_embeds": True, "patch_size": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "kontext": {
        "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
    },
    "tiny": {
        "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 64, "pooled_projection_dim": 64,
        "axes_dims_rope": (4, 6, 6),
    },
}  # fmt: skip
SPREAD = 0.02  # standard deviation of the weights
POOL = {"kontext": 1 << 28, "tiny": 1 << 18}  # random numbers, of which weights are ranges
WARM_STEPS = 3  # the first steps allocate, and compare recomputed blocks


class Weights:
    """Weights in bf16 by their names, the same for each engine: ranges of one pool of numbers."""

    def __init__(self, shape: str) -> None:
        self._pool = (torch.randn(POOL[shape]) * SPREAD).bfloat16()

    def __call__(self, name: str, empty: Tensor, device: torch.device) -> Tensor:
        """Make the weight for an `empty` parameter; adapters begin without effect."""
        self._pool = self._pool.to(device)
        if ".lora_B." in name:
            return torch.zeros(empty.shape, dtype=torch.bfloat16, device=device)
        name = name.replace(".base_layer", "")
        first = zlib.crc32(name.encode()) % (len(self._pool) - empty.numel())
        return self._pool[first : first + empty.numel()].view(empty.shape).clone()


def empty_transformer(asked: argparse.Namespace) -> Any:
    """Make the model without weights, with its adapters."""
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(**SHAPES[asked.shape], **GUIDED).bfloat16()
    if asked.engine == "ddp-4bit":
        flux_peers.pack_layers(model)
    if asked.method == "lora":
        attach(model, MethodSettings(name="lora", rank=asked.rank))
    return model.train()


def batch(asked: argparse.Namespace, rows: int) -> PairBatch:
    """Return pairs of random encodings."""
    shape, side = SHAPES[asked.shape], asked.size // 8
    latents = torch.randn(rows, 2, 16, side, side).bfloat16()
    return PairBatch(
        target=latents[:, 0], references=latents[:, 1:],
        weights=torch.ones(rows, (side // 2) ** 2),
        words=torch.randn(rows, WORDS[asked.shape], shape["joint_attention_dim"]).bfloat16(),
        pooled=torch.randn(rows, shape["pooled_projection_dim"]).bfloat16(),
    )  # fmt: skip


class FluxLoop:
    """FluxTrain's engine as its trainer drives it."""

    def __init__(self, model: Any, asked: argparse.Namespace, objective: FlowMatching) -> None:
        self.model = model
        self.plan, self.told = planned(model, asked, objective)
        how: dict[str, Any] = {"states": asked.states, "frozen": asked.frozen, "overlap": True}
        cards = asked.cards if asked.device == "cuda" else None
        fluxtrain.wrap(model, device=asked.device, cards=cards, placement=self.plan, **how)
        rate = 1e-5 if asked.method == "full" else 1e-4
        self._optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], rate
        )

    def step(self, objective: FlowMatching, pairs: PairBatch) -> Tensor:
        """Train on the pairs; return their loss."""
        loss = objective.loss(self.model, pairs, objective.count(pairs))
        loss.backward()
        engine = engine_of(self.model)
        engine.clip_grad_norm(flux_peers.MAX_NORM, [loss.detach()])
        self._optimizer.step()
        engine.forget_gradients()
        return loss.detach()


def planned(
    model: Any, asked: argparse.Namespace, objective: FlowMatching
) -> tuple[Placement, dict[str, Any]]:
    """Plan as a run does, from a block that is timed now; return what is predicted, too."""
    hidden, tokens = model.inner_dim, WORDS[asked.shape] + 2 * (asked.size // 16) ** 2
    row = RowFacts(
        hidden=hidden, vocabulary=0, sequence_length=tokens, dtype_bytes=2,
        activation_bytes=activation_estimate(hidden, 4 * hidden, tokens, 2),
    )  # fmt: skip
    facts = replace(facts_of(model, asked.states, asked.frozen), row=row)
    on_gpu, machine = asked.device == "cuda", read_machine()
    constants = measure_constants(
        facts, machine, asked.device, asked.rows, model,
        lambda rows: BoundBatch(objective, batch(asked, rows)),
    )  # fmt: skip
    rates, facts = constants.rates(has_gpu=on_gpu), constants.applied(facts)
    known = None if isinstance(rates, str) else rates
    resident = asked.engine == "resident"
    request = RunRequest(offload="none" if resident else "auto", batch_rows=asked.rows)
    room = asked.budget_bytes or (torch.cuda.mem_get_info()[0] if on_gpu else None)
    free = read_machine().memory_available_bytes
    host = None if free is None else free + sum(p.nbytes for p in model.parameters())
    if asked.cards > 1:
        plan = planned_on_cards(facts, request, known, asked.cards, "fixed", room or 0, host)
    else:
        capacity = Capacity(device_free_bytes=room, host_available_bytes=host)
        plan = place(facts, capacity, request, rates=known)
    told: dict[str, Any] = {
        "offload": plan.offload, "device_groups": plan.totals.device_groups,
        "resident_blocks": plan.totals.resident_blocks, "chunk_rows": plan.chunk_rows,
        "activations": plan.layout.activations, "predicted_device_gib": plan.device_bytes / GIB,
        "predicted_host_gib": plan.host_bytes / GIB,
        "constants": constants.source if known else f"{constants.source}; {rates}",
    }  # fmt: skip
    if known is not None:
        step_s = plan.step_s or step_time(facts, plan.layout, known, clips=True, passes=1).step_s
        told["predicted_step_s"] = step_s
    return plan, told


def here(asked: argparse.Namespace) -> list[int]:
    """Return the cards of this process."""
    if asked.device == "cpu":
        return []
    return list(range(asked.cards)) if asked.cards > 1 else [torch.cuda.current_device()]


def time_when_done(asked: argparse.Namespace) -> float:
    """Wait for the cards of this process; return the time."""
    for card in here(asked):
        torch.cuda.synchronize(card)
    return time.perf_counter()


def trained(
    loop: Any, objective: FlowMatching, asked: argparse.Namespace, rows: int, steps: int
) -> dict[str, Any]:
    """Train some steps; return what they took, without the first ones."""
    torch.manual_seed(0)
    asked.tried = {"rows": rows}
    pairs = objective.to(batch(asked, rows), torch.device(asked.device))
    warm = min(WARM_STEPS, steps - 1)
    for step in range(steps):
        if step == warm:
            started_s = time_when_done(asked)
        loss = loop.step(objective, pairs)
    step_s = (time_when_done(asked) - started_s) / (steps - warm)
    cards = max(asked.cards, asked.world)
    per_s = {"rows_per_s": rows / step_s, "rows_per_s_a_card": rows / step_s / cards}
    return {**asked.tried, "step_s": step_s, **per_s, "loss": float(loss), **memory(asked)}


def memory(asked: argparse.Namespace) -> dict[str, Any]:
    """Return GiB: of each process on the host at its peak, of each card at the peak of torch, and
    as all of it is taken now, with CUDA's and NCCL's own."""
    cards = here(asked)
    free = [torch.cuda.mem_get_info(card) for card in cards]
    mine = {
        "host_peak_gib": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)],
        "device_peak_gib": [torch.cuda.max_memory_allocated(card) / GIB for card in cards],
        "device_taken_gib": [(total - left) / GIB for left, total in free],
    }
    every = flux_peers.of_all(asked.world, mine) if asked.fits else [mine]
    return {name: [gib for one in every for gib in one[name]] for name in mine}


def tell(row: dict[str, Any]) -> None:
    """Print the row as a line of JSON, with four digits behind each point, in one piece: several
    processes may tell that they do not fit."""
    plain = json.loads(json.dumps(row), parse_float=lambda digits: round(float(digits), 4))
    os.write(sys.stdout.fileno(), f"{json.dumps(plain)}\n".encode())


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("flux", "resident", *PEERS), default="flux")
    parser.add_argument("--shape", choices=SHAPES, default="kontext")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--states", choices=("fp32", "bf16", "8bit"), default="fp32")
    parser.add_argument("--frozen", choices=("plain", "nf4-double"), default="plain")
    parser.add_argument("--budget-gib", type=float, help="of each card")
    parser.add_argument("--cards", type=int, default=1, help="of this process, for flux")
    parser.add_argument("--cpu-offload", action="store_true", help="for fsdp")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1, help="of a step, on all cards together")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--largest", type=int, help="also twice the rows, and again, up to these")
    return parser.parse_args()


def main() -> None:
    """Measure one engine at one size."""
    asked = options()
    row = dict(vars(asked))
    asked.rank_here, asked.world, asked.fits, asked.tried = 0, 1, True, {}
    if asked.engine in PEERS:
        asked.rank_here, asked.world = flux_peers.join(asked.engine, asked.device)
    row["processes"] = asked.world
    try:
        for told in measured(asked):
            if asked.rank_here == 0:
                tell(row | told)
    except (torch.OutOfMemoryError, DoesNotFit) as error:
        asked.fits = False  # others may have memory left, and wait for this process
        told = {**asked.tried, "process": asked.rank_here, "fits": False, **memory(asked)}
        told["error"] = " ".join(str(error).split())[:300]
        tell(row | told)
        os._exit(3)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measured(asked: argparse.Namespace) -> Any:
    """Yield the row that was asked for, and those of more rows a step."""
    started_s = time.perf_counter()
    torch.manual_seed(0)
    others = range(1, asked.cards)
    asked.budget_bytes = (
        hold_to_budget(asked.budget_gib, others) if asked.device == "cuda" else None
    )
    model, weight = empty_transformer(asked), Weights(asked.shape)
    objective = FlowMatching(
        image=ImageSettings(caption_dropout=0.0), has_guidance=True, dtype=torch.bfloat16,
        empty=(torch.zeros(1, 1), torch.zeros(1)),
    )  # fmt: skip
    told: dict[str, Any] = {}
    loop: Any
    if asked.engine in PEERS:
        loop = flux_peers.PeerLoop(model, asked, asked.rank_here, asked.world, weight)
    else:
        host, named = torch.device("cpu"), model.named_parameters()
        model.load_state_dict({name: weight(name, one, host) for name, one in named}, assign=True)
        loop = FluxLoop(model, asked, objective)
        told = loop.told
    del weight
    if asked.device == "cuda":
        torch.cuda.empty_cache()
        for card in here(asked):
            torch.cuda.reset_peak_memory_stats(card)
    told["setup_s"] = time.perf_counter() - started_s
    told |= trained(loop, objective, asked, asked.rows, asked.steps)
    if asked.cards > 1:
        told |= told_of_cards(loop.plan)
    yield told
    rows = 2 * asked.rows
    while asked.largest and rows <= asked.largest:
        yield trained(loop, objective, asked, rows, 2)
        rows *= 2


if __name__ == "__main__":
    main()
