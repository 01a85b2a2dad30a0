"""A machine from a file, to plan for one that is not here.

What `fluxtrain probe --json` prints is such a file. The least is

    {"machine": {"memory_total_bytes": 68719476736, "gpus": [{"memory_total_bytes": 25757220864}]},
     "rates": {"gpu_matmul": 1.6e14, "adamw": 1.5e9, "h2d_pinned": 2.5e10, "d2h_pinned": 2.5e10}}

and perhaps `"disk": {"free_bytes": 2000000000000}`, with rates in bytes, operations and parameters
a second; each may also be an object with `per_s`. Several cards are several entries of `gpus`, in
torch's order; the rates of the second are `card1_gpu_matmul`, `card1_h2d_pinned` and so on, and
where there is none it counts as the first.
Without a GPU `gpus` is empty and the rates are `cpu_matmul`, `adamw` and `host_copy`. Without rates
there is a plan, but no time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput
from fluxtrain.files.opening import read_named
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.facts import Capacity
from fluxtrain.plan.guard import UNKNOWN_DISK, DiskCapacity
from fluxtrain.units import bytes_text

MOST = 1 << 62  # of bytes, and of anything a second
LEAST_RATE = 1.0
LONGEST_NAME = 60
LIMIT_BYTES = 1 << 20  # a probe prints a few thousand
BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """The facts that a plan needs about another machine."""

    line: str  # for people
    capacity: Capacity
    per_s: dict[str, float | None]  # rates by the probe's names
    disk: DiskCapacity = UNKNOWN_DISK
    capability: tuple[int, int] = (8, 0)  # of its card; a recent one where the file does not say
    cards: CardsCapacity | None = None  # None without a GPU


def read_machine_file(path: Path) -> PlannedMachine:
    """Read `path`.

    Raises:
        BadInput: it cannot be read, is no JSON object, or does not say how much memory there is.
    """
    try:
        found = json.loads(read_named(path, LIMIT_BYTES))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}: check --machine") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{path} is not JSON ({error}): write it with `fluxtrain probe --json`"
        ) from error
    machine = _part(found, "machine", path)
    host = _bytes(machine, ("memory_available_bytes", "memory_total_bytes"), path)
    gpus = machine.get("gpus") or []
    if not isinstance(gpus, list):
        raise BadInput(f'{path}: gpus is no list: write [] or [{{"memory_total_bytes": ...}}]')
    gpus = _in_torch_order(gpus, found.get("cards"))
    cards = _cards(gpus, path)
    device = cards[0].free_bytes if cards else None
    shown = [f"{card.name} {bytes_text(card.free_bytes)}" for card in cards]
    rates = found.get("rates") or {}
    if not isinstance(rates, dict):
        raise BadInput(f"{path}: rates is no object of names and numbers: or leave it out")
    return PlannedMachine(
        line=f"{path.name}: {bytes_text(host)} host memory, {', '.join(shown) or 'no GPU'}",
        capacity=Capacity(device_free_bytes=device, host_available_bytes=host),
        per_s={name: _per_s(name, rate, path) for name, rate in rates.items()},
        disk=_disk(found.get("disk"), path),
        capability=_capability(gpus[0].get("compute_capability") if gpus else None, path),
        cards=CardsCapacity(cards=cards, host_available_bytes=host) if cards else None,
    )


def _in_torch_order(gpus: list[Any], told: Any) -> list[Any]:
    """Return the cards in torch's order, which a probe of several cards lists besides the
    driver's, merged with its facts about each."""
    if not isinstance(told, list) or not told:
        return gpus
    by_index = {gpu.get("index"): gpu for gpu in gpus if isinstance(gpu, dict)}
    cards = [card for card in told if isinstance(card, dict)]
    return [{**by_index.get(card.get("gpu"), {}), **card} for card in cards] or gpus


def _cards(gpus: list[Any], path: Path) -> tuple[CardCapacity, ...]:
    """Return every card. One without bf16 cannot be used if the first card has it."""
    found: list[CardCapacity] = []
    for index, gpu in enumerate(gpus):
        free = _bytes(gpu, ("memory_free_bytes", "memory_total_bytes"), path)
        capability = gpu.get("compute_capability")
        unusable = str(gpu.get("unusable") or "")
        if (
            _capability(capability, path)
            < BF16_CAPABILITY
            <= _capability(gpus[0].get("compute_capability"), path)
        ):
            unusable = unusable or (
                f"it has no bf16 (compute capability {capability}, 8.0 is needed): leave it out, "
                "or train in model.dtype=float16 on all cards"
            )
        name = _name(gpu.get("name"))
        found.append(CardCapacity(index=index, name=name, free_bytes=free, unusable=unusable))
    return tuple(found)


def _part(found: Any, name: str, path: Path) -> Mapping[str, Any]:
    part = found.get(name) if isinstance(found, dict) else None
    if not isinstance(part, dict):
        raise BadInput(f"{path} has no {name!r}: write it with `fluxtrain probe --json`")
    return part


def _disk(part: Any, path: Path) -> DiskCapacity:
    """Return the machine's disk, as far as the file describes it."""
    free = part.get("free_bytes") if isinstance(part, dict) else None
    if free is None:
        return UNKNOWN_DISK
    if _number(free, 0) is None:
        raise BadInput(f"{path}: free_bytes of the disk is {free!r}: use a number, or leave it out")
    return DiskCapacity(
        path=f"the runs' folder of {path.name}",
        free_bytes=int(free),
        in_memory=part.get("in_memory") is True,
    )


def _name(told: Any) -> str:
    """Return a card's name in printable characters."""
    shown = "".join(letter for letter in str(told or "") if letter.isprintable())
    return shown[:LONGEST_NAME] or "GPU"


def _capability(told: Any, path: Path) -> tuple[int, int]:
    if told is None:
        return PlannedMachine.capability
    major, _, minor = str(told).partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise BadInput(f'{path}: compute_capability is {told!r}: write it as "8.0" or leave it out')
    return int(major), int(minor)


def _bytes(part: Any, names: tuple[str, ...], path: Path) -> int:
    """Return the bytes of the first of `names` that the file has."""
    known = part if isinstance(part, dict) else {}
    name = next((name for name in names if known.get(name) is not None), None)
    if name is None:
        raise BadInput(f"{path} needs {names[-1]} as a number of bytes for host and GPU")
    found = _number(known[name], 1)
    if found is None:
        raise BadInput(
            f"{path}: {name} is {known[name]!r}: write its bytes as a number from 1 below 2**62"
        )
    return int(found)


def _number(value: Any, least: float) -> float | None:
    """Return `value` if it is a finite number."""
    told = isinstance(value, int | float) and not isinstance(value, bool)
    return value if told and least <= value < MOST else None


def _per_s(name: str, rate: Any, path: Path) -> float | None:
    value = rate.get("per_s") if isinstance(rate, dict) else rate
    if value is None:
        return None
    found = _number(value, LEAST_RATE)
    if found is None:
        raise BadInput(
            f"{path}: the rate {name} is {value!r}: use a number above 0, or leave it out"
        )
    return float(found)
