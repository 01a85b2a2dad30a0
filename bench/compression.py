"""Trains one shape with each compression, with and without error feedback, and compares the runs.

    python bench/compression.py --processes 2 --out runs/compression

Each run is `fluxtrain train` with `parallel.mode: fsdp`. The shape is GPT-2's with random weights,
of 32 M parameters in its blocks, on the text and with the tokenizer of the demo. At the end
`fluxtrain compare` tells all of them. For a slow link
start it in a network namespace whose loopback is limited, with NCCL over sockets:

    unshare -rn sh -c 'ip link set lo up;
      tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 50ms;
      NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 python bench/compression.py'
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from fluxtrain.data.demo import demo_files

SHAPES: dict[str, dict[str, int]] = {
    "gpt2-small": {"n_embd": 512, "n_layer": 10, "n_head": 8, "n_positions": 512},
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
PLAIN: dict[str, dict[str, Any]] = {
    "bf16": {}, "none": {}, "int8": {}, "int8_sum": {}, "fp8": {}, "qsgd": {}, "nc": {},
    "onebit": {}, "signsgd": {}, "topk": {}, "randomk": {}, "thresholdv": {}, "sketch": {},
    "gradiveq": {}, "powersgd": {}, "hybrid": {},
}  # fmt: skip
FED_BACK: dict[str, dict[str, Any]] = {
    "int8": {}, "int8_sum": {}, "fp8": {}, "qsgd": {}, "nc": {}, "onebit": {}, "topk": {},
    "randomk": {"scale": False}, "thresholdv": {}, "gradiveq": {}, "powersgd": {}, "hybrid": {},
}  # fmt: skip


def main() -> int:
    """Run the matrix; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="gpt2-small", choices=SHAPES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="of a step, over all processes")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--profile", type=int, default=3, help="steps; 0: none")
    parser.add_argument("--methods", nargs="*", help="of these alone")
    parser.add_argument("--plain", action="store_true", help="without error feedback alone")
    parser.add_argument("--out", type=Path, default=Path("runs/compression"))
    asked = parser.parse_args()
    model = random_model(asked.shape, asked.out / "model")
    runs = []
    for name, options in matrix(asked.methods, plain=asked.plain):
        for seed in range(asked.seeds):
            label = f"{name}{'-feedback' * bool(options.get('error_feedback'))}-{seed}"
            run = asked.out / label
            if not (run / "results.jsonl").exists():
                shutil.rmtree(run, ignore_errors=True)
                code = trained(asked, model, run, name, options, seed)
                if code:
                    print(f"{label} ended with code {code}", file=sys.stderr, flush=True)
                    continue
            runs.append(run)
    return subprocess.call([sys.executable, "-m", "fluxtrain", "compare", *map(str, runs)])


def matrix(names: list[str] | None, *, plain: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return each method with its options, without and, if not `plain`, with error feedback."""
    fed = [] if plain else [(name, {**o, "error_feedback": True}) for name, o in FED_BACK.items()]
    return [one for one in [*PLAIN.items(), *fed] if not names or one[0] in names]


def random_model(shape: str, folder: Path) -> Path:
    """Write a model with random weights and the demo's tokenizer; once."""
    if not (folder / "config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(demo_files().tokenizer)
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            **SHAPES[shape],
        )  # fmt: skip
        GPT2LMHeadModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def trained(
    asked: argparse.Namespace,
    model: Path,
    run: Path,
    name: str,
    options: dict[str, Any],
    seed: int,
) -> int:
    """Make one run; return its exit code."""
    settings = {
        "model.path": model, "data.path": demo_files().corpus, "data.held_out": 0.02,
        "data.sequence_length": asked.sequence, "train.steps": asked.steps,
        "train.batch_rows": asked.rows, "train.learning_rate": 5e-4, "train.seed": seed,
        "data.seed": seed, "train.evaluate_every": max(1, asked.steps // 4),
        "train.checkpoint_every": "end", "parallel.mode": "fsdp",
        "parallel.processes": asked.processes,
    }  # fmt: skip
    words = [f"--set={key}={value}" for key, value in settings.items()]
    words += ["--comm_compress", name, "--comm_config_json", json.dumps(options)]
    words += ["--profile", str(asked.profile)] if asked.profile else []
    command = [sys.executable, "-m", "fluxtrain", "train", "--run-dir", str(run), *words]
    return subprocess.call(command, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
