"""Tokens a second of answers that share passes, beside `fluxtrain generate --prompts` of the same.

python bench/bench_serve.py MODEL --budget-gib 12
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time

from fluxtrain.events.answers.asking import FLUXTRAIN, Talk
from fluxtrain.events.answers.generation import Answered, Ask, Ready, read_event

PROMPT = "Write down what comes to your mind about rivers, and do not stop. "


async def asked(model: str, options: list[str], counts: list[int], tokens: int) -> dict[int, float]:
    """Return the tokens a second of each number of questions that are asked for at once."""
    talk = await Talk.begin(model, *options)
    events = talk.events()
    while not isinstance(await anext(events), Ready):
        pass
    rates: dict[int, float] = {}
    for rows in counts:
        for most in (2, tokens):  # first a pass of so many rows, as before the file's answers
            begun_s, answers = time.perf_counter(), list[Answered]()
            for number in range(rows):
                name, prompt = f"{rows}-{most}-{number}", f"{PROMPT}{number}"
                await talk.ask(Ask(id=name, prompt=prompt, max_new_tokens=most, temperature=0))
            while len(answers) < rows:
                if isinstance(event := await anext(events), Answered):
                    answers.append(event)
        rates[rows] = sum(one.tokens for one in answers) / (time.perf_counter() - begun_s)
    await talk.close()
    return rates


def from_file(model: str, options: list[str], rows: int, tokens: int) -> float:
    """Return the tokens a second of the same questions in a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(f"{PROMPT}{number}") + "\n" for number in range(rows))
        file.flush()
        more = ["--prompts", file.name, "--rows", str(rows), "--max-new-tokens", str(tokens)]
        command = [*FLUXTRAIN, "generate", model, *options, *more, "--temperature", "0", "--json"]
        told = subprocess.run(command, capture_output=True, check=True).stdout
    events = [read_event(line) for line in told.splitlines()]
    answers = [event for event in events if isinstance(event, Answered)]
    return sum(one.tokens for one in answers) / answers[0].seconds


def main() -> None:
    """Print a row for each number of questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=32)
    given, options = parser.parse_known_args(sys.argv[1:])
    print(f"{'rows':>5} {'asked, tokens/s':>16} {'file, tokens/s':>15}")
    counts = [int(rows) for rows in given.rows.split(",")]
    served = asyncio.run(asked(given.model, options, counts, given.tokens))
    for rows in counts:
        read = from_file(given.model, options, rows, given.tokens)
        print(f"{rows:>5} {served[rows]:>16.2f} {read:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
