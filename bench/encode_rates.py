"""Seconds to encode and decode gradients with each compression on one GPU, beside a copy of them.

    python bench/encode_rates.py --values 67108864

Prints a JSON row for each, with the share of a copy's rate (fp32, read and written once) that both
reach. Nothing is sent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

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
        sent = compressor.encode(rows, draws, agreed)
        encode_s = seconds(lambda: compressor.encode(rows, draws, agreed))  # noqa: B023 - at once
        decode_s = seconds(lambda: compressor.decode(sent, count, agreed))  # noqa: B023
        row |= {"encode_ms": encode_s * 1e3, "decode_ms": decode_s * 1e3}
        row["of_a_copy"] = 2 * copy_s / (encode_s + decode_s)
        print(json.dumps({k: round(v, 3) if type(v) is float else v for k, v in row.items()}))


if __name__ == "__main__":
    main()
