"""Makes or reads cached tokens, in a process that a test may kill: folder, cache, tokenizer."""

from __future__ import annotations

import sys
import time

from transformers import AutoTokenizer

from fluxtrain.data.encoding import encode
from fluxtrain.data.prepare import DataSource, ModelLimits, PreparedData, prepare
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.store import shards

SMALL = (1400, 2800)  # tokens of a shard, which rows are packed within, and characters of a batch


def prepared(path: str, cache: str, tokenizer: str) -> PreparedData:
    """Prepare a file with small shards."""
    source = DataSource(
        request=read_request({"path": path}), sequence_length=64, held_out=0.1, token_cache=cache
    )
    return prepare(
        source, AutoTokenizer.from_pretrained(tokenizer), ModelLimits(embedding_rows=320)
    )


def digest(data: PreparedData) -> str:
    """Hash every row of both parts."""
    return f"{data.trained.fingerprint()} {data.held_out.fingerprint()} {data.tokens}"


if __name__ == "__main__":
    shards.SHARD_TOKENS, encode.BATCH_CHARACTERS = SMALL
    print("ready", time.monotonic(), flush=True)
    print(digest(prepared(*sys.argv[1:4])), flush=True)
