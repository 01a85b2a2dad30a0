"""The plan of a sharded model (`parallel.mode: fsdp`): rows, memory by parts, seconds, reasons."""

from __future__ import annotations

from dataclasses import asdict, replace

from fluxtrain.config.schema import RunConfig
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.events import ChoiceMade
from fluxtrain.measure.measured_constants import Constants
from fluxtrain.methods.method import method_of
from fluxtrain.models.model_files import is_pipeline
from fluxtrain.parallel.auto import CANDIDATE
from fluxtrain.parallel.compress.registry import method_named
from fluxtrain.parallel.forecast import (
    Sharding,
    choose_mode,
    on_device,
    rank_bytes,
    refuse_larger,
    rows_that_fit,
    step_seconds,
)
from fluxtrain.plan.capacity import CardsCapacity
from fluxtrain.plan.facts import FP32_BYTES, HALF_BYTES, Capacity, ModelFacts
from fluxtrain.plan.placement import CardPlacement, Placement
from fluxtrain.plan.rates import CardsRates
from fluxtrain.plan.request import ParallelRequest, PlacementRequest
from fluxtrain.plan.search import AUTO_SHARE
from fluxtrain.plan.simulation import StepTime
from fluxtrain.train.placing.cards import cards_of, hold_to_budget, rates_of_cards
from fluxtrain.train.placing.placing import capacity_of, decide, unused_choices
from fluxtrain.units import bytes_text, duration_text

MEMORY = "memory of a rank"
NOT_TIMED = "how fast processes without GPUs exchange numbers is not measured"


def plan_sharded(
    config: RunConfig,
    facts: ModelFacts,
    machine: Machine,
    device: str,
    sharding: Sharding,
    batch_rows: int | None,
    data_rows: int,
    constants: Constants,
    *,
    capacity: Capacity | None = None,
    elsewhere: CardsCapacity | None = None,
) -> tuple[Placement, Constants]:
    """Return the placement of one of the ranks, with its rows, and the constants of its time.

    `batch_rows` are a rank's, None: the plan chooses; `data_rows` of an epoch are a rank's, too.
    `capacity` is a rank's share of the machine, `elsewhere` the cards of another one.

    Raises DoesNotFit where a card, or host memory while the ranks load, is too small.
    """
    has_gpu, budget = device == "cuda", None
    facts = replace(facts, fuses_loss=facts.fuses_loss and has_gpu)
    if has_gpu and capacity is None:
        budget = hold_to_budget(config.placement.budget_gib)
    capacity = capacity or capacity_of(machine, device)
    budget = capacity.device_free_bytes if budget is None else budget
    placement = _by_rows(config, facts, machine, batch_rows, data_rows)
    rows = placement.batch_rows
    told = [choice for choice in placement.choices if choice.name == "train.batch_rows"]
    if budget is not None:
        fewer = max(1, rows_that_fit(facts, sharding, rows, int(budget * AUTO_SHARE)))
        if batch_rows is None and fewer < rows:
            because = f"{rows} need {bytes_text(on_device(facts, sharding, rows))} of a card"
            told = [ChoiceMade(name="train.batch_rows", value=str(fewer), because=because)]
            rows = fewer
        refuse_larger(facts, sharding, rows, budget)
    parts = rank_bytes(facts, sharding, rows)
    need = parts.footprint(sharding, facts, has_gpu=has_gpu)
    _refuse_host(need.host_bytes, capacity.host_available_bytes, sharding.local_ranks)
    found = constants.rates(has_gpu=True) if has_gpu else NOT_TIMED
    rates = None
    if isinstance(found, str):
        constants = Constants(per_s={}, source=found)
    else:
        cards = elsewhere or cards_of(config, machine, device, budget)
        every = rates_of_cards(cards, found, constants.per_s if elsewhere else None)
        rates = CardsRates(cards=every.cards[: sharding.local_ranks], peers=every.peers)
    time, compared = _beside_ddp(facts, sharding, rates, rows, config.train.accumulation)
    mode = ChoiceMade(
        name="parallel.mode", value="fsdp",
        because=f"as set: {config.fsdp.sharding_strategy} over {sharding.shards} of "
        f"{sharding.ranks} ranks; AdamW of torch, fp32",
    )  # fmt: skip
    # gradients and what a pass needs are gone when the first rank saves the whole weights
    shards = parts.parameters + parts.states if sharding.settings.cpu_offload or not has_gpu else 0
    card = CardPlacement(
        blocks=facts.layers, device_bytes=need.device_bytes, budget_bytes=budget,
        shown_bytes=need.shown_device_bytes(has_gpu=has_gpu),
    )  # fmt: skip
    placement = replace(
        placement, need=need, cards=(card,), time=time,
        choices=(mode, compared, *told, *unused_choices(config)),
        layout=replace(placement.layout, batch_rows=rows, chunk_rows=rows),
        saving_bytes=max(0, shards + facts.weight_bytes - need.host_bytes),
    )  # fmt: skip
    return placement, replace(constants, place=None, run_times=1.0)  # kept times are of streaming


def _beside_ddp(
    facts: ModelFacts, sharding: Sharding, rates: CardsRates | None, rows: int, passes: int
) -> tuple[StepTime | None, ChoiceMade]:
    """Return the time of a step, where rates are known, and the memory by parts beside DDP's."""
    ddp = sharding.with_settings(sharding_strategy="NO_SHARD")
    parts, of_ddp = (rank_bytes(facts, one, rows) for one in (sharding, ddp))
    beside = f"as DDP {bytes_text(of_ddp.total)} ({parts.total / of_ddp.total - 1:+.0%})"
    time = None
    if rates is not None:
        time, ddp_time = (
            step_seconds(facts, one, rates, rows, passes=passes) for one in (sharding, ddp)
        )
        seconds = duration_text(ddp_time.step_s), duration_text(time.step_s)
        beside += ", {} a step against {}".format(*seconds)
    because = f"{parts.text}; {beside}"
    return time, ChoiceMade(name=MEMORY, value=bytes_text(parts.total), because=because)


def sharding_of(config: RunConfig, ranks: int, local_ranks: int) -> Sharding:
    """Return how many ranks share the model, and the bytes that they send."""
    comm = config.comm
    half = comm.compress in ("fp16", "bf16")
    method = method_named(CANDIDATE)
    if comm.compress != "auto":
        method = method_named(comm.compress, comm.config)
    ours = method.bytes_of_torch is None and ranks > 1
    return Sharding(
        settings=config.fsdp,
        ranks=ranks,
        local_ranks=local_ranks,
        reduce_bytes=HALF_BYTES if half else FP32_BYTES,
        gather_bytes=None if comm.gather == "none" else 1,
        work_bytes=method.compressor.work_bytes if ours else 0,
        keeps_losses=ours and method.feedback,
    )


def _by_rows(
    config: RunConfig, facts: ModelFacts, machine: Machine, rows: int | None, data_rows: int
) -> Placement:
    """Return the placement of a resident model without any bound, for its rows."""
    plain = config.model_copy(
        update={"placement": PlacementRequest(offload="none"), "parallel": ParallelRequest()}
    )
    unbounded = Capacity(device_free_bytes=None, host_available_bytes=None)
    return decide(
        plain, facts, machine, "cpu", batch_rows=rows, data_rows=data_rows, capacity=unbounded
    )


def _refuse_host(need_bytes: int, available_bytes: int | None, local_ranks: int) -> None:
    if available_bytes is not None and need_bytes > available_bytes:
        raise DoesNotFit(
            f"the sharded model does not fit host memory: each of {local_ranks} ranks of a machine "
            f"needs {bytes_text(need_bytes)} while it loads the model, and "
            f"{bytes_text(available_bytes)} is free for each: use fewer ranks a machine, or "
            "parallel.mode=layers, or train adapters alone (method.name=lora)"
        )


def refuse_settings(config: RunConfig) -> None:
    """Raise BadInput for settings of other modes and for wrong compression, with the cure."""
    train, cure = config.train, "or use parallel.mode=layers"
    if is_pipeline(config.model.path):
        raise BadInput("parallel.mode=fsdp shards language models: for one of images leave it out")
    if train.optimizer != "adamw" or train.states != "fp32":
        raise BadInput(
            f"train.optimizer={train.optimizer} with train.states={train.states}: sharded models "
            f"are trained by torch's AdamW with fp32 moments: leave both out, {cure}"
        )
    cards = config.parallel.cards
    if cards not in ("auto", 1) and (isinstance(cards, int) or len(cards) > 1):
        raise BadInput(
            f"parallel.cards={cards}: each process of a sharded model has one card: leave it out "
            f"(parallel.processes says how many there are), {cure}"
        )
    unset = PlacementRequest(device=config.placement.device, budget_gib=config.placement.budget_gib)
    for name, value in asdict(config.placement).items():
        if value != getattr(unset, name):
            raise BadInput(
                f"placement.{name}={value} is of models that stream; a sharded one takes "
                f"placement.device and budget_gib alone: leave it out, {cure}"
            )
    if config.model.dtype == "float16":
        raise BadInput(
            "model.dtype=float16 needs a loss scale, which parallel.mode=fsdp does not have: use "
            f"bfloat16, {cure}"
        )
    if config.comm.gather != "none" and method_of(config).frozen_storage(config.method) != "plain":
        raise BadInput(
            f"comm.gather={config.comm.gather} rounds weights, and {config.method.name} packs them "
            "in 4 or 8 bits already: leave it out"
        )
    if config.comm.compress != "auto":
        method_named(config.comm.compress, config.comm.config)
    elif config.fsdp.sharding_strategy in ("NO_SHARD", "HYBRID"):
        raise BadInput(
            "comm.compress=auto measures sums that are scattered, and fsdp.sharding_strategy="
            f"{config.fsdp.sharding_strategy} sums between replicas: name a method, such as int8"
        )


def with_mode(
    config: RunConfig,
    facts: ModelFacts,
    streamed: Placement,
    constants: Constants,
    data_rows: int,
    cards: CardsCapacity,
    machine: Machine,
) -> tuple[RunConfig, tuple[ChoiceMade, ...]]:
    """Take `parallel.mode: auto` for what is predicted faster, of several cards; return with it the
    reason. A sharded run has a process for each usable card."""
    ranks = sum(not card.unusable for card in cards.cards)
    if ranks < 2:
        return config, ()
    sharded, why_not = None, why_streamed(config, facts, ranks)
    asked = config.train.batch_rows
    if not why_not:
        free = [card.free_bytes or 0 for card in cards.cards if not card.unusable]
        host = cards.host_available_bytes
        share = Capacity(
            device_free_bytes=min(free),
            host_available_bytes=None if host is None else host // ranks,
        )
        try:
            placement, _ = plan_sharded(
                config, facts, machine, "cuda", sharding_of(config, ranks, ranks),
                None if asked == "auto" else asked // ranks, max(1, data_rows // ranks), constants,
                capacity=share, elsewhere=cards,
            )  # fmt: skip
            sharded = placement.time
        except DoesNotFit as error:
            why_not = str(error)
    choice = choose_mode(
        None if streamed.time is None else streamed.time.tokens_per_s,
        None if sharded is None else sharded.tokens_per_s,
        why_not,
    )
    if choice.value == "fsdp":
        parallel = replace(config.parallel, mode="fsdp", processes=ranks)
        config = config.model_copy(update={"parallel": parallel})
    return config, (choice,)


def why_streamed(config: RunConfig, facts: ModelFacts, ranks: int) -> str:
    """Say which setting a run on `ranks` cards that shards would not keep; "": it keeps all."""
    asked = config.train.batch_rows
    if config.placement != PlacementRequest(device=config.placement.device):
        return "settings of placement are those of layers"
    if replace(config.parallel, mode="auto") != ParallelRequest():
        return "other settings of parallel are those of layers"
    if facts.scales_its_loss or config.train.optimizer_in_backward:
        return "float16 and train.optimizer_in_backward are those of layers"
    if is_pipeline(config.model.path):
        return "models of images"
    if any(group.kind == "block" and group.users > 1 for group in facts.groups):
        return "blocks of this model share weights, which FSDP2 cannot"
    if asked != "auto" and asked % ranks:
        return f"train.batch_rows={asked} cannot be shared evenly by {ranks} ranks"
    try:
        refuse_settings(config)
    except BadInput as error:
        return str(error)
    return ""
