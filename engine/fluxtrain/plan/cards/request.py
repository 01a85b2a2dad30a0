"""What a user may ask of several cards: the `parallel` section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from fluxtrain.errors import BadInput
from fluxtrain.plan.cards.dealing import DealingRule
from fluxtrain.plan.request import Auto, Count, Positive, refuse_boolean

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


def _setting(description: str, default: Any = "auto") -> Any:
    return field(default=default, metadata={"description": description})  # as pydantic reads it


@dataclass(frozen=True, kw_only=True)
class ParallelRequest:
    """Which cards compute, and what each of them does; `auto` leaves it to the planner."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, as of its models

    cards: Cards = _setting(
        "cards that compute: a number of them, or a list such as [0, 2], by the numbers that torch "
        "gives them (CUDA_VISIBLE_DEVICES counts); the first of a list has embedding and head; "
        "auto takes those that make a step faster, or that the model does not fit without"
    )
    dealing: Annotated[Numbers | DealingRule, BeforeValidator(_numbers)] = _setting(
        "how the blocks are dealt to the cards: speed, by measured seconds of a block on each, as "
        "far as its memory goes; memory, by the memory of each; even; or numbers of blocks such as "
        "[20, 16], one for each card; auto is speed, and even where no times are known"
    )
    order: Order = _setting(
        "where it pays, the head's chunks of tokens are computed by all cards. fixed: the first "
        "card adds up its gradient in one card's order, and every weight has the bits of one card "
        "with the same placement.chunk_rows; fast: each card may add up its own, in another order",
        "fixed",
    )


def check_parallel(request: ParallelRequest) -> None:
    """Raise BadInput for values that no configuration could have, of a request made in Python."""
    _check_cards(request.cards)
    _check_dealing(request.dealing)
    if request.order not in get_args(Order):
        raise BadInput(f"parallel.order is {request.order!r}: use fast or fixed")


def _check_cards(cards: Any) -> None:
    if cards == "auto" or (_is_whole(cards) and 1 <= cards <= MOST_CARDS):
        return
    if not isinstance(cards, tuple) or not cards or not all(map(_is_whole, cards)):
        raise BadInput(
            f"parallel.cards is {cards!r}: use auto, a number of cards, or a tuple such as (0, 1)"
        )
    try:
        _each_once(cards)
    except ValueError as error:
        raise BadInput(f"parallel.cards is {cards!r}: {error}") from None


def _check_dealing(dealing: Any) -> None:
    words = get_args(DealingRule)
    if isinstance(dealing, str) and dealing in words:
        return
    counts = dealing if isinstance(dealing, tuple) else ()
    if not counts or not all(_is_whole(n) and n >= 1 for n in counts):
        raise BadInput(
            f"parallel.dealing is {dealing!r}: use {', '.join(words)}, or a tuple with the number "
            "of blocks of each card, such as (20, 16)"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
