"""What recording the lanes costs a step: steps with and without it, in turn, in one process.

    python bench/bench_timeline.py                              # on CPU, a minute
    python bench/bench_timeline.py --device cuda --shape 1.5b   # on a GPU, everything streamed

The driving thread's own part is measured apart: all notes of a step, made again without the work.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import yaml
from step_timeline import StepTimeline
from transformers import Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.core.device.cuda_device import open_device
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.events.trace.ring import RingWriter
from fluxtrain.train.observe.timeline import StepCutter

SHAPES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
ROUND = 4  # steps with, then as many without; the first of each round is not counted


def build(shape: str, device: str) -> torch.nn.Module:
    """The wrapped model in bf16 with random weights, all of it streamed."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape])).to(torch.bfloat16).train()
    return fluxtrain.wrap(model, device=device, offload="weights", overlap=True)


def one_step(
    model: torch.nn.Module, engine: Engine, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> None:
    """Forward, backward, clip, update; waits for the backward pass as the trainer does."""
    model(input_ids=ids, labels=ids).loss.backward()
    engine.clip_grad_norm(1.0).value()
    optimizer.step()
    optimizer.zero_grad()


def measure(options: argparse.Namespace) -> tuple[list[float], list[float], int]:
    """Seconds of steps with and without recording, and notes a recorded step makes."""
    model = build(options.shape, options.device)
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, 8000, (options.batch, options.sequence))
    timeline, recorder = StepTimeline(engine), engine.device.recorder
    seconds: dict[bool, list[float]] = {True: [], False: []}
    notes = 0
    for step in range(2 * ROUND * options.rounds):
        recording, fresh = step // ROUND % 2 == 0, step % ROUND == 0
        if recording:
            timeline.begins(step + 1)
        else:
            recorder.end_step()
        started_s, before = time.perf_counter(), len(recorder.notes)
        one_step(model, engine, optimizer, ids)
        took_s = time.perf_counter() - started_s
        if recording:
            notes = max(notes, len(recorder.notes) - before)
        if not fresh and step >= 2 * ROUND:
            seconds[recording].append(took_s)
    print(timeline.close(options.trace))
    return seconds[True], seconds[False], notes


def own_seconds(device: str, notes: int) -> tuple[float, float]:
    """Host seconds of a step of `notes` computations without the work: of the driving thread that
    notes them, and of the timeline's thread that learns their times, cuts and writes the step."""
    recorder = open_device(torch.device(device)).recorder
    cutter = StepCutter(recorder)
    noting: list[float] = []
    cutting: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        ring = RingWriter(Path(folder) / "timeline.ring")
        for step in range(1, 12):
            started_s = time.perf_counter()
            recorder.begin_step(step)
            for i in range(notes):
                recorder.computed("forward", f"model.layers.{i}", recorder.instant())
            noting.append(time.perf_counter() - started_s)
            recorder.end_step()
            if device == "cuda":
                torch.cuda.synchronize()
            started_s = time.perf_counter()
            for one in cutter.ready():
                ring.write(one)
            cutting.append(time.perf_counter() - started_s)
        ring.close()
    return statistics.median(noting), statistics.median(cutting)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--trace", type=Path, help="write the recorded steps there")
    options = parser.parse_args()
    recorded, plain, notes = measure(options)
    with_s, without_s = statistics.median(recorded), statistics.median(plain)
    noting_s, cutting_s = own_seconds(options.device, notes)
    print(f"recorded   {with_s * 1e3:9.2f} ms a step (median of {len(recorded)})")
    print(f"not        {without_s * 1e3:9.2f} ms a step (median of {len(plain)})")
    print(f"difference {(with_s / without_s - 1) * 100:9.2f} %")
    for who, own_s in (("driving thread", noting_s), ("timeline thread", cutting_s)):
        print(
            f"{notes} notes, {who}: {own_s * 1e6:.0f} us, {own_s / without_s * 100:.3f} % of a step"
        )


if __name__ == "__main__":
    main()
