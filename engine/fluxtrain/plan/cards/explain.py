"""Why these cards, these blocks and these chunks, in words with numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fluxtrain.events.events import CardLeftOut, ChoiceMade
from fluxtrain.plan.cards.capacity import CardsCapacity
from fluxtrain.plan.cards.option import Option
from fluxtrain.plan.cards.request import ParallelRequest
from fluxtrain.plan.cards.residency import Settled
from fluxtrain.plan.cards.shares import EDGES_CARD
from fluxtrain.plan.choices.reasons import embedding_choice, head_choice
from fluxtrain.plan.cost.moments import DEFERRED, WITH_WEIGHTS
from fluxtrain.plan.request import RunRequest
from fluxtrain.units import bytes_text, count_text, duration_text

_HOST_BOUND = ("update", "host memory")


def one_card_choice(
    parallel: ParallelRequest,
    capacities: CardsCapacity,
    options: Sequence[Option],
    chosen: Option,
) -> tuple[ChoiceMade, ...]:
    """Why one card computes; nothing where there is no other."""
    if len(capacities.cards) < 2:
        return ()
    because = "as set" if parallel.cards != "auto" else _cards_because(capacities, options, chosen)
    return (ChoiceMade(name="parallel.cards", value="1", because=because),)


def choices_of_cards(
    parallel: ParallelRequest,
    capacities: CardsCapacity,
    request: RunRequest,
    options: Sequence[Option],
    best: Option,
) -> tuple[ChoiceMade, ...]:
    """Every choice with its reason."""
    number = len(best.positions)
    told = {
        "parallel.cards": (number, _cards_told(parallel, capacities, options, best)),
        "parallel.dealing": (_counts(best), _dealing_because(parallel, best)),
        "parallel.order": _order(parallel, options, best),
        "placement.offload": (best.layout.offload, "; ".join(map(_kept, best.settled))),
        **_rows(request, options, best),
        **_moments(request, best),
    }
    first = best.settled[EDGES_CARD]
    return (
        *(
            ChoiceMade(name=name, value=str(value), because=why)
            for name, (value, why) in told.items()
        ),
        *embedding_choice(first.search, first.layout),
        *head_choice(first.search, first.layout),
    )


def _cards_told(
    parallel: ParallelRequest,
    capacities: CardsCapacity,
    options: Sequence[Option],
    best: Option,
) -> str:
    names = ", ".join(one.card.text for one in best.settled)
    if parallel.cards != "auto":
        why = "as set"
        asked = parallel.cards if isinstance(parallel.cards, int) else len(parallel.cards)
        if asked > len(best.positions):
            why = f"{asked} as set, and the model has {len(best.positions)} blocks"
    else:
        why = _cards_because(capacities, options, best)
    return f"{names}: {why}{_what_would_help(best)}"


def _cards_because(capacities: CardsCapacity, options: Sequence[Option], chosen: Option) -> str:
    number = len(chosen.positions)
    parts = [f"{_predicted(chosen)} predicted"] if chosen.time is not None else []
    if chosen.time is not None:
        parts += [
            f"{_predicted(other)} with {len(other.positions)}"
            for other in _best_of_each_number(options)
            if len(other.positions) in {1, number + 1} - {number}
        ]
    why = ", and ".join(parts) or "every card that can be used: no times are known"
    left_out = [
        f"{card.text} is left out: {card.unusable}" for card in capacities.cards if card.unusable
    ]
    for other in options:
        if chosen.time is None or len(other.positions) != number + 1:
            continue
        card = capacities.cards[other.positions[-1]]
        left_out.append(f"{card.text} is left out: it would hold the others up, or gain too little")
    return "; ".join([why, *left_out])


def cards_left_out(
    parallel: ParallelRequest,
    capacities: CardsCapacity,
    options: Sequence[Option],
    chosen: Option,
) -> tuple[CardLeftOut, ...]:
    """Return the cards of the machine that do not compute, each with its reason."""
    return tuple(
        CardLeftOut(
            index=card.index,
            name=card.name,
            because=card.unusable or _not_worth(parallel, options, chosen, at),
        )
        for at, card in enumerate(capacities.cards)
        if at not in chosen.positions
    )


def _not_worth(
    parallel: ParallelRequest, options: Sequence[Option], chosen: Option, at: int
) -> str:
    """Say why a card that can be used does not compute."""
    layers = chosen.dealt.facts.layers
    few = layers <= len(chosen.positions)
    if parallel.cards != "auto" or isinstance(parallel.dealing, tuple):
        wanted = at < parallel.cards if isinstance(parallel.cards, int) else False
        if few and wanted:
            return f"the model has {_blocks(layers)}"
        return "as set with parallel.cards or parallel.dealing"
    tried = [one for one in _best_of_each_number(options) if at in one.positions]
    if not tried:
        return f"the model has {_blocks(layers)}" if few else "no layout with it fits"
    if chosen.time is None:
        return "no times are known"
    # two figures of the pipeline: the plan of one card tells seconds of its own cost model
    share = tried[0].tokens_per_s / chosen.tokens_per_s
    return f"{_predicted(tried[0])} predicted with it, {share:.0%} of the speed without"


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def _best_of_each_number(options: Iterable[Option]) -> list[Option]:
    found: dict[int, Option] = {}
    for option in options:
        number = len(option.positions)
        if number not in found or option.step_s < found[number].step_s:
            found[number] = option
    return list(found.values())


def _predicted(option: Option) -> str:
    return (
        f"{duration_text(option.step_s)} a step ({count_text(round(option.tokens_per_s))} tokens/s)"
    )


def _what_would_help(best: Option) -> str:
    """What would make a step shorter that more cards do not."""
    if best.time is None or best.time.binds not in _HOST_BOUND:
        return ""
    eight = all(g.states == "8bit" for g in best.dealt.facts.groups if g.trained)
    narrower = "" if eight else ", train.states=8bit"
    return (
        f"; bound by AdamW and copies in host memory, which cards do not speed up: more rows a "
        f"step{narrower} or more device memory would"
    )


def _counts(best: Option) -> str:
    counts = (best.dealt.cards.count(card) for card in range(len(best.positions)))
    return f"[{', '.join(map(str, counts))}]"


def _dealing_because(parallel: ParallelRequest, best: Option) -> str:
    if isinstance(parallel.dealing, tuple):
        return "as set, spread over the model"
    counts = {best.dealt.cards.count(card) for card in range(len(best.positions))}
    by: str = "speed" if parallel.dealing == "auto" else parallel.dealing
    if by == "speed" and best.time is None:
        by = "even numbers, for no times are known"
    if max(counts) - min(counts) <= 1:
        return f"by {by}: the blocks go to the cards in turn"
    return f"by {by}, as far as each card's memory holds its blocks, spread over the model"


def _order(parallel: ParallelRequest, options: Sequence[Option], best: Option) -> tuple[str, str]:
    order = "fast" if best.head_dealing == "summed" else "fixed"
    as_set = "as set: the bits of one card with the same chunks"
    if best.head_dealing != "one_card":
        others = [
            one for one in options
            if one.positions == best.positions and one.head_dealing == "one_card"
            and one.layout.chunk_rows == best.layout.chunk_rows
        ]  # fmt: skip
        beside = min((one.step_s for one in others), default=best.step_s)
        told = (
            f"{duration_text(best.step_s)} a step is predicted with the head on all cards, and "
            f"{duration_text(beside)} with it on one"
        )
        if order == "fast":
            return order, told
        why = as_set if parallel.order == "fixed" else "one card's order of sums is no slower"
        return order, f"{why}; {told}"
    if parallel.order == "fixed":
        return "fixed", as_set
    return "fixed", "the head on all cards would gain too little, or does not fit: one card has it"


def _kept(one: Settled) -> str:
    """What a card keeps in its memory."""
    layout, facts = one.layout, one.search.facts
    here = len(facts.groups) if layout.offload == "none" else layout.device_groups
    limit = one.budget_bytes
    room = "" if limit is None else f" of {bytes_text(limit)}"
    text = f"{one.card.text} has {here} of {len(facts.groups)} groups"
    if layout.resident_blocks and layout.offload != "none":
        text += f" and the weights of {layout.resident_blocks} more blocks"
    return f"{text}, {bytes_text(one.shown_bytes)}{room}"


def _rows(
    request: RunRequest, options: Sequence[Option], best: Option
) -> dict[str, tuple[int, str]]:
    if best.dealt.facts.row is None:
        return {}
    layout = best.layout
    batch = "as set" if request.batch_rows is not None else (
        "the most that fits" if best.time is None else f"{_predicted(best)}, nearly the most of any"
    )  # fmt: skip
    return {
        "train.batch_rows": (layout.batch_rows, batch),
        "placement.chunk_rows": (layout.chunk_rows, _chunk_because(request, options, best)),
    }


def _chunk_because(request: RunRequest, options: Sequence[Option], best: Option) -> str:
    layout, number = best.layout, len(best.positions)
    chunks = -(-layout.batch_rows // max(1, layout.chunk_rows))
    if request.chunk_rows != "auto":
        return f"as set: {chunks} chunks for {number} cards"
    others = [
        one for one in options
        if one.positions == best.positions and one.layout.batch_rows == layout.batch_rows
        and one.layout.chunk_rows != layout.chunk_rows
    ]  # fmt: skip
    told = f"{chunks} chunks keep {number} cards busy"
    if best.time is None or not others:
        return told
    other = min(others, key=lambda one: one.step_s)
    return (
        f"{told}: {duration_text(best.step_s)} a step is predicted, and "
        f"{duration_text(other.step_s)} with {other.layout.chunk_rows}"
    )


def _moments(request: RunRequest, best: Option) -> dict[str, tuple[str, str]]:
    if best.time is None and request.deferred_moments is None:
        return {}
    deferred = best.layout.deferred_moments
    value = DEFERRED if deferred else WITH_WEIGHTS
    if request.optimizer_in_backward:
        return {"train.moments": (value, "each group is updated at once, as its gradients arrive")}
    if request.deferred_moments is not None:
        return {"train.moments": (value, "as set")}
    why = "a step is predicted to be shorter" if deferred else "no gain is predicted otherwise"
    return {"train.moments": (value, why)}
