"""Tokens and the likeliest next ones by llama.cpp: run by the Python of `make soak` that has it."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp  # type: ignore[import-not-found]


def main(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a text, and the log-probabilities behind a prompt of tokens."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(next(folder.glob("*.gguf")))
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 64, 1, False
    server = xllamacpp.Server(parameters)

    def post(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    tokens = post("/tokenize", {"content": asked["text"], "add_special": False})["tokens"]
    next_one = {"prompt": asked["prompt"], "n_predict": 1, "n_probs": 5, "temperature": -1}
    found = post("/completion", next_one)["completion_probabilities"][0]["top_logprobs"]
    return {"tokens": tokens, "top": [[one["id"], one["logprob"]] for one in found]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.stdin.read()))))
