"""Several GPUs for `bench_gpu.py`: their plan, a card that is slowed, copies through the host."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fluxtrain.core.device import multi_gpu_streams
from fluxtrain.core.wrap.engine import Engine
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.request import Order, ParallelRequest, RunRequest
from fluxtrain.train.placing import cards as planning

_SIZE = 6144  # of the products that slow a card down: half a millisecond, far above a launch


def planned_on_cards(
    facts: ModelFacts,
    request: RunRequest,
    rates: Rates | None,
    number: int,
    order: Order,
    budget_bytes: int,
    host_available_bytes: int | None,
) -> Placement:
    """Plan for so many cards of `budget_bytes` each, as the trainer does; all of them are taken."""
    cards = tuple(
        CardCapacity(index=index, name=torch.cuda.get_device_name(index), free_bytes=budget_bytes)
        for index in range(number)
    )
    capacity = CardsCapacity(cards=cards, host_available_bytes=host_available_bytes)
    known = None if rates is None else planning.rates_of_cards(capacity, rates)
    return place(facts, capacity, request, ParallelRequest(cards=number, order=order), rates=known)


def told_of_cards(plan: Placement) -> dict[str, Any]:
    """What each card was predicted to take, and took."""
    return {
        "cards": [
            {
                "blocks": card.blocks,
                "predicted_gib": round(card.device_bytes / 2**30, 2),
                "peak_gib": round(torch.cuda.max_memory_allocated(card.index) / 2**30, 2),
            }
            for card in plan.cards
        ]
    }


def copy_through_host(number: int) -> None:
    """Let no card of this process copy to another directly, as where peers cannot reach."""
    pairs = itertools.permutations(range(number), 2)
    multi_gpu_streams._peers.update(dict.fromkeys(pairs, False))


def measured_also(
    step: Callable[[int, int], Any], batches: list[int], number: int, *, through_host: bool
) -> list[dict[str, Any]]:
    """Seconds a step (median of all but the first) of further batches with the plan that is there,
    and of the last one once more without copies between the cards. `step` trains step n of so many
    rows; its loss can be read."""
    told: list[dict[str, Any]] = []
    rows = [(rows, False) for rows in batches]
    for batch, by_host in [*rows, *[(rows[-1][0], True)] * through_host]:
        if by_host:
            torch.cuda.synchronize()
            copy_through_host(number)
        times = []
        for at in range(5):
            started_s = time.perf_counter()
            float(step(100 + at, batch))
            times.append(time.perf_counter() - started_s)
        step_s = statistics.median(times[1:])
        told.append({"batch": batch, "through_host": by_host, "step_s": round(step_s, 3)})
    return told


def plan_with_slow_card(card: int, speed: float) -> None:
    """Let what is measured of a card before the plan be that of a slower one."""
    measured = planning._product_s

    def slower(index: int) -> float:
        return measured(index) / (speed if index == card else 1.0)

    planning._product_s = slower  # type: ignore[assignment]


def slow_down(engine: Engine, card: int, speed: float) -> None:
    """Let each chunk of a block on a card take 1 / `speed` of its time, by products that nobody
    needs beside it; clocks stay as they are. The time of a chunk is measured at the
    first, the second time that it runs: the first may compile kernels."""
    device = torch.device("cuda", card)
    left = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16)

    def products(count: int) -> None:
        for _ in range(count):
            left @ left

    def seconds(run: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    with torch.cuda.device(device):
        products(4)
        one_s = seconds(lambda: products(16)) / 16
    for unit in engine.units:
        if unit.group.kind != "block" or unit.card != card:
            continue
        original, counted = unit.original, list[int]()

        def slowed(
            *args: Any, original: Any = original, counted: list[int] = counted, **kwargs: Any
        ) -> Any:
            if not counted:
                torch.cuda.synchronize(device)
                with torch.no_grad():
                    original(*args, **kwargs)
                    took_s = seconds(lambda: original(*args, **kwargs))
                counted.append(max(1, round(took_s * (1 / speed - 1) / one_s)))
            # a forward is recomputed once, and its backward takes as long as two
            products(counted[0] if not torch.is_grad_enabled() else 2 * counted[0])
            return original(*args, **kwargs)

        unit.original = slowed
