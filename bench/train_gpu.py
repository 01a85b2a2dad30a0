"""Trains a model shape for real on the GPU, through the command line, and says what it took.

    python bench/train_gpu.py --shape 1.5b --budget-gib 23 --steps 60 --out DIR

A model folder of that shape (random weights, bf16) and a tokenizer trained on the text are written
in Hugging Face format, `fluxtrain train` runs on the source of Python's standard library in a
process of its own, and NVML is asked ten times a second what that process holds. With
`--checkpoint-every N` it says what each checkpoint took of the training beside it; `--cards N`
deals the blocks to so many GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pynvml
import torch
import yaml
from children import Stopped, started_python, stoppable
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fluxtrain.events.events import (
    AnyEvent,
    CheckpointWritten,
    EvaluationFinished,
    StepFinished,
)
from fluxtrain.events.journal import read_events

SHAPES = Path(__file__).with_name("shapes.yaml")
GIB = 1 << 30
TEXT_BYTES = 6 << 20


def write_text(folder: Path) -> Path:
    """The standard library's own source as one training text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n\n".join(p.read_text(errors="ignore") for p in sorted(library.glob("*.py")))
    path = folder / "text.txt"
    path.write_text(text[:TEXT_BYTES], encoding="utf-8")
    return path


def write_model(shape: str, text: Path, folder: Path) -> None:
    """A model folder with random weights and a tokenizer of 8,000 entries."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=8000, special_tokens=["<|endoftext|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    config = Qwen2Config(
        **yaml.safe_load(SHAPES.read_text())[shape], eos_token_id=0, bos_token_id=0, pad_token_id=0
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(before)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def watch(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Peak GPU memory (NVML, context included) and peak host memory of the trainer, bytes."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    others = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    device_bytes = host_bytes = 0
    trainer = psutil.Process(process.pid)
    while process.poll() is None:
        device_bytes = max(device_bytes, pynvml.nvmlDeviceGetMemoryInfo(handle).used - others)
        try:
            host_bytes = max(host_bytes, trainer.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    return device_bytes, host_bytes


def main() -> None:
    """Write the model, train it, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--budget-gib", type=float, default=23.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--cards", type=int, help="GPUs; by default all that help")
    parser.add_argument("--checkpoint-every", type=int, help="steps; by default the end alone")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text = write_text(options.out)
    write_model(options.shape, text, options.out / "model")
    config = options.out / "config.yaml"
    config.write_text(yaml.safe_dump(configuration(options, text)))
    run_dir = options.out / "run"
    arguments = ["-m", "fluxtrain", "train", str(config), "--run-dir", str(run_dir)]
    torch.cuda.synchronize()
    with (
        (options.out / "train.log").open("wb") as log,
        stoppable(),
        started_python(arguments, stdout=log) as process,
    ):
        device_bytes, host_bytes = watch(process)
    tail = (options.out / "train.log").read_text().splitlines()[-4:]
    row = summary(options, run_dir) if process.returncode == 0 else {}
    row |= {
        "exit_code": process.returncode,
        "nvml_peak_gib": round(device_bytes / GIB, 2),
        "host_peak_gib": round(host_bytes / GIB, 2),
        "log": tail,
    }
    print(json.dumps(row, indent=1))


def configuration(options: argparse.Namespace, text: Path) -> dict[str, Any]:
    """What `fluxtrain train` is told."""
    return {
        "model": {"path": str(options.out / "model")},
        "data": {"path": str(text), "sequence_length": options.sequence},
        "train": {
            "steps": options.steps,
            "batch_rows": options.batch,
            "learning_rate": 3e-4,
            "evaluate_every": "end" if options.checkpoint_every else max(1, options.steps // 2),
            "checkpoint_every": options.checkpoint_every or "end",
        },
        "placement": {"offload": options.offload, "budget_gib": options.budget_gib},
        **({"parallel": {"cards": options.cards}} if options.cards else {}),
    }


def checkpoint_costs(events: list[AnyEvent]) -> list[dict[str, Any]]:
    """What each checkpoint took of the training: the seconds between two steps beyond the median,
    added up from its beginning to the step after it was on disk."""
    ends = [e.t_s for e in events if isinstance(e, StepFinished)]
    between = list(itertools.pairwise(ends))
    usual_s = statistics.median(end - begin for begin, end in between[3:] or between)
    told = []
    for written in (e for e in events if isinstance(e, CheckpointWritten)):
        begin_s = written.t_s - written.seconds
        beside = [end - begin for begin, end in between if end > begin_s and begin < written.t_s]
        told.append(
            {
                "step": written.step,
                "gib": round(written.bytes / GIB, 2),
                "written_s": round(written.seconds, 2),
                "held_s": written.held_s,
                "steps_beside": len(beside),
                "cost_s": round(sum(beside) - len(beside) * usual_s, 3),
            }
        )
    return told


def summary(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """The run in numbers, from its own journal and plan."""
    events = list(read_events(run_dir / "events.ndjson"))
    steps = [e for e in events if isinstance(e, StepFinished)]
    plan = msgspec.json.decode((run_dir / "plan.json").read_bytes())
    steady = steps[5:]
    return {
        "shape": options.shape,
        "offload": plan["offload"],
        "predicted_device_gib": round(plan["device_bytes"] / GIB, 2),
        "predicted_host_gib": round(plan["host_bytes"] / GIB, 2),
        "step_s": round(statistics.median(s.step_s for s in steady), 3),
        "tokens_per_s": round(statistics.median(s.tokens_per_s for s in steady)),
        "phases_s": {k: round(v, 3) for k, v in steady[-1].phases_s.items()},
        "stalls_s": {k: round(v, 3) for k, v in steady[-1].stalls_s.items()},
        "loss": [round(s.loss, 3) for s in steps[:: max(1, len(steps) // 12)]],
        "checkpoints": checkpoint_costs(events),
        "evaluations": [round(e.loss, 4) for e in events if isinstance(e, EvaluationFinished)],
        "choices": {c["name"]: f"{c['value']}: {c['because']}" for c in plan["choices"]},
    }


if __name__ == "__main__":
    try:
        main()
    except Stopped as error:
        sys.exit(error.exit_code)
