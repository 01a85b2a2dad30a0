"""Log-likelihoods of lm-eval's requests beside the loss of `fluxtrain evaluate`, on the same texts.

    python bench/bench_evaluate.py --shape 7b --budget-gib 12
    python bench/bench_evaluate.py --model FOLDER --rows 16 --device cuda

Prints a JSON row for each of the two, and one with their ratio. Texts have one length in tokens;
seconds are without loading. Without --rows each takes the rows of a pass that it chooses itself.
Options that are not listed go to `fluxtrain evaluate`. Needs the extra `eval`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml
from bench_plan import HERE, write_model, write_text
from transformers import AutoTokenizer

from fluxtrain.events.answers.asking import FLUXTRAIN

TASK = """\
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""


def write_texts(model: Path, source: Path, count: int, length: int, folder: Path) -> int:
    """Write `count` texts of about `length` tokens, and a task of them; return their tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(source.read_text(), add_special_tokens=False).input_ids
    if len(ids) < count * length:
        raise SystemExit(f"{len(ids):,} tokens of text are there: take fewer --texts or --length")
    cuts = [ids[at : at + length] for at in range(0, count * length, length)]
    texts = [tokenizer.decode(cut) for cut in cuts]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text("".join(lines))
    (folder / "texts.yaml").write_text(TASK)
    return sum(len(one) for one in tokenizer(texts, add_special_tokens=False).input_ids)


def evaluated(kind: str, tokens: int | None, options: list[str]) -> dict[str, Any]:
    """Run `fluxtrain evaluate` and return its row. tokens: computed; None: what it reports."""
    command = [*FLUXTRAIN, "evaluate", *options, "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        raise SystemExit(told.stderr)
    answer = json.loads(told.stdout)
    count = answer["tokens"] if tokens is None else tokens
    kept = ("batch_rows", "dtype", "device", "placed", "seconds")
    row = {"kind": kind, "tokens": count, **{key: answer[key] for key in kept}}
    row["tokens_per_s"] = round(count / answer["seconds"], 1)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Make texts, and a model where none is named; see the module."""
    shapes = yaml.safe_load((HERE / "shapes.yaml").read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder; else random weights of --shape")
    parser.add_argument("--shape", choices=shapes, default="7b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--length", type=int, default=512, help="tokens of a text")
    given, more = parser.parse_known_args()
    more += ["--device", given.device]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        source, tasks = write_text(folder), folder / "tasks"
        tasks.mkdir()
        model = given.model or folder / "model"
        if given.model is None:
            write_model(shapes[given.shape], "bfloat16", given.device, source, model)
        tokens = write_texts(model, source, given.texts, given.length, tasks)
        long = ["--sequence-length", str(given.length + 8)]  # a text a row, with its end
        loss = evaluated("loss", None, [str(model), str(tasks / "texts.jsonl"), *long, *more])
        asked = evaluated("log-likelihoods", tokens, [str(model), "--tasks", str(tasks), *more])
    ratio = asked["tokens_per_s"] / loss["tokens_per_s"]
    print(json.dumps({"kind": "ratio", "log_likelihoods_of_loss": round(ratio, 3)}))


if __name__ == "__main__":
    main()
