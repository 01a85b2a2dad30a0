"""Makes the runs of this version that later versions are tested with, once at each release:

    python tests/formats/make_runs.py

`full` was killed after two of six steps and `lora` is finished; `base` and `text.txt` are what they
trained, `losses.json` what `full` would have come to. Paths are written as @HERE@, for the tests
copy the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.data.demo import train_tokenizer

FOLDER = Path(__file__).resolve().parent / fluxtrain.__version__
HERE = "@HERE@"
TOLD = ("run.json", "plan.json", "result.json", "events.ndjson", "engine.log",
        "adapter_config.json")  # fmt: skip
STEPS = 6
WORDS = [f"{one} {other} are {one + other}" for one in range(12) for other in range(12)]
SETTINGS = [
    "data.sequence_length=32", "data.held_out=0.1", "train.batch_rows=4",
    "train.checkpoint_every=2", "train.keep_checkpoints=1", "train.learning_rate=0.01",
    "placement.device=cpu",
]  # fmt: skip


def main() -> None:
    """Train both runs; say how large they are."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    _make_model(FOLDER / "base")
    (FOLDER / "text.txt").write_text("\n\n".join(WORDS), encoding="utf-8")
    whole = _train("whole")
    losses = [event["loss"] for event in _events(whole) if event["event"] == "step"]
    (FOLDER / "losses.json").write_text(json.dumps(losses) + "\n", encoding="utf-8")
    shutil.rmtree(whole)
    _train("full", killed=True)
    _train("lora", "method.name=lora", "method.rank=2")
    for path in FOLDER.rglob("*"):
        if path.name in ("timeline.ring", "ctl.sock") or (
            path.is_file() and not path.stat().st_size
        ):
            path.unlink()
        elif path.name in TOLD:
            text = path.read_text(encoding="utf-8").replace(str(FOLDER), HERE)
            path.write_text(text, encoding="utf-8")
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    print(f"{FOLDER}: {size / 1000:.0f} kB")


def _make_model(folder: Path) -> None:
    train_tokenizer(WORDS, folder, 300)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)


# Steps that wait, and a process that is killed as soon as its first checkpoint is there.
KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_pre_hook
register_optimizer_step_pre_hook(lambda *_: time.sleep(0.5))
def watch(place):
    while not place.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
place = Path(sys.argv[-1], "checkpoints", "step-00000002")
threading.Thread(target=watch, args=(place,), daemon=True).start()
from fluxtrain.cli import main
main()
"""


def _train(name: str, *settings: str, killed: bool = False) -> Path:
    chosen = [*SETTINGS, *settings, f"model.path={FOLDER / 'base'}"]
    chosen += [f"data.path={FOLDER / 'text.txt'}", f"train.steps={STEPS}"]
    sets = [part for setting in chosen for part in ("--set", setting)]
    program = ["-c", KILLED] if killed else ["-m", "fluxtrain"]
    command = [sys.executable, *program, "train", *sets, "--run-dir", str(FOLDER / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL)
    assert (done.returncode < 0) if killed else (done.returncode == 0), done.returncode
    return FOLDER / name


def _events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.ndjson").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
