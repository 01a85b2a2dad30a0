"""What a user may ask of placement and cards: each setting is declared here, once.

The `placement` section of a configuration is a `PlacementRequest`, and so is what `wrap` is given;
the planner adds to it how a run steps (`RunRequest`). Words and bounds stand in the types:
pydantic checks a configuration by them, `check` a request that was made in Python.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from fluxtrain.errors import BadInput
from fluxtrain.units import GIB

LARGEST_INT = 2**63 - 1  # of 64 bits, which journals and random generators hold
LARGEST_FLOAT = 1e15

Auto = Literal["auto"]


def refuse_boolean(value: Any) -> Any:
    """Raise ValueError for true and false, which Python would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must not be true or false")
    return value


def refuse_uncountable(value: Any) -> Any:
    """Raise ValueError for a number too large for the journal."""
    limit = LARGEST_FLOAT if isinstance(value, float) else LARGEST_INT
    if isinstance(value, int | float) and value > limit:
        raise ValueError(f"must be at most {limit:g}")
    return value


_NUMBER = (BeforeValidator(refuse_boolean), AfterValidator(refuse_uncountable))
Count = Annotated[int, Field(ge=0), *_NUMBER]
Positive = Annotated[int, Field(ge=1), *_NUMBER]
Share = Annotated[float, Field(ge=0, le=1), *_NUMBER]
Size = Annotated[float, Field(gt=0, allow_inf_nan=False), *_NUMBER]


def _as_word(value: Any) -> Any:
    """Read YAML's on and off, which it takes for true and false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _knob(description: str, default: Any = "auto") -> Any:
    return field(default=default, metadata={"description": description})  # as pydantic reads it


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """A user's request for the placement; `auto` leaves a setting to the planner."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, as of its models

    offload: Literal["auto", "none", "optimizer", "weights", "max"] = _knob(
        "what lives in host memory instead of on the device"
    )
    activations: Literal["auto", "device", "host"] = _knob(
        "where the blocks' inputs wait for the backward pass; auto decides by the time that each "
        "way costs"
    )
    device: Literal["auto", "cpu", "cuda"] = _knob(
        "where blocks are computed; auto takes the GPU when torch can use it"
    )
    chunk_rows: Positive | Auto = _knob(
        "rows computed at once inside a block; auto chooses from free memory"
    )
    aggressiveness: Literal["auto", "fast", "balanced", "fit"] | Share = _knob(
        "how much of the GPU's memory the layout may take: fast (1, as auto) all that may be used, "
        "fit (0) the least that runs, balanced (0.5) halfway; the fastest predicted layout within "
        "it is taken"
    )
    device_groups: Count | Auto = _knob(
        "so many parts of the model (embedding, then blocks here and there; see device_first) live "
        "on the device with their gradients and optimizer states; auto chooses from free memory"
    )
    device_first: Literal["auto", "embedding", "blocks"] = _knob(
        "which parts live on the device first: embedding, then blocks, or blocks, then what stands "
        "outside of them; auto takes what is predicted to be faster"
    )
    resident_blocks: Count | Auto = _knob(
        "of so many other blocks the weights stay on the device; auto: by free memory"
    )
    blocks_without_recompute: Count | Auto = _knob(
        "so many blocks whose weights stay on the device keep their activations there and are not "
        "computed again; auto fills what is left of a GPU"
    )
    prefetch: Positive | Auto = _knob(
        "so many streamed blocks are copied ahead of the one that computes; auto: as few as hide "
        "the copies, by measured times"
    )
    embedding: Literal["auto", "whole", "rows"] = _knob(
        "what of an embedding in host memory is copied to the device: the whole of it, or the rows "
        "that a batch looks up (a tied one in addition, for the head); auto takes rows of a large "
        "one"
    )
    head: Literal["auto", "whole", "chunks"] = _knob(
        "how the weight of the output layer, where it is in host memory, is copied to the device: "
        "the whole of it, or in chunks of its vocabulary, with two on the device at once (it is "
        "copied twice then, and its logits are computed twice; a tied one, where its embedding is "
        "looked up by rows); auto takes chunks where that is predicted faster by 2 %, or nothing "
        "fits otherwise"
    )
    budget_gib: Size | None = _knob(
        "device memory that may be used, in GiB, of each card; all of it when left out", None
    )
    host_gib: Size | None = _knob(
        "host memory that the plan may use beside what the process itself takes (libraries, data: "
        "some hundred MiB), in GiB; what is available when left out",
        None,
    )
    disk: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_word)] = _knob(
        "what lives on disk where the host cannot hold it: on lets optimizer states (then "
        "gradients and weights of blocks, where these are not enough), which are "
        "read and written each step (this wears a drive), auto only frozen weights, which are "
        "read, off nothing; the plan takes the fewest"
    )
    disk_path: str | None = _knob(
        "folder of a disk for the scratch file of optimizer states; the run's own when left out",
        None,
    )

    @property
    def host_bytes(self) -> int | None:
        """Return the bytes of host memory that the plan may use; None: no limit."""
        return None if self.host_gib is None else max(1, int(self.host_gib * GIB))

    @property
    def spill_folder(self) -> str:
        """Return the folder that optimizer states may live in; empty: the run's."""
        return os.path.expanduser(self.disk_path or "")

    @property
    def budget_bytes(self) -> int | None:
        """Return the bytes of device memory that may be used; None: no limit."""
        return None if self.budget_gib is None else max(1, int(self.budget_gib * GIB))

    @property
    def slots(self) -> int | None:
        """Return the number of slots that streamed blocks share: one computes, the others are
        copied ahead."""
        return None if self.prefetch == "auto" else self.prefetch + 1


@dataclass(frozen=True, kw_only=True)
class RunRequest(PlacementRequest):
    """A placement request with the way a run steps; None is left to the planner."""

    batch_rows: int | None = None
    data_rows: int | None = None  # rows of one epoch
    passes: int = 1  # backward passes a step
    optimizer_in_backward: bool = False  # groups are updated as their gradients arrive
    deferred_moments: bool | None = None  # updated after all weights; None: as time says

    @staticmethod
    def of(request: PlacementRequest, **stepping: Any) -> RunRequest:
        """Add the way a run steps to a user's request."""
        asked = {knob.name: getattr(request, knob.name) for knob in fields(PlacementRequest)}
        return RunRequest(**{**asked, **stepping})


def count_or(value: int | Auto, otherwise: int) -> int:
    """Return the number that was asked for, or `otherwise` if it is left to the planner."""
    return otherwise if value == "auto" else value


def check(request: PlacementRequest) -> None:
    """Raise BadInput for a value that its setting does not allow, in a request made in Python."""
    _check(PlacementRequest, request)


def _check(kind: type, request: Any, section: str = "") -> None:
    for name, adapter in _adapters(kind).items():
        value = getattr(request, name)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            ways = dict.fromkeys(_way(str(one["msg"])) for one in error.errors())
            raise BadInput(f"{section}{name} is {value!r}: use {', or '.join(ways)}") from None


@cache
def _adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {knob.name: TypeAdapter(hints[knob.name]) for knob in fields(kind)}


def _way(message: str) -> str:
    """Word pydantic's message about a wrong value as a cure."""
    for said, word in _WAYS.items():
        message = message.replace(said, word)
    return message


_WAYS = {
    "Value error, ": "",
    "Input should be ": "",
    "must be ": "",
    "must not be true or false": "a number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid tuple": "a tuple such as (0, 1)",
}

DealingRule = Literal["auto", "speed", "memory", "even"]
Dealing = DealingRule | tuple[int, ...]
Params = Literal["full", "shard"]
SumsOn = Literal["gpu_reduce", "cpu_reduce"]
Order = Literal["fast", "fixed"]  # of the sums in the head's gradient


def _numbers(value: Any) -> Any:
    """Read `0, 2` as a list, as a command line gives it."""
    if isinstance(value, str) and "," in value:
        parts = [part.strip() for part in value.strip("[] ").split(",") if part.strip()]
        return [int(part) if part.isdecimal() else part for part in parts]
    return value


def _each_once(cards: Any) -> Any:
    if not isinstance(cards, tuple):
        return cards
    twice = sorted({card for card in cards if cards.count(card) > 1})
    if twice:
        raise ValueError(f"card {twice[0]} is named twice: name each card once")
    return cards


MOST_CARDS = 1024  # without a GPU, parts of the processor

Ids = Annotated[tuple[Count, ...], Field(min_length=1)]
Cards = Annotated[
    Annotated[Positive, Field(le=MOST_CARDS)] | Ids | Auto,
    BeforeValidator(refuse_boolean),
    BeforeValidator(_numbers),
    AfterValidator(_each_once),
]
Numbers = Annotated[tuple[Positive, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class ParallelRequest:
    """Which cards compute, and the work of each; `auto` leaves it to the planner."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, as of its models

    mode: Literal["auto", "layers", "fsdp"] = _knob(
        "layers: one process, whose blocks stream, on all cards; fsdp: a process a card, and the "
        "model sharded over them by torch's FSDP2, for models that fit on all cards together "
        "without streaming (start them with torchrun, or set processes); auto takes fsdp where "
        "`fluxtrain plan` predicts it faster on all cards of a measured machine, else layers"
    )
    cards: Cards = _knob(
        "cards that compute: a number of them, or a list such as [0, 2], by the numbers that torch "
        "gives them (CUDA_VISIBLE_DEVICES counts); the first of a list has embedding and head; "
        "auto takes those that make a step faster, or that the model does not fit without; of "
        "several processes a number is that of each, and auto is 1"
    )
    dealing: Annotated[Numbers | DealingRule, BeforeValidator(_numbers)] = _knob(
        "how the blocks are dealt to the cards: speed, by measured seconds of a block on each, as "
        "far as its memory goes; memory, by the memory of each; even; or numbers of blocks such as "
        "[20, 16], one for each card; auto is speed, and even where no times are known"
    )
    processes: Positive = _knob(
        "so many processes of this machine train together, each on cards of its own (`fluxtrain "
        "train` starts them with torchrun); by default one process uses all. A launcher of several "
        "machines starts them itself: see docs/processes.md",
        1,
    )
    params: Params = _knob(
        "several processes of a machine hold weights once in memory that they share, and each a "
        "part of the optimizer states (full), or each holds a part of the blocks' weights, too, "
        "also over machines (shard): then uploads bring a part, and the cards gather the rest",
        "full",
    )
    gradients: SumsOn = _knob(
        "where the gradients of several processes are added: on the cards (gpu_reduce), or on the "
        "host of their one machine, which each sends its own in fp32 (cpu_reduce): for cards "
        "without NVLink",
        "gpu_reduce",
    )
    restarts: Count = _knob(
        "when a process dies, all start again from the last checkpoint, so many times", 0
    )
    order: Order = _knob(
        "where it pays, the head's chunks of tokens are computed by all cards. fixed: the first "
        "card adds up its gradient in one card's order, and every weight has the bits of one card "
        "with the same placement.chunk_rows; fast: each card may add up its own, in another order. "
        "Of several processes gradients are added in the order of ranks, or as the backend does",
        "fixed",
    )


def check_parallel(request: ParallelRequest) -> None:
    """Raise BadInput for values that no configuration could have, of a request made in Python."""
    _check(ParallelRequest, request, "parallel.")
