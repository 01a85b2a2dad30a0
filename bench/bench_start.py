"""How long a QLoRA run takes from its files to its first step, and again from its packed cache.

    python bench/bench_start.py --layers 8 --out DIR

Writes a slice of a 70B Llama (random weights, bf16) and trains two steps of it three times: with
its files out of the system's memory, with the packed cache that the first run left, and with that
out of the system's memory too. The disk's rate is taken beside, by as many readers as there are
files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from children import run_python
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fluxtrain.data.demo import demo_files

SHAPES = yaml.safe_load(Path(__file__).with_name("lora_shapes.yaml").read_text())


def main() -> None:
    """Print the disk's rate and the seconds of each run's phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shape", default="70b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget-gib", type=float, default=22.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = options.out / "model"
    if not model.exists():
        write_model(options, model)
    files = sorted(model.glob("*.safetensors"))
    print(f"files: {told_of_disk(files)}")
    forget(files)
    cache = options.out / "cache"
    run(options, model, "first", cache)
    run(options, model, "from the cache", cache)
    packed = [path for path in cache.rglob("*") if path.is_file()]
    print(f"cache: {told_of_disk(packed)}")
    forget([*packed, *files])
    run(options, model, "from the cache on disk", cache)


def write_model(options: argparse.Namespace, folder: Path) -> None:
    """Random weights and the demo's tokenizer."""
    shape = {**SHAPES[options.shape], "num_hidden_layers": options.layers}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=0, pad_token_id=0))
    model.save_pretrained(folder, max_shard_size="4GB")
    torch.set_default_dtype(torch.float32)
    AutoTokenizer.from_pretrained(demo_files().tokenizer).save_pretrained(folder)
    del model
    if options.device == "cuda":
        torch.cuda.empty_cache()


def forget(files: Sequence[Path]) -> None:
    """Let the system forget what it holds of the files in memory."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def told_of_disk(files: Sequence[Path]) -> str:
    """Bytes of the files, and what reading all of them from disk takes."""
    forget(files)
    started_s = time.perf_counter()
    readers = [
        subprocess.Popen(["dd", f"if={path}", "of=/dev/null", "bs=16M"], stderr=subprocess.DEVNULL)
        for path in files
    ]
    for reader in readers:
        reader.wait()
    took_s = time.perf_counter() - started_s
    size_bytes = sum(path.stat().st_size for path in files)
    return f"{size_bytes / 1e9:.2f} GB, from disk in {took_s:.1f} s"


def run(options: argparse.Namespace, model: Path, name: str, cache: Path) -> None:
    """Train, and print when each phase began, from the start of the process."""
    folder = options.out / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "data": {"path": "demo", "sequence_length": 512},
        "method": {"name": "qlora", "base": "nf4-double"},
        "train": {"steps": 2, "batch_rows": 2, "checkpoint_every": "end"},
        "placement": {"device": options.device},
    }
    if options.device == "cuda":
        config["placement"]["budget_gib"] = options.budget_gib
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    began_s = time.time()
    with (folder / "train.log").open("wb") as log:
        arguments = ["train", str(folder / "config.yaml"), "--run-dir", str(folder / "run")]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        code = run_python(["-m", "fluxtrain", *arguments], stdout=log, environment=environment)
    events = map(json.loads, (folder / "run" / "events.ndjson").read_text().splitlines())
    phases = [event for event in events if event["event"] == "phase"]
    seconds = [
        f"{one['detail'] or one['phase']} {one['wall_s'] - began_s:.1f} s" for one in phases[:3]
    ]
    print(f"{name} (exit {code}): {', '.join(seconds)}", flush=True)


if __name__ == "__main__":
    main()
