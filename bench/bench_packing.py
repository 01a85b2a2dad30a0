"""How fast weights are packed and unpacked on the host, beside bitsandbytes' own CPU code.

    python bench/bench_packing.py [--threads 1 2] [--isas avx2 avx512]

One bf16 weight of a large model. Rates are of the fastest of some rounds, as other programs only
slow a round down; without bitsandbytes its rows are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.core.quantization.layout import PackedLayout
from fluxtrain.core.quantization.packing import pack, unpack
from fluxtrain.plan.states import PACKED_FORMATS

HEAD = "isa      threads  format        pack   unpack   Gparam/s"


def rate(elements: int, run: Callable[[], object], rounds: int) -> float:
    """Return 1e9 elements a second of the fastest round."""
    run()
    seconds = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return elements / min(seconds) / 1e9


def ours(weight: Tensor, isa: str, threads: int, rounds: int) -> None:
    """Print the rates of each format."""
    for format in PACKED_FORMATS:
        layout = PackedLayout.of(format, [weight.shape])
        packed = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        dense = torch.zeros(layout.elements, dtype=weight.dtype)
        packing = rate(weight.numel(), lambda: pack(layout, 0, weight, packed), rounds)  # noqa: B023
        unpacking = rate(weight.numel(), lambda: unpack(layout, packed, dense), rounds)  # noqa: B023
        print(f"{isa:<9}{threads:<9}{format:<12}{packing:>6.2f}{unpacking:>9.2f}", flush=True)


def theirs(weight: Tensor, threads: int, rounds: int) -> None:
    """Print the rates of bitsandbytes for nf4 and nf4-double."""
    try:
        import bitsandbytes.functional as bnb
    except ImportError:
        return
    for format, nested in (("nf4", False), ("nf4-double", True)):
        codes, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
        packing = rate(
            weight.numel(),
            lambda: bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested),  # noqa: B023
            rounds,
        )
        unpacking = rate(weight.numel(), lambda: bnb.dequantize_4bit(codes, state), rounds)  # noqa: B023
        print(f"bnb      {threads:<9}{format:<12}{packing:>6.3f}{unpacking:>9.3f}", flush=True)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--isas", nargs="+", default=list(_native.ISA_NAMES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=4096)
    options = parser.parse_args()
    weight = (torch.randn(options.rows, 14336) * 0.02).bfloat16()
    print(HEAD)
    for threads in options.threads:
        torch.set_num_threads(threads)
        for isa in options.isas:
            if _native.set_isa(isa) == isa:
                ours(weight, isa, threads, options.rounds)
        theirs(weight, threads, min(options.rounds, 3))


if __name__ == "__main__":
    main()
