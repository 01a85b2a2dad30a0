"""Predicted against measured: the plans of real trainings, each through the command line.

    python bench/bench_plan.py --device cpu --write     models made on the spot, some minutes
    python bench/bench_plan.py --device cuda --write    shapes of bench/shapes.yaml, some minutes
    python bench/bench_plan.py --device cuda --table families --write    other model families
    python bench/bench_plan.py --device cuda --table lora --write        adapters, packed bases

Each case of bench/plan_cases.yaml is one `fluxtrain train` in a process of its own, with a cache of
its own, so that it tries its block itself right before it trains. What a run predicted was frozen
in plan.json before its first step; what it took is in result.json. `--again N` trains every case N
times and shows the run whose step time is the middle one (a shared machine is noisy). `--write`
puts the table into docs/planner.md. A signal that ends it ends the training, and OUT/table.md says
what was done.

A budget is device memory on a GPU (`budget_gib`). Without one it is host memory (`host_gib`): the
run is in a control group of that size, where one can be made (Linux, by root or a delegated user).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from children import Stopped, compiled_once, run_python, stoppable
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from fluxtrain import _native
from fluxtrain.machine.machine import read_machine

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "planner.md"
TABLES = ("cpu", "cuda", "families", "lora")  # sections of the cases; all but the first on a GPU
MARKS = {
    table: (f"<!-- table of bench_plan.py, {table} -->", f"<!-- end of {table} -->")
    for table in TABLES
}
HEAD = (
    "| case | budget | layout (groups + resident blocks) | device, predicted / measured | host "
    "| seconds a step |\n|---|---|---|---|---|---|"
)
GIB = 1 << 30
# The memory controller's own group, or the whole tree of version 2.
CONTROLLERS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
TEXT_BYTES = 2 << 20
LIMITS = {  # of the error, by quantity and device
    "device_peak_bytes": {"cuda": 0.05, "cpu": 0.05},
    "host_peak_bytes": {"cuda": 0.05, "cpu": 0.05},
    "step_s": {"cuda": 0.15, "cpu": 0.25},
}


def write_text(folder: Path) -> Path:
    """The standard library's own source as one training text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n\n".join(p.read_text(errors="ignore") for p in sorted(library.glob("*.py")))
    path = folder / "text.txt"
    path.write_text(text[:TEXT_BYTES], encoding="utf-8")
    return path


def write_model(shape: dict[str, Any], dtype: str, device: str, text: Path, folder: Path) -> None:
    """A model folder with random weights and a tokenizer of 4,000 entries."""
    tokenizer = ByteLevelBPETokenizer()
    ends = ["<|endoftext|>"]
    tokenizer.train([str(text)], vocab_size=4000, special_tokens=ends, show_progress=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def config_of(shape: dict[str, Any]) -> PreTrainedConfig:
    """The transformers configuration of a shape: Qwen2's unless it names another type."""
    kind = shape.get("model_type", "qwen2")
    sizes = {key: value for key, value in shape.items() if key != "model_type"}
    return AutoConfig.for_model(kind, **sizes, eos_token_id=0, bos_token_id=0, pad_token_id=0)


def configuration(case: dict[str, Any], device: str, steps: int, text: Path) -> dict[str, Any]:
    """What `fluxtrain train` is told."""
    placement: dict[str, Any] = {
        key: case[key] for key in ("offload", "device_groups", "resident_blocks") if key in case
    }
    placement |= {"chunk_rows": case["chunk"]} if "chunk" in case else {}
    placement |= {"budget_gib": case["budget_gib"]} if "budget_gib" in case else {}
    return {
        **({"method": case["method"]} if "method" in case else {}),
        "model": {"path": case["model"]},
        "data": {"path": str(text), "sequence_length": case["sequence"]},
        "train": {
            "steps": steps,
            "batch_rows": case["batch"],
            "accumulation": case.get("accumulation", 1),
            "evaluate_every": "end",
            "checkpoint_every": "end",
            **case.get("train", {}),
        },
        "placement": {"device": device, **placement},
    }


def run(case: dict[str, Any], device: str, steps: int, text: Path, folder: Path) -> dict[str, Any]:
    """Train one case; its plan and its result, or what went wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(configuration(case, device, steps, text)), encoding="utf-8"
    )
    command = ["-m", "fluxtrain", "train", str(folder / "config.yaml")]
    started_s = time.monotonic()
    with (folder / "train.log").open("wb") as log, memory_group(case.get("host_gib")) as group:
        code = run_python(
            [*command, "--run-dir", str(folder / "run")],
            stdout=log,
            environment={
                **os.environ,
                **compiled_once(folder.parent / "bytecode", os.environ),
                "XDG_CACHE_HOME": str(folder / "cache"),
            },
            group=group,
        )
    case = {**case, "limited": group is not None}
    seconds = time.monotonic() - started_s
    if code:
        tail = (folder / "train.log").read_text().splitlines()[-3:]
        return {"case": case, "exit_code": code, "seconds": seconds, "log": tail}
    plan = json.loads((folder / "run" / "plan.json").read_text())
    result = json.loads((folder / "run" / "result.json").read_text())
    shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    shutil.rmtree(folder / "run" / "model", ignore_errors=True)
    return {
        "case": case,
        "exit_code": 0,
        "seconds": seconds,
        "load": os.getloadavg()[0],
        "plan": plan,
        "result": result,
        "steps": _step_phases(folder / "run" / "events.ndjson"),
    }


@contextmanager
def memory_group(limit_gib: float | None) -> Iterator[Path | None]:
    """A control group for processes of `limit_gib`, gone afterwards; None where there is none."""
    made = None if limit_gib is None else _made_group(int(limit_gib * GIB))
    try:
        yield made
    finally:
        if made is not None:
            made.rmdir()


def _made_group(limit_bytes: int) -> Path | None:
    for controller in CONTROLLERS:
        group = controller / f"fluxtrain-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (group / name).exists():
                (group / name).write_text(str(limit_bytes))
                return group
        group.rmdir()
    return None


def _step_phases(journal: Path) -> list[dict[str, Any]]:
    """Seconds of some steady steps by phase and stall, to look for what a forecast misses."""
    events = (json.loads(line) for line in journal.read_text().splitlines())
    steps = [event for event in events if event.get("event") == "step"]
    keys = ("step", "step_s", "phases_s", "stalls_s")
    return [{key: step[key] for key in keys} for step in steps[-5:]]


def middle_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose step time is the median; a failed one is shown first."""
    failed = [one for one in runs if one["exit_code"]]
    if failed:
        return failed[0]
    return sorted(runs, key=lambda one: _rows(one)["step_s"]["measured"])[(len(runs) - 1) // 2]


def _rows(one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["quantity"]: row for row in one["result"]["plan"]}


def line(one: dict[str, Any], device: str) -> str:
    """One row of the table."""
    case = one["case"]
    name = f"{case['shape']}, {case['batch']} x {case['sequence']}"
    if "accumulation" in case:
        name += f" x {case['accumulation']}"
    told = {**case.get("method", {}), **case.get("train", {})}
    for key, value in told.items():
        name += f", {value}" if key == "name" else f", {key.replace('_', ' ')} {value}"
    limit = _budget(case)
    if one["exit_code"]:
        return f"| {name} | {limit} | failed with {one['exit_code']}: {one['log'][-1]} | | | |"
    plan = one["plan"]
    where = f"{plan['offload']}, {plan['device_groups']}+{plan['resident_blocks']}"
    where += f", chunk {plan['chunk_rows']}"
    cells = [name, limit, where]
    for quantity, row in _rows(one).items():
        cells.append(_cell(quantity, row, LIMITS[quantity][device]))
    return f"| {' | '.join(cells)} |"


def _budget(case: dict[str, Any]) -> str:
    if "budget_gib" in case:
        told = f"{case['budget_gib']} GiB"
    elif case.get("limited"):
        told = f"{case['host_gib']} GiB host"
    else:
        return "what is free"  # no group could be made, so nothing was limited
    return told if case["fills"] else f"{told}, mostly left free"


def machine(device: str, loads: list[float]) -> str:
    """What the table was measured on, and how busy it was with everything together."""
    facts = read_machine()
    words = [datetime.now(UTC).date().isoformat(), facts.line(), f"torch {torch.__version__}"]
    words += [f"transformers {transformers.__version__}", f"{torch.get_num_threads()} threads"]
    if device == "cpu":
        words.append(f"kernels {_native.isa()}")
    if loads:
        words.append(f"load average {min(loads):.1f} to {max(loads):.1f}")
    return ", ".join(words) + "."


def write_docs(table: str, which: str, docs: Path = DOCS) -> None:
    """Put the table between its marks; a new one behind the tables that are there."""
    begin, end = MARKS[which]
    text = docs.read_text(encoding="utf-8")
    if begin not in text:
        at = max(text.rfind(last) + len(last) for _, last in MARKS.values() if last in text)
        docs.write_text(f"{text[:at]}\n\n{begin}{end}{text[at:]}", encoding="utf-8")
    before, rest = docs.read_text(encoding="utf-8").split(begin, 1)
    after = rest.split(end, 1)[1]
    docs.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}", encoding="utf-8")


def _cell(quantity: str, row: dict[str, Any], limit: float) -> str:
    if row["error"] is None:
        return "-"
    scale, unit = (GIB, "GiB") if quantity.endswith("bytes") else (1.0, "s")
    verdict = "" if abs(row["error"]) <= limit else " MISSED"
    values = f"{row['predicted'] / scale:.3f} / {row['measured'] / scale:.3f} {unit}"
    return f"{values} ({row['error']:+.1%}{verdict})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--table", choices=TABLES, help="which cases; those of the device")
    parser.add_argument("--out", type=Path, default=Path("build/bench-plan"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--again", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--cases", type=Path, default=HERE / "plan_cases.yaml")
    parser.add_argument("--write", action="store_true", help="into docs/planner.md")
    return parser.parse_args()


def main() -> None:
    """Write the models, train the cases, print the table; details go to OUT/plan.json."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    which = options.table or options.device
    wanted = yaml.safe_load(options.cases.read_text())[which]
    shapes = wanted.get("shapes") or yaml.safe_load((HERE / "shapes.yaml").read_text())
    cases = wanted["cases"]
    numbers = [i for i in range(len(cases)) if options.only is None or i in options.only]
    done: list[dict[str, Any]] = []
    lines: list[str] = []
    stopped: Stopped | None = None
    print(HEAD)
    try:
        with stoppable():
            text = write_text(options.out)
            for number in numbers:
                runs = measured(cases[number], number, shapes, text, options)
                done += runs
                lines.append(line(middle_of(runs), options.device))
                print(lines[-1], flush=True)
                (options.out / "plan.json").write_text(json.dumps(done, indent=1))
    except Stopped as error:
        stopped = error
    told = machine(options.device, [run["load"] for run in done if "load" in run])
    if stopped is not None:
        told += f" Ended by {stopped} with {len(lines)} of {len(numbers)} cases done."
    table = "\n".join([told, "", HEAD, *lines])
    (options.out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(told)
    if stopped is not None:
        sys.exit(stopped.exit_code)
    if options.write:
        write_docs(table, which)


def measured(
    case: dict[str, Any],
    number: int,
    shapes: dict[str, Any],
    text: Path,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Train one case `--again` times, with a model that is made unless it is there."""
    default = "bfloat16" if options.device == "cuda" else "float32"
    dtype = case.get("dtype", default)
    folder = options.out / f"model-{case['shape']}-{dtype}"
    if not folder.exists():
        made = folder.with_suffix(".unfinished")
        write_model(shapes[case["shape"]], dtype, options.device, text, made)
        made.rename(folder)
    case["model"] = str(folder)
    place = options.out / f"case-{number}"
    return [run(case, options.device, options.steps, text, place) for _ in range(options.again)]


if __name__ == "__main__":
    main()
