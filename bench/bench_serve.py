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


async def asked(model: str, options: list[str], rows: int, tokens: int) -> float:
    """Return the tokens a second of `rows` questions that are asked for at once."""
    talk = await Talk.begin(model, *options)
    answers: list[Answered] = []
    begun_s = 0.0
    async for event in talk.events():
        if isinstance(event, Ready):
            begun_s = time.perf_counter()
            for number in range(rows):
                prompt = f"{PROMPT}{number}"
                await talk.ask(
                    Ask(id=str(number), prompt=prompt, max_new_tokens=tokens, temperature=0)
                )
        elif isinstance(event, Answered):
            answers.append(event)
            if len(answers) == rows:
                break
    taken_s = time.perf_counter() - begun_s
    await talk.close()
    return sum(one.tokens for one in answers) / taken_s


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
    for rows in map(int, given.rows.split(",")):
        served = asyncio.run(asked(given.model, options, rows, given.tokens))
        read = from_file(given.model, options, rows, given.tokens)
        print(f"{rows:>5} {served:>16.2f} {read:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
