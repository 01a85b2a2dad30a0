"""Seconds to encode and decode gradients with each compression on one GPU, beside a copy of them.

    python bench/encode_rates.py --values 67108864

Prints a JSON row for each: the share of a copy's rate (fp32 read and written once) that encoding
and decoding reach, and both as torch runs them without compiling. Nothing is sent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from fluxtrain.parallel.compress.exchange import fused
from fluxtrain.parallel.compress.registry import COMPRESSORS, method_named

WARM, REPEATS = 3, 10


def seconds(work: Callable[[], Any]) -> float:
    """Return the median seconds that `work` takes on the GPU."""
    for _ in range(WARM):
        work()
    taken = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        taken.append(start.elapsed_time(stop) / 1e3)
    return sorted(taken)[REPEATS // 2]


def main() -> None:
    """Measure; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=1 << 26)
    parser.add_argument("--methods", nargs="*", default=list(COMPRESSORS))
    asked = parser.parse_args()
    rows = torch.randn(2, asked.values // 2, device="cuda") * 0.01
    copy_s = seconds(rows.clone)
    count = rows.shape[1]
    for name in asked.methods:
        compressor: Any = method_named(name).compressor.for_ranks(2)
        agreed = 0.0 if (told := compressor.proposal(rows)) is None else float(told)
        draws = torch.Generator("cuda").manual_seed(0)
        row: dict[str, Any] = {"name": name, "values": asked.values, "copy_ms": copy_s * 1e3}
        for kind in ("eager", "fused") if compressor.fuses else ("eager",):
            ways = compressor.encode, compressor.decode
            encode, decode = map(fused, ways) if kind == "fused" else ways
            given = None if compressor.fuses else draws
            sent = encode(rows, given, agreed)
            encode_s = seconds(lambda: encode(rows, given, agreed))  # noqa: B023 - called at once
            decode_s = seconds(lambda: decode(sent, count, agreed))  # noqa: B023
            row[kind] = {
                "encode_ms": round(encode_s * 1e3, 3),
                "decode_ms": round(decode_s * 1e3, 3),
                "of_a_copy": round(2 * copy_s / (encode_s + decode_s), 3),
            }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
