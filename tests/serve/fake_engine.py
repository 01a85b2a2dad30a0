"""Stands in for the `fluxtrain` command where a test is not of training: it plans anything, trains
by writing a run's files, and answers with the last words of the prompt. What it does is in the
configuration's `samples.prompts`, a list of words."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fluxtrain.events.answers.generation import Answered, Mounted, Ready, Refused, Text, encoded
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import CommandAnswered, Done, Failed, Hello, StepFinished
from fluxtrain.events.run_folder.control import ControlServer
from fluxtrain.events.run_folder.run_dir import RunDir

STEPS = 4


def plan(path: str) -> None:
    layout = {
        "offload": "none", "device_groups": 0, "device_first": "embedding", "resident_blocks": 2,
        "blocks_without_recompute": 0, "activations": "auto", "activations_on_device": 0,
        "batch_rows": 1, "chunk_rows": 1, "embedding": "device", "head": "device",
        "deferred_moments": False,
    }  # fmt: skip
    words = _words(path)
    if "--machine" in sys.argv:
        Path(sys.argv[sys.argv.index("--machine") + 1]).read_text()
    if "too-large" in words or ("beside-no-worker" in words and _worker_runs()):
        print("error: it needs 9 GiB and 1 GiB is free: shorten the sequence", file=sys.stderr)
        sys.exit(3)
    if "too-many-rows" in words:
        print(
            "error: a step takes 40 rows and there are 4: lower train.batch_rows", file=sys.stderr
        )
        sys.exit(2)
    steps = next((int(word[6:]) for word in words if word.startswith("steps-")), STEPS)
    time.sleep(0.2)
    answer = {
        "model": {"name": "fake", "parameters": 1, "blocks": 2, "dtype": "float32"},
        "method": {
            "name": "full", "trained_parameters": 1, "trained_bytes": 4, "frozen_bytes": 0,
            "packed_bytes": 0, "storage": "plain", "saved_bytes": 4,
        },
        "device": "cpu", "layout": layout, "accumulation": 1, "sequence_length": 8, "notes": [],
        "fitting_share": 1.0, "device_bytes": 1, "device_budget_bytes": None, "need": {},
        "host_bytes": 1, "process_bytes": 1, "host_limit_bytes": None, "disk_bytes": 1,
        "checkpoint_bytes": 1, "estimated_rows": 1, "steps": steps, "machine": "",
        "predicted": None, "predicted_because": "", "plans": [], "settings": [], "config": {},
        "choices": [{"name": "train.learning_rate", "value": "0.002", "because": ""}],
    }  # fmt: skip
    print(json.dumps(answer))


def evaluate(folder: str) -> None:
    """The loss of a model is what its trainer was told to write as such."""
    answer = {
        "model": folder, "base": None, "data": "", "perplexity": None, "tokens": 1, "rows": 1,
        "sequence_length": 1, "batch_rows": 1, "dtype": "", "device": "", "placed": "",
        "seconds": 0.1, "notes": [],
        "loss": json.loads(Path(folder, "config.json").read_text())["loss"],
    }  # fmt: skip
    print(json.dumps(answer))


def evaluate_tasks(folder: str, tasks: str) -> None:
    """A model's accuracy is what its loss lacks to one; a folder that is gone is refused."""
    if not Path(tasks).is_dir():
        print("error: it has no task: name the folder", file=sys.stderr)
        sys.exit(2)
    Path(f"{tasks}.pid").write_text(str(os.getpid()))
    while Path(tasks, "waits").exists():
        time.sleep(0.02)
    result = {
        "task": "sums", "metric": "acc", "error": 0.1, "higher_is_better": True, "rows": 3,
        "value": 1 - json.loads(Path(folder, "config.json").read_text())["loss"],
    }  # fmt: skip
    answer = {
        "model": folder, "base": None, "tasks": tasks, "results": [result], "batch_rows": 1,
        "dtype": "", "device": "", "placed": "", "seconds": 0.1,
    }  # fmt: skip
    print(json.dumps(answer))


def _worker_runs() -> bool:
    for one in psutil.Process(os.getppid()).children():
        with suppress(psutil.Error):  # it ends meanwhile
            if "generate" in one.cmdline():
                return True
    return False


def train(path: str, run_dir: str) -> None:
    run, words = RunDir(run_dir), _words(path)
    if "killed-early" in words and not run.holds_run():
        run.path.mkdir(parents=True, exist_ok=True)
        run.pid.touch()
        os.kill(os.getpid(), 9)
    lock = run.lock()
    emitter = Emitter(run.journal, None)
    stopped = []

    def answer(command: str, _: dict[str, Any]) -> tuple[bool, str]:
        stopped.append(command)
        emitter.emit(CommandAnswered(command=command, ok=True, message=""))
        return True, ""

    signal.signal(signal.SIGTERM, lambda *_: stopped.append("SIGTERM"))
    control = ControlServer(run.socket, answer)
    control.start()
    done = run.path / "steps"  # the fake's checkpoint
    first = int(done.read_text()) if done.exists() else 0
    emitter.emit(_hello(run, first))
    code = 0
    for step in range(first + 1, STEPS + 1):
        while "waits" in words and not (run.path / "go").exists() and not stopped:
            time.sleep(0.02)
        if stopped:
            code = 143 if "SIGTERM" in stopped else 130
            break
        emitter.emit(_step(step, words))
        done.write_text(str(step))
        for word in words:
            name, _, number = word.partition("@")
            if name == "killed" and int(number) == step and first < step:
                os.kill(os.getpid(), 9)
            if name.startswith("exit-") and int(number) == step:
                _fail(run, emitter, int(name.removeprefix("exit-")))
    if code == 0:
        loss = next((float(word[5:]) for word in words if word.startswith("loss-")), 1.0)
        run.model.mkdir(exist_ok=True)
        (run.model / "config.json").write_text(json.dumps({"run": run.run_id, "loss": loss}))
    emitter.emit(
        Done(exit_code=code, step=STEPS, seconds=1.0, loss=1.0, evaluation_loss=None,
             model_path=None)
    )  # fmt: skip
    run.write_json(run.result, {"exit_code": code, "loss": 1.0, "evaluation_loss": 0.5})
    control.close()
    emitter.close()
    lock.release()
    sys.exit(code)


def generate(model: str) -> None:
    ready = Ready(
        model=model, base=None, has_template=True, context=None, ends=(), dtype="float32",
        device="cpu", placed="", pass_s=0.1, max_new_tokens=16,
    )  # fmt: skip
    _say(ready)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["kind"] == "mount":
            name = asked["name"]
            bad = Path(asked["path"], "unfit").exists()
            _say(
                Refused(id=name, message="it does not fit")
                if bad
                else Mounted(name=name, mounted=(name,), seconds=0.0)
            )
        if asked["kind"] != "ask":
            continue
        text = asked.get("prompt") or asked["messages"][-1]["content"]
        if text == "die":
            os.kill(os.getpid(), 9)
        if text == "no answer":
            continue
        if text == "refuse":
            _say(Refused(id=asked["id"], message="no"))
            continue
        for word in text.split():
            _say(Text(id=asked["id"], text=f"{word} "))
        _say(
            Answered(id=asked["id"], text=f"{text} ", ended="end", tokens=len(text.split()),
                     prompt_tokens=3, seconds=0.1)
        )  # fmt: skip


def _fail(run: RunDir, emitter: Emitter, code: int) -> None:
    message = f"the fake failed with {code} in {run.log}"
    emitter.emit(Failed(exit_code=code, kind="Fake", message=message))
    run.write_json(run.error, {"exit_code": code, "message": message})
    os._exit(code)


def _hello(run: RunDir, first: int) -> Hello:
    return Hello(
        run_id=run.run_id, run_dir=str(run.path), pid=os.getpid(), pid_start_s=0.0, version="0",
        model="fake", method="full", dtype="float32", device="cpu", machine="", blocks=2,
        parameters=1, trained_parameters=1, total_steps=STEPS, first_step=first,
    )  # fmt: skip


def _step(step: int, words: list[str]) -> StepFinished:
    time.sleep(0.3 if "slow" in words else 0.0)
    return StepFinished(
        step=step, total_steps=STEPS, epoch=0.0, loss=1.0 / step, learning_rate=0.1, grad_norm=1.0,
        tokens=10, total_tokens=10 * step, step_s=0.1, tokens_per_s=100.0, phases_s={}, stalls_s={},
    )  # fmt: skip


def _words(path: str) -> list[str]:
    config = json.loads(Path(path).read_text())
    return list(config.get("samples", {}).get("prompts") or [])


def _say(event: Any) -> None:
    sys.stdout.buffer.write(encoded(event))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "plan":
        plan(rest[1])
    elif command == "evaluate" and "--tasks" in rest:
        evaluate_tasks(rest[1], rest[rest.index("--tasks") + 1])
    elif command == "evaluate":
        evaluate(rest[1])
    elif command == "generate":
        generate(rest[-1])
    else:
        train(rest[0], rest[rest.index("--run-dir") + 1])
