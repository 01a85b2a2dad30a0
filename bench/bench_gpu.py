"""Trains one model shape on the GPU with a placement, measured from outside: `make bench-gpu`.

Prints one row: seconds a step (median after warm-up), tokens/s, model TFLOP/s, the process's GPU
memory as NVML reports it (peak of 20 samples a second), host memory above an empty process that has
opened the GPU (memory_watch.py), stalls. The other engines are in gpu_engines.py. bench_table.py
runs the rows that docs/benchmarks.md shows.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cards_here
import disk_here
import msgspec
import psutil
import torch
import yaml
from gpu_engines import DeepSpeedLoop, FluxLoop, Loop, MastersLoop, ResidentLoop
from memory_watch import GIB, MemoryWatch
from random_model import random_model
from step_timeline import StepTimeline, profiled
from transformers import Qwen2Config, Qwen2ForCausalLM

from fluxtrain.core.ranks.exchange import Exchange
from fluxtrain.core.ranks.join import join_launched, launched_world
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.data.batches import Batch
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.measured_constants import measure_constants
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.models.kernels import choose_kernels
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import Capacity
from fluxtrain.plan.footprint import block_inputs_on_host_bytes, by_tier
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import Auto, RunRequest
from fluxtrain.plan.simulation import step_time
from fluxtrain.train.placing.cards import nccl_bytes
from fluxtrain.train.placing.placing import DEFERS_MOMENTS, model_facts

ENGINES = ("flux", "resident", "resident-fp32", "deepspeed2", "deepspeed3")
CONTEXT_GIB = 0.8  # CUDA's own share of the process's memory, with Triton's kernels
SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("shapes.yaml").read_text()
)


def corpus(vocabulary: int) -> torch.Tensor:
    """Token ids of real text: the standard library's own source, as byte pairs."""
    text = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text[: len(text) // 2 * 2]), dtype=torch.uint8).long()
    pairs = data[0::2] * 256 + data[1::2]
    return pairs % vocabulary


def main() -> None:
    """One measurement; see the module."""
    options = options_given()
    options.ranks = join_launched()  # of torchrun's processes each has its share of the rows
    options.batch //= options.ranks.world
    watch = MemoryWatch()
    watch.start()
    row = run(options, watch)
    watch.stop()
    row |= watch.figures(row)
    if not options.ranks.is_first:
        return
    print(json.dumps({**row, "losses": [round(loss, 3) for loss in row["losses"][:20]]}))
    if options.json:
        options.json.write_text(json.dumps(row, indent=1))


def options_given() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1.5b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer blocks than the shape has")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--passes", type=int, default=1, help="backward passes of a step, flux")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--engine", default="flux", choices=ENGINES)
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--resident-blocks", type=count, default="auto")
    parser.add_argument("--device-groups", type=count, default="auto")
    parser.add_argument("--blocks-without-recompute", type=count, default="auto")
    parser.add_argument("--chunk-rows", type=count, default="auto")
    parser.add_argument("--cards", type=int, default=1, help="GPUs of this process")
    parser.add_argument("--through-host", action="store_true", help="again so, last")
    parser.add_argument("--also", type=int, nargs="+", default=[], help="batches, with this plan")
    parser.add_argument("--order", default="fixed", choices=("fixed", "fast"), help="of cards")
    parser.add_argument("--params", default="full", choices=("full", "shard"), help="of processes")
    parser.add_argument(
        "--gradients", default="gpu_reduce", choices=("gpu_reduce", "cpu_reduce"), help="the same"
    )
    parser.add_argument("--slow-card", type=float, help="the speed of the last GPU, below 1")
    parser.add_argument("--states", default="fp32", choices=("fp32", "bf16", "8bit"))
    parser.set_defaults(frozen="plain", vocabulary=None)
    parser.add_argument("--moments", default="auto", choices=DEFERS_MOMENTS)
    parser.add_argument("--in-backward", action="store_true", help="no clipping, update at once")
    parser.add_argument("--unclipped", action="store_true", help="resident-fp32 does not clip")
    parser.add_argument(
        "--masters-off-by", type=float, default=0.0, help="resident-fp32: relative, at the start"
    )
    parser.add_argument("--budget-gib", type=float, default=23.0)
    parser.add_argument(
        "--host-gib",
        type=float,
        help="host memory that the plan may use; optimizer states that do not fit live on disk",
    )
    parser.add_argument("--disk-path", type=Path, default=Path(), help="where these live")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--kernels", default="auto", choices=("auto", "liger", "torch"))
    parser.add_argument("--activations", default="auto", choices=("auto", "device", "host"))
    parser.add_argument("--head", default="auto", choices=("auto", "whole", "chunks"))
    parser.add_argument("--profile", type=Path, help="write a torch profile of one step there")
    parser.add_argument(
        "--trace", type=Path, help="write a Perfetto trace of the median step there"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def count(text: str) -> int | Auto:
    """A number, or `auto`."""
    return "auto" if text == "auto" else int(text)


def cap_memory(budget_gib: float) -> None:
    """Hold what torch takes of the GPU to the budget less CUDA's own share."""
    several = launched_world() > 1  # each has one card
    mine = [torch.cuda.current_device()] if several else range(torch.cuda.device_count())
    for card in mine:
        total = torch.cuda.get_device_properties(card).total_memory
        share = min(1.0, ((budget_gib - CONTEXT_GIB) * GIB - nccl_bytes()) / total)
        torch.cuda.set_per_process_memory_fraction(share, card)


def wrapped(
    model: Qwen2ForCausalLM, options: argparse.Namespace
) -> tuple[Engine, Placement, dict[str, Any]]:
    """Wrap the model as a run with these rows would be; its engine, the plan for the rows, and what
    is to be said of it. The model is on the host, as after loading, and block timing has the GPU
    alone."""
    import fluxtrain
    from fluxtrain.core.wrap.wrap import wrap_placed

    budget_bytes = int((options.budget_gib - CONTEXT_GIB) * GIB) - nccl_bytes()
    plan, told = planned(model, options, budget_bytes)
    how = {"states": options.states, "frozen": options.frozen}
    cards, last = options.cards, options.cards - 1
    if any(row.is_on("disk") and not row.is_on("disk", "state") for row in plan.groups):
        files = disk_here.BenchFiles()
        wrap_placed(model, "cuda", plan, cards=range(cards), keeping=files, **how)
        files.remove()
    elif options.ranks.world > 1:
        ranks, here = options.ranks, torch.device("cuda")
        exchange = Exchange(
            ranks, [here], order=options.order, params=options.params,
            on_host=options.gradients == "cpu_reduce",
        )  # fmt: skip
        wrap_placed(model, "cuda", plan, exchange=exchange, **how)
    else:
        fluxtrain.wrap(model, device="cuda", cards=cards, placement=plan, overlap=True, **how)
    engine = engine_of(model)
    if options.slow_card is not None:
        cards_here.slow_down(engine, last, options.slow_card)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return engine, plan, told


def planned(
    model: Qwen2ForCausalLM, options: argparse.Namespace, budget_bytes: int
) -> tuple[Placement, dict[str, Any]]:
    """The plan for the rows, and what it rests on."""
    facts = model_facts(model, model.config, options.sequence, options.states, options.frozen)
    constants = measure_constants(
        facts, read_machine(), "cuda", options.batch, model, partial(timing_batch, options),
        in_backward=options.in_backward,
    )  # fmt: skip
    rates = constants.rates(has_gpu=True)
    facts = replace(constants.applied(facts), processes=options.ranks.world)
    clips, passes = not options.in_backward, options.passes
    known = None if isinstance(rates, str) else rates
    request = RunRequest(
        offload=options.offload,
        batch_rows=options.batch,
        chunk_rows=options.chunk_rows,
        device_groups=options.device_groups,
        resident_blocks=options.resident_blocks,
        activations=options.activations,
        head=options.head,
        blocks_without_recompute=options.blocks_without_recompute,
        passes=options.passes,
        optimizer_in_backward=options.in_backward,
        deferred_moments=DEFERS_MOMENTS[options.moments],
        host_gib=options.host_gib,
        disk="auto" if options.host_gib is None else "on",
    )
    host_bytes, disk = available(model, options), disk_here.home_for(facts)
    spills = options.host_gib is not None and options.disk_path is not None
    spill = disk_here.spill_home(options.disk_path) if spills else None
    known = disk_here.rates_with(disk_here.rates_with(known, disk), spill)
    if options.cards == 1:
        capacity = Capacity(device_free_bytes=budget_bytes, host_available_bytes=host_bytes)
        plan = place(facts, capacity, request, rates=known, disk=disk, spill=spill)
        plan = options.ranks.of_first(plan)  # all share the same blocks
    else:
        if options.slow_card is not None:
            cards_here.plan_with_slow_card(options.cards - 1, options.slow_card)
        plan = cards_here.planned_on_cards(
            facts,
            request,
            known,
            options.cards,
            options.order,
            budget_bytes,
            host_bytes,
        )
    told: dict[str, Any] = {
        "constants": constants.source if known else f"{constants.source}; {rates}",
        "per_s": dict(constants.per_s),
        "states": options.states,
        "in_backward": options.in_backward,
        "sequence": options.sequence,
        "because": {choice.name: choice.because for choice in plan.choices},
    }
    for name, home in (("weights", disk), ("states", spill)):
        if home is not None:
            told[f"disk_of_{name}_gb_per_s"] = [
                round((rate or 0) / 1e9, 2)
                for rate in (home.read_bytes_per_s, home.write_bytes_per_s)
            ]
    layout = plan.layout
    told["parameters_on_host"] = sum(group.trained for group in by_tier(facts, layout)["host"])
    told["block_inputs_on_host_gib"] = round(block_inputs_on_host_bytes(facts, layout) / GIB, 2)
    if known is not None:
        predicted = step_time(facts, layout, known, clips=clips, passes=passes)
        step_s = predicted.step_s if plan.step_s is None else plan.step_s
        told["predicted_step_s"] = round(step_s, 3)
        told["calibration"] = msgspec.to_builtins(known.calibration)
    return plan, told


def available(model: Qwen2ForCausalLM, options: argparse.Namespace) -> int | None:
    """Host memory (bytes) for weights and all that comes to them; the weights are there already. Of
    several processes each has its part. None: not known."""
    ranks = options.ranks
    parts = ranks.world if options.params == "shard" else ranks.local_world
    free = read_machine().memory_available_bytes
    there = sum(weight.nbytes for weight in model.parameters() if weight.device.type == "cpu")
    return None if free is None else free // ranks.local_world * parts + there


def timing_batch(options: argparse.Namespace, rows: int) -> BoundBatch[Batch]:
    """Make rows for timing a block before the plan."""
    words = options.vocabulary or SHAPES[options.shape]["vocab_size"]
    ids = batch(corpus(words), 0, rows, options.sequence)
    return BoundBatch(CausalLM(), Batch(
        input_ids=ids, labels=ids, position_ids=torch.zeros_like(ids), packed=False,
        predicted=ids.numel(), tokens=ids.numel(),
    ))  # fmt: skip


class Losses:
    """Losses on their way to the host on a stream of their own: reading one waits for no later
    step, and no step for its copy. Memory is locked first: to lock some waits for an idle GPU."""

    def __init__(self, steps: int) -> None:
        self._stream = torch.cuda.Stream()
        self._homes = torch.empty(steps, dtype=torch.float32).pin_memory()
        self._told: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def take(self, loss: torch.Tensor) -> None:
        """That of the next step."""
        here, arrived = self._homes[len(self._told)], torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            here.copy_(loss.reshape(()), non_blocking=True)
            arrived.record()
        loss.record_stream(self._stream)
        self._told.append((here, arrived))

    def value(self, step: int) -> float:
        """Of a step, once it has been computed."""
        here, arrived = self._told[step]
        arrived.synchronize()
        return float(here)


def run(options: argparse.Namespace, watch: MemoryWatch) -> dict[str, Any]:
    """Train some steps and return the row."""
    started_s = time.perf_counter()
    imports_s = time.time() - psutil.Process().create_time()  # CUDA's context among them
    target = torch.device("cpu" if options.engine == "flux" else "cuda")
    shape = SHAPES[options.shape]
    config = Qwen2Config(
        **{**shape, "num_hidden_layers": options.layers or shape["num_hidden_layers"]}
    )
    model = random_model(config, target, torch.device("cuda"))
    if options.engine == "flux":
        cap_memory(options.budget_gib)
    parameters = sum(weight.numel() for weight in model.parameters())  # ZeRO-3 leaves empty ones
    loop, engine, plan, told = made(model, options)
    setup_s = time.perf_counter() - started_s
    watch.ends_setup()
    gc.freeze()  # as the trainer's command does
    tokens = corpus(model.config.vocab_size)
    timeline = StepTimeline(engine) if engine else None
    losses = Losses(options.steps)
    read: list[float] = []
    ended_s = [time.perf_counter()]
    for step in range(options.steps):
        number = step * options.ranks.world + options.ranks.rank
        rows = batch(tokens, number, options.passes * options.batch, options.sequence)
        ids = rows.pin_memory().cuda(non_blocking=True)  # else the host waits for the step before
        if engine and step == options.steps - 1:
            engine.take_stalls()
        if timeline is not None:
            timeline.begins(step + 1)
        with profiled(options.profile if step == options.steps - 1 else None):
            losses.take(loop.step(ids))
        if step > 0:  # one step late, as the trainer does, so that the device never waits for it
            read.append(losses.value(step - 1))
            ended_s.append(time.perf_counter())
    read.append(losses.value(options.steps - 1))
    times = [end - start for start, end in itertools.pairwise(ended_s)]
    stalls = {} if engine is None else engine.take_stalls()
    bound = {} if timeline is None else timeline.close(options.trace, options.shape)
    if options.also or options.through_host:

        def train(number: int, rows: int) -> torch.Tensor:
            return loop.step(batch(tokens, number, rows, options.sequence).cuda())

        told["also"] = cards_here.measured_also(
            train, options.also or [options.batch], options.cards, through_host=options.through_host
        )
    if plan is not None and plan.several_cards:
        told |= cards_here.told_of_cards(plan)
    return report(options, parameters, engine, plan, times, read) | {
        "imports_s": round(imports_s, 1),
        "setup_s": round(setup_s, 1),
        "parameters_trained": parameters,
        **told,
        "last_step_stalls_s": {k: round(v, 3) for k, v in stalls.items()},
        **bound,
    }


def made(
    model: Qwen2ForCausalLM, options: argparse.Namespace
) -> tuple[Loop, Engine | None, Placement | None, dict[str, Any]]:
    """The loop, FluxTrain's engine and plan where it is FluxTrain, and what is to be said: whose
    kernels run, and what the plan rests on."""
    rate = options.learning_rate
    if options.engine == "flux":
        kernels = choose_kernels(options.kernels, model, "cuda").value
        engine, plan, told = wrapped(model, options)
        loop = FluxLoop(model, engine, rate, in_backward=options.in_backward, passes=options.passes)
        return loop, engine, plan, {"kernels": kernels, **told}
    kernels = with_fused_loss(model) if options.kernels != "torch" else "torch"
    if options.engine == "resident":
        return ResidentLoop(model, rate), None, None, {"kernels": kernels}
    if options.engine == "resident-fp32":
        how = {"clipped": not options.unclipped, "masters_off_by": options.masters_off_by}
        return MastersLoop(model, rate, **how), None, None, {"kernels": kernels}
    stage = int(options.engine[-1])
    return DeepSpeedLoop(model, rate, stage, options.batch), None, None, {"kernels": kernels}


def with_fused_loss(model: Qwen2ForCausalLM) -> str:
    """Liger's kernels with its fused head and loss, where liger is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "torch"
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2

    apply_liger_kernel_to_qwen2(model=model)
    return "liger"


def report(
    options: argparse.Namespace,
    parameters: int,
    engine: Engine,
    plan: Placement | None,
    times: list[float],
    losses: list[float],
) -> dict[str, Any]:
    """The row without what is measured from outside."""
    median_s = statistics.median(times[3:])
    world = options.ranks.world
    trained = options.passes * options.batch * options.sequence * world
    row: dict[str, Any] = {
        "engine": options.engine,
        "shape": options.shape,
        "parameters_b": round(parameters / 1e9, 3),
        "batch": options.batch * world,
        "processes": world,
        "params": options.params,
        "passes": options.passes,
        "step_s": round(median_s, 3),
        "tokens_per_s": round(trained / median_s),
        "tflops": round(6 * parameters * trained / median_s / 1e12, 1),
        "losses": list(map(statistics.mean, zip(*options.ranks.gather(losses), strict=True))),
        "times_s": [round(t, 2) for t in times],
    }
    if plan is not None:
        engine.flush()
        row |= {
            "offload": plan.offload,
            "resident_blocks": plan.totals.resident_blocks,
            "device_groups": plan.totals.device_groups,
            "device_first": plan.totals.device_first,
            "blocks": "spread",  # where those on the device stand: compare_plan.py asks
            "chunk_rows": engine.chunk_rows,
            "activations": plan.layout.activations,
            "activations_on_device": plan.layout.activations_on_device,
            "blocks_without_recompute": plan.totals.blocks_without_recompute,
            "slots": plan.slots or None,
            "embedding": plan.layout.embedding,
            "head": plan.layout.head,
            "deferred_moments": plan.deferred_moments,
            "predicted_device_gib": round(plan.device_bytes / GIB, 2),
            "torch_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
            "torch_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
            "predicted_host_gib": round(plan.host_bytes / GIB, 2),
            "states_on_disk": plan.layout.disk_states,
            "disk_busy_s": round(engine.spill.busy_s, 2),  # of all steps
            "disk_gb": [round(engine.spill.read_bytes / 1e9, 1),
                        round(engine.spill.written_bytes / 1e9, 1)],
        }  # fmt: skip
    return row


def batch(tokens: torch.Tensor, step: int, rows: int, length: int) -> torch.Tensor:
    """Rows (rows, length) of text for a step, in one random order, as a training draws them. One
    file behind the other, a step that is the first to meet another kind of text has a loss that
    leaps, and there the last bits of the steps before decide the third digit."""
    whole = tokens[: len(tokens) // length * length].view(-1, length)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    return whole[order[torch.arange(step * rows, (step + 1) * rows) % len(whole)]]


if __name__ == "__main__":
    main()
