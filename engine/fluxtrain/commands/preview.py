"""`fluxtrain plan`: plan a run without reading weights or training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fluxtrain.config.choices import choose_schedule
from fluxtrain.config.schema import RunConfig, settings
from fluxtrain.core.guards.wrap_checks import refuse_several_processes
from fluxtrain.data.batches import refuse_larger_step
from fluxtrain.data.prepare import check_sequence_length, corpora
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.reading.sampling import estimated_tokens
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.answers.plan import PlanAnswer, PlannedMethod, PlannedModel
from fluxtrain.events.events import ChoiceMade
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.measured_constants import Constants, known_constants
from fluxtrain.measure.probe.probe import Report, probe
from fluxtrain.methods.image.method import data_choices, read_data
from fluxtrain.methods.method import method_of, usual_rate
from fluxtrain.methods.text_task import counted, read_as
from fluxtrain.models.copies import Copied
from fluxtrain.models.isolation import takes_positions
from fluxtrain.models.model_files import is_pipeline
from fluxtrain.plan.capacity import CardsCapacity
from fluxtrain.plan.facts import Capacity, ModelFacts
from fluxtrain.plan.machine_file import PlannedMachine
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.reasons import ON_DISK
from fluxtrain.train.inputs import DEMO
from fluxtrain.train.placing.cards import cards_of
from fluxtrain.train.placing.forecast import (
    card_lines,
    forecast_of,
    plan_lines,
    planned_layout,
)
from fluxtrain.train.placing.placing import (
    capacity_of,
    card_capability,
    choose_device,
    decide,
    dtype_choice,
    model_facts_for,
    optimizer_in_backward,
    within_host,
)
from fluxtrain.train.placing.preflight import (
    disk_room,
    page_locks_planned,
    refuse_what_does_not_fit,
)
from fluxtrain.train.placing.row_length import FirstSamples, first_samples, with_row_length
from fluxtrain.train.placing.sharded import (
    MEMORY,
    plan_sharded,
    refuse_settings,
    sharding_of,
    with_mode,
)
from fluxtrain.train.placing.snapshot import snapshot_of
from fluxtrain.train.run import of_all_ranks, rows_of_rank, share_of
from fluxtrain.units import bytes_text, count_text

ASSUMED = "the rates in the file and constants of this class of machines"
_NO_CARDS = "there is no GPU: these cards are parts of the CPU, to try several cards without any"
_ONE_PROCESS = (
    "this is the plan of one process: `fluxtrain dry-run` starts all of parallel.processes, and "
    "shows theirs"
)
_IN_THE_HEAP = " (above without what a run on a CPU has in its heap)"
DEMO_TOKENS = 510_000  # about the docstrings of the standard library


def preview(
    config: RunConfig,
    elsewhere: PlannedMachine | None = None,
    report: Report | None = None,
    run_dir: Path | None = None,
) -> PlanAnswer:
    """Plan a run; the size of the data is estimated from its first part.

    `elsewhere` is another machine to plan for, for which a model folder needs no weights; None:
    this machine. `report` is told what is measured where the rates of this machine are not known
    yet. `run_dir` is the directory of the run; None: in the usual place.

    Raises:
        BadInput, DoesNotFit: as the run would.
    """
    refuse_several_processes()
    if config.is_sharded:
        refuse_settings(config)
    device = choose_device(config) if elsewhere is None else _device_of(config, elsewhere)
    machine, per_s = _measured(elsewhere, report)
    capacity = _capacity(config, elsewhere, device.value)
    config, first, chosen = _first_samples(config, elsewhere)
    model, (dtype, *targets), copied = _empty_model(config, elsewhere, device.value)
    facts = model_facts_for(config, model)
    asked_rows = None if config.train.batch_rows == "auto" else config.train.batch_rows
    constants = Constants(per_s=per_s, source=ASSUMED)
    if elsewhere is None:
        constants = known_constants(
            facts, machine, device.value, asked_rows, per_s,
            in_backward=optimizer_in_backward(config, facts),
        )  # fmt: skip
    facts = constants.applied(facts)
    of_images = is_pipeline(config.model.path)
    if of_images:
        pairs = read_data(config)
        rows, read, told = len(pairs.trained), data_choices(pairs), pairs.notes
    else:
        rows, read = _rows_and_form(config, first, packs=takes_positions(model))
        told = _told(config, first)
    estimated = not of_images and _is_estimate(first)
    disk = elsewhere.disk if elsewhere else disk_room(run_dir or runs_root())
    there = elsewhere.cards if elsewhere and device.value == "cuda" else None
    asked = asked_rows, max(1, rows // config.train.accumulation)
    found = _decided(
        config,
        facts,
        machine,
        device.value,
        capacity,
        there,
        asked,
        constants=constants,
        runs_in=disk.path,
    )
    config, placement, constants, where, mode = found
    ranks = config.ranks_planned
    refuse_what_does_not_fit(config, facts, placement, copied, where.host_available_bytes, disk)
    where = within_host(where, config)
    schedule = choose_schedule(
        config.train,
        steps_per_epoch=max(
            1, -(-rows // (ranks * placement.batch_rows * config.train.accumulation))
        ),
        usual_rate=usual_rate(config),
        estimated=estimated,
    )
    snapshot = snapshot_of(config, facts, placement, where.host_available_bytes)
    forecast = forecast_of(config, facts, placement, where, constants)
    fit = first.fit(config.data.row_tokens) if first else None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    steps = schedule.total_steps
    answer = PlanAnswer(
        model=PlannedModel(
            name=Path(config.model.path).name,
            parameters=parameters,
            blocks=facts.layers,
            dtype=dtype.value,
        ),
        method=_planned_method(config, model, facts),
        device="cuda" if where.has_gpu else "cpu",
        layout=planned_layout(facts, forecast.layout),
        accumulation=config.train.accumulation,
        sequence_length=config.data.row_tokens,
        notes=(
            *schedule.told,
            *told,
            *([_ONE_PROCESS] if config.parallel.processes > ranks else ()),
            *([_NO_CARDS] if placement.told_cards and not where.has_gpu else ()),
            *(
                f"{'the rank' if ranks == 1 else f'each of {ranks} ranks'} takes {c.value} of "
                f"device memory{'' if where.has_gpu else _IN_THE_HEAP}: {c.because}"
                for c in placement.choices
                if c.name == MEMORY
            ),
        ),
        fitting_share=fit.share if fit else None,
        samples=counted(fit) if fit else None,
        device_bytes=placement.need.shown_device_bytes(has_gpu=where.has_gpu),
        device_budget_bytes=placement.budget_bytes,
        need=asdict(placement.need),
        host_bytes=placement.host_bytes,
        process_bytes=placement.process_bytes,
        host_limit_bytes=_host_limit(where, placement, None if elsewhere else machine),
        disk_bytes=forecast.disk_bytes,
        checkpoint_bytes=forecast.checkpoint_bytes,
        estimated_rows=rows,
        rows_estimated=estimated,
        steps=steps,
        machine=elsewhere.line if elsewhere else machine.line(),
        predicted=forecast.time(steps),
        predicted_because=constants.source if config.is_sharded else forecast.because,
        timing=constants.timing,
        plans=() if config.is_sharded else forecast.options(steps),
        choices=(
            device, dtype, *read, *chosen, *targets, *mode,
            *of_all_ranks(placement.choices, placement.batch_rows, ranks),
            *page_locks_planned(facts, placement, "" if config.is_sharded else device.value, per_s),
            *schedule.choices, snapshot.choice(config.train.checkpoint_every),
        ),
        settings=tuple(settings(config)),
        config=config.model_dump(mode="json"),
        cards=placement.told_cards,
        left_out=placement.left_out,
    )  # fmt: skip
    return snapshot.counted_in(answer)


def _decided(
    config: RunConfig,
    facts: ModelFacts,
    machine: Machine,
    device: str,
    capacity: Capacity | None,
    there: CardsCapacity | None,
    asked: tuple[int | None, int],
    *,
    constants: Constants,
    runs_in: str,
) -> tuple[RunConfig, Placement, Constants, Capacity, tuple[ChoiceMade, ...]]:
    """Return the configuration with its mode, the placement of a process, what its time is from,
    the memory that it may take, and why the mode was chosen.

    `asked` are the rows of a batch, None: the plan chooses, and of an epoch.
    """
    batch_rows, data_rows = asked
    mode: tuple[ChoiceMade, ...] = ()
    if not config.is_sharded:
        placement = decide(
            config, facts, machine, device,
            batch_rows=batch_rows, data_rows=data_rows, capacity=capacity, elsewhere=there,
            constants=constants, runs_in=runs_in,
        )  # fmt: skip
        if device == "cuda" and config.parallel.mode == "auto":
            cards = there or cards_of(config, machine, device, None)
            config, mode = with_mode(config, facts, placement, constants, data_rows, cards, machine)
    if config.is_sharded:
        ranks = config.ranks_planned
        machine = share_of(machine, ranks)
        if capacity is not None and (host := capacity.host_available_bytes) is not None:
            capacity = replace(capacity, host_available_bytes=host // ranks)
        placement, constants = plan_sharded(
            config, facts, machine, device, sharding_of(config, ranks, ranks),
            rows_of_rank(batch_rows, ranks), max(1, data_rows // ranks), constants,
            capacity=capacity, elsewhere=there,
        )  # fmt: skip
    return config, placement, constants, capacity or capacity_of(machine, device), mode


def _rows_and_form(
    config: RunConfig, first: FirstSamples | None, *, packs: bool
) -> tuple[int, tuple[ChoiceMade, ...]]:
    """Count or estimate the rows of an epoch, and say as what the data is read.

    Raises BadInput for a step of more rows, as the run does.
    """
    data, batch = config.data, config.train.batch_rows
    corpus = None if data.path == DEMO else corpora(read_request(data.model_dump()))[0]
    if first is not None:
        rows = first.rows(data, packs=packs)
    else:
        held_out = 0.0 if data.held_out_path is not None else data.held_out
        counted = DEMO_TOKENS if corpus is None else estimated_tokens(corpus)
        rows = max(1, round(counted * (1 - held_out) / data.row_tokens))
    refuse_larger_step(
        1 if batch == "auto" else batch,
        config.train.accumulation,
        rows,
        data.row_tokens,
        estimated=_is_estimate(first),
    )
    return rows, (read_as(corpus),) if corpus else ()


def _told(config: RunConfig, first: FirstSamples | None) -> tuple[str, ...]:
    """Return notes on the first samples for a person."""
    if first is None:
        return ()
    return (*first.told(config.data.row_tokens), *first.few_held_out(config.data))


def _is_estimate(first: FirstSamples | None) -> bool:
    return first is None or not first.is_all


def _planned_method(config: RunConfig, model: PreTrainedModel, facts: ModelFacts) -> PlannedMethod:
    method, asked = method_of(config), config.method
    return PlannedMethod(
        name=asked.name,
        rank=None if asked.name == "full" else asked.rank,
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        trained_bytes=facts.trained_bytes,
        frozen_bytes=facts.frozen_bytes,
        packed_bytes=facts.packed_bytes,
        storage=method.frozen_storage(asked),
        saved_bytes=method.saved_bytes(facts),
    )


def _first_samples(
    config: RunConfig, elsewhere: PlannedMachine | None
) -> tuple[RunConfig, FirstSamples | None, tuple[ChoiceMade, ...]]:
    """Look at the first samples, and choose the length of rows; a folder that is planned for
    another machine may lack its tokenizer."""
    if config.data.path == DEMO or is_pipeline(config.model.path):
        config, chosen = with_row_length(config)
        return config, None, chosen
    try:
        first = first_samples(config)
    except BadInput:
        if elsewhere is None or config.data.sequence_length == "auto":
            raise
        return config, None, ()
    config, chosen = with_row_length(config, first)
    return config, first, chosen


def table(plan: PlanAnswer, *, whole: bool = False) -> str:
    """Format the plan for people: what it needs; if `whole`, every choice with its reason and every
    setting as well."""
    model = plan.model
    lines = [
        f"{model.name}: {count_text(model.parameters)} parameters in {model.blocks} blocks, "
        f"{model.dtype}; {plan.machine}",
        plan.method.line(model.parameters),
        f"device memory {_of(plan.device_bytes, plan.device_budget_bytes)}, "
        f"host memory {_of(plan.host_bytes, plan.host_limit_bytes)}, {plan.steps_text}",
        *card_lines(plan.cards, plan.left_out, model.blocks),
        *plan_lines(plan),
        *(f"{c.name}: {c.value}: {c.because}" for c in plan.choices
          if c.name in ON_DISK or c.because.startswith("no effect")),
        *plan.notes,
        "",
    ]  # fmt: skip
    if not whole:
        return "\n".join([*lines, "--all shows every choice with its reason, and every setting"])
    named = max((len(choice.name) for choice in plan.choices), default=0)
    lines += [
        "chosen",
        *(f"  {c.name:<{named}} {c.value:<12} {c.because}" for c in plan.choices),
        "",
        "settings (* changed from the default)",
    ]
    width = max((len(setting.key) for setting in plan.settings), default=0)
    for setting in plan.settings:
        mark = "*" if setting.changed else " "
        lines.append(
            f"{mark} {setting.key:<{width}} {_shown(setting.value):<22} {setting.description}"
        )
    return "\n".join(lines)


def _measured(
    elsewhere: PlannedMachine | None, report: Report | None
) -> tuple[Machine, Mapping[str, float | None]]:
    """Return this machine, and the rates of the machine that is planned for."""
    if elsewhere is not None:
        return read_machine(), elsewhere.per_s
    found = probe(runs_root(), report=report)
    return found.machine, {name: rate.per_s for name, rate in found.rates.items()}


def _device_of(config: RunConfig, elsewhere: PlannedMachine) -> ChoiceMade:
    """Choose the device on another machine."""
    wished = config.placement.device
    if wished != "cpu" and elsewhere.capacity.has_gpu:
        return ChoiceMade(name="placement.device", value="cuda", because="the machine has a GPU")
    if wished == "cuda":
        raise BadInput("placement.device=cuda, but the machine has no GPU: set it to cpu or auto")
    return ChoiceMade(name="placement.device", value="cpu", because="as set or without a GPU")


def _capacity(config: RunConfig, elsewhere: PlannedMachine | None, device: str) -> Capacity | None:
    """Return the capacity of another machine; None: this machine's counts."""
    if elsewhere is None:
        return None
    if device == "cuda":
        return elsewhere.capacity
    return replace(elsewhere.capacity, device_free_bytes=None)


def _empty_model(
    config: RunConfig, elsewhere: PlannedMachine | None, device: str
) -> tuple[PreTrainedModel, tuple[ChoiceMade, ...], Copied]:
    """Make the model without weights, in the dtype that it would be trained in; return with it
    which of its tensors loading would copy."""
    if elsewhere is None:
        capability = card_capability(device)
    else:
        capability = elsewhere.capability if device == "cuda" else None
    method = method_of(config)
    empty = method.open_empty(config, capability, weightless=elsewhere is not None)
    model = empty.model
    if not is_pipeline(config.model.path):
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        check_sequence_length(config.data.row_tokens, positions)
    targets = method.prepare(model, config)
    return model, (dtype_choice(empty.precision), *targets), empty.copied


def _host_limit(capacity: Capacity, placement: Placement, here: Machine | None) -> int | None:
    """Return the bytes that the whole process may take; here it holds a part of them already."""
    available = capacity.host_available_bytes
    if here is None or available is None:
        return available
    may_take = available + placement.process_bytes
    return min(may_take, here.memory_total_bytes or may_take)


def _of(size: int | None, limit: int | None) -> str:
    return f"{bytes_text(size)} of {bytes_text(limit)}" if limit else bytes_text(size)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    text = ", ".join(map(str, value))  # a number is how many, in brackets it is which
    return f"[{text}]" if value and all(isinstance(one, int) for one in value) else text
