"""What a rank of a sharded model needs, and how long its steps take. Pure arithmetic.

A step computes as a resident model does, with its own shard of AdamW. Communication hides behind
computation within the forward pass and within the backward pass, but for the first gather and the
last sum of each. DDP is `NO_SHARD`: every rank holds all, and sums go around all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fluxtrain.config.parallel_settings import FsdpSettings
from fluxtrain.errors import DoesNotFit
from fluxtrain.events.events import ChoiceMade
from fluxtrain.plan.facts import FP32_BYTES, HALF_BYTES, GroupFacts, ModelFacts
from fluxtrain.plan.footprint import Footprint, Layout
from fluxtrain.plan.rates import CardsRates
from fluxtrain.plan.simulation import COMMUNICATION, StepTime, step_time
from fluxtrain.units import bytes_text

FASTER = 0.9  # of the streaming plan's time: `auto` shards where a token is predicted to take less
MOST_RANKS = 64  # that a cure names
GATHERED_BYTES = 10  # of a weight that was sent in 8 bits, while it is decoded


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How many ranks share a model, and how."""

    settings: FsdpSettings
    ranks: int
    local_ranks: int  # on this machine
    reduce_bytes: int = FP32_BYTES  # of a gradient on its way to the sum
    gather_bytes: int | None = None  # of a weight on its way to the ranks; None: as it computes
    work_bytes: int = 0  # of a compressor; 0: torch sums
    keeps_losses: bool = False  # what encoding loses is kept until the next step

    @property
    def shards(self) -> int:
        """Return the number of ranks that hold one copy of the model together."""
        strategy = self.settings.sharding_strategy
        return {"NO_SHARD": 1, "HYBRID": self.local_ranks}.get(strategy, self.ranks)

    @property
    def parts_encoded(self) -> int:
        """Return into how many parts gradients are cut when they are encoded: those of all shards
        are sent whole; between replicas a rank sends what it holds."""
        return self.shards if self.shards < self.ranks else 1

    @property
    def encoded_bytes(self) -> int:
        """Return the bytes of a gradient while it is encoded and decoded; between replicas a rank
        receives about a byte of it from each."""
        replicas = self.ranks // self.shards if self.shards < self.ranks else 0
        return self.work_bytes + replicas if self.work_bytes else 0

    @property
    def keeps(self) -> bool:
        """Return whether gathered weights stay from forward to backward."""
        return self.settings.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD")

    def compute_bytes(self, facts: ModelFacts) -> int:
        """Return the bytes of a number in the computation."""
        narrow = self.settings.mixed_precision and facts.row is not None
        return facts.row.dtype_bytes if narrow and facts.row else FP32_BYTES

    def with_settings(self, **changed: object) -> Sharding:
        """Return the same ranks with other settings of `fsdp`."""
        return replace(self, settings=self.settings.model_copy(update=changed))


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """The peak of one rank's device memory, by parts."""

    parameters: int  # fp32 masters of what is trained, and the rest as it computes: its shards
    gradients: int  # fp32, its shards
    states: int  # AdamW's moments, its shards
    activations: int  # inputs of blocks, those of one block (or of all), logits
    gathered: int  # whole weights of two blocks (or of all), and of what is outside of blocks
    staging: int  # one block's gradients, before they are summed, encoded and on their way
    residuals: int  # what encoding gradients has lost, fp32

    @property
    def total(self) -> int:
        """Count all parts."""
        return sum(vars(self).values())

    @property
    def text(self) -> str:
        """List the parts for people."""
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in vars(self).items() if size)

    def footprint(self, sharding: Sharding, facts: ModelFacts, *, has_gpu: bool) -> Footprint:
        """Return the peaks as every plan has them; on the host those while the rank loads."""
        offloads = sharding.settings.cpu_offload and has_gpu
        shards = self.parameters + self.gradients + self.states
        trained = sum(group.trained for group in facts.groups)
        loading = FP32_BYTES * trained + facts.packed_bytes
        return Footprint(
            weights_bytes=0 if offloads else self.parameters,
            gradients_bytes=0 if offloads else self.gradients,
            optimizer_bytes=0 if offloads else self.states,
            block_inputs_bytes=0,
            workspace_bytes=self.activations + self.gathered + self.staging + self.residuals,
            arena_bytes=shards if offloads else 0,
            host_bytes=max(loading, shards if offloads else 0 if has_gpu else self.total),
        )


def rank_bytes(facts: ModelFacts, sharding: Sharding, rows: int) -> RankBytes:
    """Predict the peak of a rank that computes `rows` rows at once."""
    shards, compute = sharding.shards, sharding.compute_bytes(facts)
    trained = sum(group.trained for group in facts.groups)
    frozen = sum(_frozen_bytes(group, compute) for group in facts.groups)
    least = sharding.settings.min_num_params * compute
    blocks = [group for group in facts.blocks if _whole_bytes(group, compute) >= least]
    names = {group.name for group in blocks}
    together = [group for group in facts.groups if group.name not in names]
    whole = [_whole_bytes(group, compute) for group in blocks]
    outside = sum(_whole_bytes(group, compute) for group in together)
    at_once = max(
        max((group.trained for group in blocks), default=0),
        sum(group.trained for group in together),
    )
    decoded = 0
    if sharding.gather_bytes is not None and shards > 1:
        decoded = GATHERED_BYTES * max(outside, *whole, 0) // compute
    apart = sharding.parts_encoded
    activations = 0
    if (row := facts.row) is not None:
        recomputes = sharding.settings.activation_checkpointing
        block = row.activation_bytes if recomputes else row.kept_bytes * facts.layers
        logits = row.sequence_length * row.vocabulary * (compute + 2 * FP32_BYTES)  # and gradients
        head = 0
        if facts.fuses_loss:  # gradients of the head's input and weight, and a chunk of logits
            logits, head = 2 * row.block_input_bytes, compute * row.vocabulary * row.hidden
        activations = rows * (row.block_input_bytes * facts.layers + block + logits) + head
    return RankBytes(
        parameters=(FP32_BYTES * trained + frozen) // shards,
        gradients=FP32_BYTES * trained // shards,
        states=2 * FP32_BYTES * trained // shards,
        activations=activations,
        gathered=(sum(whole) if sharding.keeps else 2 * max(whole, default=0)) + outside + decoded,
        staging=at_once * (compute + FP32_BYTES) + at_once * sharding.encoded_bytes // apart,
        residuals=FP32_BYTES * trained // apart if sharding.keeps_losses else 0,
    )


def _frozen_bytes(group: GroupFacts, compute: int) -> int:
    """Return the bytes of what is not trained: packed, or as it computes."""
    plain = group.frozen_bytes if group.packed_bytes else group.frozen * compute
    return group.packed_bytes + plain


def _whole_bytes(group: GroupFacts, compute: int) -> int:
    return group.trained * compute + _frozen_bytes(group, compute)


def on_device(facts: ModelFacts, sharding: Sharding, rows: int) -> int:
    """Return the bytes of a GPU that a rank needs."""
    return rank_bytes(facts, sharding, rows).footprint(sharding, facts, has_gpu=True).device_bytes


def rows_that_fit(facts: ModelFacts, sharding: Sharding, rows: int, budget_bytes: int) -> int:
    """Return the most rows, of `rows` halved again and again, that fit; 0: not even one does."""
    while rows and on_device(facts, sharding, rows) > budget_bytes:
        rows //= 2
    return rows


def refuse_larger(facts: ModelFacts, sharding: Sharding, rows: int, budget_bytes: int) -> None:
    """Raise DoesNotFit where a rank needs more than `budget_bytes` of its card, with what fits."""
    need = on_device(facts, sharding, rows)
    if need <= budget_bytes:
        return
    cures = [
        f"{words} fits with {bytes_text(on_device(facts, other, fewer))}"
        for words, other, fewer in _ways(facts, sharding, rows, budget_bytes)
        if fewer and on_device(facts, other, fewer) <= budget_bytes
    ]
    cures.append("parallel.mode=layers streams what does not fit")
    raise DoesNotFit(
        f"the sharded model does not fit: each of {sharding.ranks} ranks needs {bytes_text(need)} "
        f"of its card ({rank_bytes(facts, sharding, rows).text}), and {bytes_text(budget_bytes)} "
        f"may be used: {'; or '.join(cures)}"
    )


def _ways(
    facts: ModelFacts, sharding: Sharding, rows: int, budget_bytes: int
) -> Iterator[tuple[str, Sharding, int]]:
    """Yield what may make it fit: in words, as a sharding, with its rows of a rank."""
    fewer = rows_that_fit(facts, sharding, rows, budget_bytes)
    yield f"train.batch_rows={fewer * sharding.ranks}", sharding, fewer
    for name, value in (
        ("activation_checkpointing", True), ("sharding_strategy", "FULL_SHARD"),
        ("cpu_offload", True),
    ):  # fmt: skip
        if getattr(sharding.settings, name) != value:
            word = str(value).lower() if value is True else value
            yield f"fsdp.{name}={word}", sharding.with_settings(**{name: value}), rows
    if sharding.work_bytes:
        plain: dict[str, Any] = {"reduce_bytes": HALF_BYTES, "work_bytes": 0, "keeps_losses": False}
        yield "comm.compress=bf16 without comm.config", replace(sharding, **plain), rows
    ranks = sharding.ranks
    while (ranks := 2 * ranks) <= MOST_RANKS:
        more = replace(sharding, ranks=ranks, local_ranks=ranks)
        if on_device(facts, more, rows) <= budget_bytes:
            yield f"parallel.processes={ranks} on as many cards", more, rows
            return


def step_seconds(
    facts: ModelFacts, sharding: Sharding, rates: CardsRates, rows: int, *, passes: int = 1
) -> StepTime:
    """Predict a step in which every rank computes `rows` rows in each of `passes` passes."""
    card = rates.cards[0]
    kept = 0 if sharding.settings.activation_checkpointing else facts.layers
    layout = Layout(
        offload="none", batch_rows=rows, chunk_rows=rows, passes=passes,
        blocks_without_recompute=kept,
    )  # fmt: skip
    alone = step_time(facts, layout, card, passes=passes)
    parts = alone.work.parts_s()
    update_s = parts["device_update"]
    compute_s = alone.step_s - update_s
    ahead_s, back_s = (parts["forward"] + parts["head"]), parts["backward"]
    forward_s = compute_s * ahead_s / (ahead_s + back_s)
    gather_s, sum_s = _wire_s(facts, sharding, rates)
    behind_s = sum_s + (0.0 if sharding.keeps else gather_s)
    units = max(1, facts.layers)
    exposed_s = passes * (gather_s + sum_s) / units
    exposed_s += max(0.0, passes * gather_s - forward_s)
    exposed_s += max(0.0, passes * behind_s - (compute_s - forward_s))
    trained = sum(group.trained for group in facts.groups) / sharding.shards
    update_s /= sharding.shards
    bus_s = 0.0
    if sharding.settings.cpu_offload:  # AdamW of all ranks of a machine is on its processors
        update_s = sharding.local_ranks * trained / card.adamw_per_s
        bus_s = passes * FP32_BYTES * trained * (2 / card.up + 1 / card.down)
    comm_s = passes * (gather_s + behind_s)
    work = replace(
        alone.work, tokens=alone.work.tokens * sharding.ranks, device_update_s=(update_s,)
    )
    return StepTime(
        step_s=compute_s + update_s + bus_s + exposed_s,
        busy_s={"compute": compute_s + update_s, COMMUNICATION: comm_s, "uploads": bus_s},
        phases_s={**alone.phases_s, COMMUNICATION: comm_s},
        work=work,
        has_gpu=alone.has_gpu,
    )


def _wire_s(facts: ModelFacts, sharding: Sharding, rates: CardsRates) -> tuple[float, float]:
    """Return the seconds to gather all weights once, and to sum all gradients once."""
    compute, shards = sharding.compute_bytes(facts), sharding.shards
    each = sharding.gather_bytes or compute
    gathered = sum(_whole_bytes(group, each) for group in facts.groups)
    summed = sharding.reduce_bytes * sum(group.trained for group in facts.groups)
    replicas = sharding.ranks // shards
    between = 2 * (replicas - 1) / replicas / shards  # an all-reduce of what a rank holds
    link = link_bytes_per_s(rates)
    own = (shards - 1) / shards
    return own * gathered / link, (own + between) * summed / link


def link_bytes_per_s(rates: CardsRates) -> float:
    """Return the rate of the slowest copy from a card to the next, in a ring of all."""
    cards = len(rates.cards)
    found = [
        rates.peer_bytes_per_s(one, (one + 1) % cards) or min(card.down, card.up)
        for one, card in enumerate(rates.cards)
    ]
    return min(found)


def choose_mode(layers: float | None, sharded: float | None, why_not: str) -> ChoiceMade:
    """Choose between streaming and sharding by predicted tokens a second, None where not known.

    `why_not` sharded: what a sharded run cannot do of what is asked; "": it can.
    """
    told = f"{layers:,.0f} tokens/s are predicted streaming (layers)" if layers else ""
    told += f", {sharded:,.0f} sharded (fsdp)" if sharded and told else ""
    value = "layers"
    if why_not:
        because = why_not
    elif layers is None or sharded is None:
        because = "without measured rates nothing is timed"
    elif FASTER * sharded > layers:
        value, because = "fsdp", f"{told}: the model fits on all cards together"
    else:
        because = f"{told}; fsdp is taken where it is at least {1 - FASTER:.0%} faster"
    return ChoiceMade(name="parallel.mode", value=value, because=because)
