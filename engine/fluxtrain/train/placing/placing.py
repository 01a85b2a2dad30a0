"""The plan of a run: facts of its model and of this machine, handed to the placement rule."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import torch
from torch import nn

from fluxtrain.config.schema import RunConfig
from fluxtrain.core.device.heap import trim_heap
from fluxtrain.core.memory.packed import kept_name
from fluxtrain.core.optimizer.third_party import check_third_party
from fluxtrain.core.quantization.packed_cache import (
    PackedCache,
    Parameter,
    Say,
    cache_folder,
    cache_key,
)
from fluxtrain.core.ranks.join import ALONE, Ranks
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.events import ChoiceMade
from fluxtrain.machine.disk import read_disk
from fluxtrain.machine.gpu import check_accelerator
from fluxtrain.machine.machine import available_bytes
from fluxtrain.measure.measured_constants import Constants
from fluxtrain.measure.probe.disk_rate import disk_rates
from fluxtrain.methods.method import method_of, text_row
from fluxtrain.models.kernels import fuses_loss
from fluxtrain.models.loading import LoadedModel
from fluxtrain.models.precision import Capability, Precision
from fluxtrain.plan.capacity import CardsCapacity, DiskHome
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import Capacity, ModelFacts
from fluxtrain.plan.footprint import saving_bytes
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.reasons import DEFERRED, WITH_WEIGHTS, without_effect
from fluxtrain.plan.request import ParallelRequest, RunRequest
from fluxtrain.plan.search import STOPS
from fluxtrain.plan.states import THIRD_PARTY_FORMATS, StateFormat, StorageFormat
from fluxtrain.train.placing.cards import (
    cards_of,
    first_of,
    hold_to_budget,
    make_first_current,
    rates_of_cards,
)
from fluxtrain.units import GIB

if TYPE_CHECKING:
    from fluxtrain.core.memory.group import Group
    from fluxtrain.core.wrap.engine import Engine


_BEGINNING = 2048  # elements of a weight, by which others of the same name are told apart
SURELY_HELD = 0.7  # of the free host memory: a model that takes less has no weights on disk


def choose_device(config: RunConfig) -> ChoiceMade:
    """cpu or cuda, with the reason; the first card that a run names is torch's current one then.

    Raises:
        BadInput: a GPU is here that torch cannot use, or one was asked for and there is none; the
            optimizer's package is not installed, or needs a GPU.
    """
    device = check_accelerator(
        torch.cuda.is_available(),
        config.placement.device,
        torch_cuda_version=torch.version.cuda,
    )
    if config.train.optimizer != "adamw":
        check_third_party(config.train.optimizer, device.value)
    make_first_current(config, device.value)
    return device


def card_capability(device: str) -> Capability | None:
    """Compute capability of the card that computes; None without one."""
    return (
        torch.cuda.get_device_capability(torch.cuda.current_device()) if device == "cuda" else None
    )


def dtype_choice(found: Precision) -> ChoiceMade:
    """Return the choice of the dtype as a plan shows it."""
    return ChoiceMade(name="model.dtype", value=found.dtype, because=found.because)


def optimizer_in_backward(config: RunConfig, facts: ModelFacts) -> bool:
    """Return whether each group is updated as soon as its gradients arrive; never where they may
    overflow."""
    return config.train.optimizer_in_backward and not facts.scales_its_loss


def model_facts(
    model: nn.Module,
    config: Any,
    sequence_length: int,
    states: StateFormat = "fp32",
    frozen: StorageFormat = "plain",
) -> ModelFacts:
    """Return the sizes of a causal language model and of one row, also for a model on the meta
    device.

    `config` is its Hugging Face configuration, `states` how AdamW's moments are kept, `frozen` how
    frozen weights are.
    """
    row = text_row(model, config, sequence_length)
    return replace(facts_of(model, states, frozen), row=row)


def model_facts_for(config: RunConfig, model: nn.Module) -> ModelFacts:
    """Return the sizes of a model for rows and optimizer states of a run's configuration."""
    method = method_of(config)
    frozen = method.frozen_storage(config.method)
    row = method.row_facts(config, model)
    fuses = config.is_sharded and fuses_loss(config.model.kernels, model)
    found = replace(facts_of(model, config.train.states, frozen), row=row, fuses_loss=fuses)
    name = config.train.optimizer
    if name == "adamw":
        return found
    if found.scales_its_loss:
        raise BadInput(
            f"train.optimizer={name} keeps no fp32 masters, which fp16 needs (this card has no "
            "bf16): use model.dtype=float32, or FluxTrain's own adamw"
        )
    return found.without_masters(THIRD_PARTY_FORMATS[name])


def decide(  # noqa: PLR0913 - each is a fact of its own
    config: RunConfig,
    facts: ModelFacts,
    machine: Machine,
    device: str,
    *,
    batch_rows: int | None,
    data_rows: int | None,
    loaded_bytes: int = 0,
    capacity: Capacity | None = None,
    elsewhere: CardsCapacity | None = None,
    constants: Constants | None = None,
    runs_in: str = "",
) -> Placement:
    """Return where the bytes go and how many rows a step takes.

    `batch_rows` None leaves it to the rule; `data_rows` are those of one epoch; `loaded_bytes` of
    this process are weights that move to where the plan puts them; `capacity` None is that of this
    machine, else `elsewhere` are the cards of the other one.
    `constants` None, or too few of them, leaves the layout to the rule that knows no time.
    `runs_in` is the run's folder, where optimizer states go to disk unless another is named.

    Raises:
        DoesNotFit: no layout does; says what it needs and what there is.
    """
    budget_bytes = None
    if device == "cuda" and capacity is None:
        budget_bytes = hold_to_budget(config.placement.budget_gib)
    request = request_of(config, facts, batch_rows, data_rows)
    has_gpu = device == "cuda"
    found = None if constants is None else constants.rates(has_gpu=has_gpu)
    first = None if found is None or isinstance(found, str) else found
    asked = request if budget_bytes is None else replace(request, budget_gib=budget_bytes / GIB)
    cards = None
    if not _not_dealt(config, facts):
        cards = elsewhere
        if capacity is None:
            cards = cards_of(config, machine, device, budget_bytes)
        if cards is not None and len(cards.cards) == 1 and config.parallel == ParallelRequest():
            cards = None
    share, per_s = dial_share(config), {} if constants is None else constants.per_s
    here = capacity is None
    disk = disk_home(facts, per_s, allowed=config.model.packed_cache, here=here, asked=asked.disk)
    homes: dict[str, Any] = {"disk": disk, "spill": spill_home(config, per_s, runs_in, here=here)}
    if cards is None:
        alone = capacity or capacity_of(machine, device)
        with adapters_as_cure(config):
            placement = place(facts, alone, asked, rates=first, share=share, **homes)
    else:
        rates = None
        if first is not None and constants is not None:
            known = None if capacity is None else constants.per_s
            rates = rates_of_cards(cards, first, known, timed_on=first_of(config))
        homes |= {"rates": rates, "share": share}
        with adapters_as_cure(config):
            placement = place(facts, cards, asked, config.parallel, **homes)
    gc.collect()  # a model whose blocks were timed
    trim_heap()  # what is kept of freed memory is used again: it is no part of the process
    return replace(
        placement,
        choices=(
            *placement.choices,
            *undealt_choice(config, facts),
            *dial_choice(config, device, timed=first is not None),
            *unused_choices(config, processes=facts.processes),
        ),
        process_bytes=max(0, psutil.Process().memory_info().rss - loaded_bytes),
        saving_bytes=saving_bytes(facts, placement.layout) if device == "cuda" else 0,
    )


@contextlib.contextmanager
def adapters_as_cure(config: RunConfig) -> Iterator[None]:
    """Add to a DoesNotFit of full training that adapters take less."""
    try:
        yield
    except DoesNotFit as error:
        if config.method.name != "full":
            raise
        raise DoesNotFit(
            f"{error}; or train adapters alone, whose states are small (method.name=lora)"
        ) from error


def disk_home(
    facts: ModelFacts,
    per_s: Mapping[str, float | None],
    *,
    allowed: bool,
    here: bool = True,
    asked: str = "auto",
) -> DiskHome | None:
    """Return where frozen weights may live that the host cannot hold; None: there are none.

    per_s: rates of the probe. allowed: model.packed_cache. here: on this machine. asked:
    placement.disk.
    """
    if not any(group.kind == "block" and group.file_bytes for group in facts.groups):
        return None
    found = read_disk(cache_folder())
    folder, unusable = str(cache_folder()), ""
    if asked == "off":
        unusable = "placement.disk=auto lets frozen weights that do not fit live on disk"
    elif not allowed:
        unusable = "model.packed_cache=true lets frozen weights that do not fit live on disk"
    elif here and found.in_memory:
        unusable = (
            f"frozen weights cannot live in {folder}, which is in memory itself: set "
            "XDG_CACHE_HOME to a folder on a disk"
        )
    return DiskHome(
        folder=folder,
        read_bytes_per_s=per_s.get("disk_read"),
        unusable=unusable,
        on_network=here and found.on_network is True,
    )


def spill_home(
    config: RunConfig, per_s: Mapping[str, float | None], runs_in: str, *, here: bool = True
) -> DiskHome:
    """Return where optimizer states may live that the host cannot hold: placement.disk_path, or in
    the run's folder. per_s: rates of the probe. here: on this machine."""
    asked = config.placement.spill_folder
    folder = asked or runs_in or (tempfile.gettempdir() if here else "the run's folder")
    found = read_disk(Path(folder))
    unusable = ""
    if here and found.in_memory:
        unusable = (
            f"optimizer states cannot live in {folder}, which is in memory itself "
            f"({found.file_system}): set placement.disk_path to a folder on a disk"
        )
    elif here and asked and not os.access(asked, os.W_OK | os.X_OK):
        unusable = (
            f"optimizer states cannot live in {asked}: set placement.disk_path to a folder that is "
            "there and that this user can write to"
        )
    return DiskHome(
        folder=folder,
        read_bytes_per_s=per_s.get("disk_read"),
        write_bytes_per_s=per_s.get("disk_write"),
        total_bytes=found.total_bytes if here else None,
        unusable=unusable,
        on_network=here and found.on_network is True,
    )


def with_disk_rate(
    constants: Constants, config: RunConfig, facts: ModelFacts, machine: Machine, runs_in: str
) -> Constants:
    """Measure how fast the disk of frozen weights reads, or that of optimizer states also writes,
    where some may have to live there."""
    asked = config.placement
    known = [
        size for size in (machine.memory_available_bytes, asked.host_bytes) if size is not None
    ]
    if not known or facts.host_bytes < SURELY_HELD * min(known):
        return constants
    spill = spill_home(config, constants.per_s, runs_in)
    if asked.disk == "on" and not spill.unusable:
        rates = zip(("disk_write", "disk_read"), disk_rates(Path(spill.folder)), strict=True)
        found = {name: rate.per_s for name, rate in rates if rate.per_s}
        return replace(constants, per_s={**constants.per_s, **found})
    home = disk_home(facts, constants.per_s, allowed=config.model.packed_cache, asked=asked.disk)
    if home is None or home.unusable:
        return constants
    folder = Path(home.folder)
    with contextlib.suppress(OSError):  # packing tells what is wrong with the folder
        folder.mkdir(parents=True, exist_ok=True)
    read = disk_rates(folder)[1].per_s or home.read_bytes_per_s
    return replace(constants, per_s={**constants.per_s, "disk_read": read})


def _not_dealt(config: RunConfig, facts: ModelFacts) -> str:
    """Return why blocks are not dealt to several cards; empty: they may be."""
    if config.train.optimizer != "adamw":
        return f"train.optimizer = {config.train.optimizer} updates on one card"
    shared = any(group.kind == "block" and group.users > 1 for group in facts.groups)
    return "blocks of this model share weights, so that one card has them all" if shared else ""


def undealt_choice(config: RunConfig, facts: ModelFacts) -> tuple[ChoiceMade, ...]:
    """Explain settings for several cards that have no effect."""
    because = _not_dealt(config, facts)
    cards = config.parallel.cards
    one = isinstance(cards, tuple) and len(cards) == 1  # the one that it updates on
    if not because or one or config.parallel == ParallelRequest():
        return ()
    return (ChoiceMade(name="parallel.cards", value="1", because=f"no effect: {because}"),)


def unused_choices(config: RunConfig, *, processes: int = 1) -> Iterator[ChoiceMade]:
    """Explain settings of several processes that have no effect, in a run or the plan of one."""
    asked, because = config.parallel, ""
    if config.is_sharded:
        because = "no effect with parallel.mode=fsdp, which has its own way"
    elif max(asked.processes, processes) == 1:
        because = "no effect in one process: set parallel.processes, or start several with torchrun"
    for name in ("params", "gradients") if because else ():
        if (value := getattr(asked, name)) != getattr(ParallelRequest(), name):
            yield ChoiceMade(name=f"parallel.{name}", value=value, because=because)


def dial_choice(config: RunConfig, device: str, *, timed: bool) -> tuple[ChoiceMade, ...]:
    """Explain a dial setting that has no effect."""
    asked = config.placement.aggressiveness
    because = ""
    if device != "cuda":
        because = "no effect without a GPU: what is on the device is in host memory as well"
    elif config.placement.offload == "max":
        because = "no effect with placement.offload=max, which takes the least of the device"
    elif not timed:
        because = "no effect: without measured rates no layout is timed"
    if asked == "auto" or not because:
        return ()
    return (ChoiceMade(name="placement.aggressiveness", value=str(asked), because=because),)


def as_it_is_now(machine: Machine, given_back_bytes: int, share: float = 1.0) -> Machine:
    """Return `machine` with the host memory available now, after loading, plus the memory that
    this process is about to free; of the first it may take a `share`."""
    left = available_bytes()
    available = None if left is None else max(0, int(left * share) + given_back_bytes)
    return msgspec.structs.replace(machine, memory_available_bytes=available)


def dial_share(config: RunConfig) -> float:
    """Return how much of the memory above the least that runs a layout may take."""
    asked = config.placement.aggressiveness
    return STOPS.get(asked, STOPS["fast"]) if isinstance(asked, str) else asked


def capacity_of(machine: Machine, device: str) -> Capacity:
    """Return the machine's memory now, of several cards the current one's."""
    free = torch.cuda.mem_get_info(torch.cuda.current_device())[0] if device == "cuda" else None
    return Capacity(device_free_bytes=free, host_available_bytes=machine.memory_available_bytes)


def within_host(capacity: Capacity, config: RunConfig) -> Capacity:
    """Return a capacity with no more host memory than placement.host_gib lets the plan use."""
    most, available = config.placement.host_bytes, capacity.host_available_bytes
    if most is None:
        return capacity
    return replace(
        capacity, host_available_bytes=min(most, most if available is None else available)
    )


def request_of(
    config: RunConfig, facts: ModelFacts, batch_rows: int | None, data_rows: int | None
) -> RunRequest:
    """Return a configuration's request for the placement."""
    own = config.train.optimizer == "adamw"
    asked = config.placement if own else replace(config.placement, offload="none")
    return RunRequest.of(
        asked,
        batch_rows=batch_rows,
        data_rows=data_rows,
        passes=config.train.accumulation,
        optimizer_in_backward=optimizer_in_backward(config, facts),
        deferred_moments=DEFERS_MOMENTS[config.train.moments],
    )


DEFERS_MOMENTS: dict[str, bool | None] = {"auto": None, WITH_WEIGHTS: False, DEFERRED: True}


class RanOutLoading(torch.OutOfMemoryError):
    """Device memory ran out while weights were loaded onto the device; the model is
    unusable now."""


def wrapped(
    config: RunConfig,
    loaded: LoadedModel,
    device: str,
    placement: Placement,
    facts: ModelFacts,
    say: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> tuple[nn.Module, Engine]:
    """Return the model wrapped as `placement` says, and its engine; `say` gets the outcome of the
    cache of packed weights. Several `ranks` add up their gradients. Raises RanOutLoading."""
    from fluxtrain.core.guards.wrap_checks import wide_frozen_weights
    from fluxtrain.core.ranks.exchange import Exchange
    from fluxtrain.core.updates.loss_scale import LossScale
    from fluxtrain.core.wrap.engine import engine_of
    from fluxtrain.core.wrap.wrap import Keeping, wrap_placed

    states = config.train.states
    frozen = method_of(config).frozen_storage(config.method)
    keeping: Keeping | None = None
    away = {row.name for row in placement.groups if row.is_on("disk")}
    if (frozen != "plain" or away) and loaded.weight_files and config.model.packed_cache:
        keeping = partial(packed_cache, loaded, frozen, say, on_disk=away)
    how: dict[str, Any] = {"states": states, "frozen": frozen, "keeping": keeping}
    first = placement.cards[0].index
    cards = [card.index or 0 for card in placement.cards] if placement.several_cards else None
    if device == "cuda" and first is not None:
        torch.cuda.set_device(first)  # where embedding, head and what stands between blocks are
    here = [torch.device(device)]  # torch's current GPU
    how["exchange"] = Exchange(
        ranks,
        here if cards is None else [torch.device(device, number) for number in cards],
        sums=True,
        order=config.parallel.order,
        params=config.parallel.params,
        on_host=config.parallel.gradients == "cpu_reduce",
    )
    try:
        streamed = wrap_placed(loaded.model, device, placement, cards=cards, **how)
    except torch.OutOfMemoryError as error:
        raise RanOutLoading(*error.args) from None
    except DoesNotFit as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        raise RanOutLoading(*error.args) from None
    engine = engine_of(streamed)
    for text in without_effect(request_of(config, facts, None, None), placement.choices):
        engine.say(text)
    if config.model.dtype == "auto" and (wide := wide_frozen_weights(engine.groups)):
        engine.say(
            f"the model's files hold {wide:,} frozen weights in float32: "
            "model.dtype=bfloat16 halves their memory"
        )
    files = [file for group in engine.groups for _, file in group.memory.files]
    if not all(file.is_direct for file in files):
        engine.say(
            f"{files[0].path.parent} has no direct reads: weights on disk pass through the page "
            "cache, which is slower (another file system has them: set XDG_CACHE_HOME)"
        )
    if facts.scales_its_loss:
        engine.loss_scale = LossScale(engine.device.torch_device)
    return streamed, engine


def packed_cache(
    loaded: LoadedModel,
    frozen: StorageFormat,
    say: Say,
    groups: Iterable[Group],
    *,
    on_disk: Collection[str] = (),
) -> PackedCache:
    """Open the cache of a loaded model whose `groups` are not settled yet: of packed weights, or of
    `plain` ones. on_disk: names of the groups that live there.

    Raises BadInput where the model's files have gone since they were loaded.
    """
    sizes: dict[str, int] = {}
    homes: list[str] = []
    parameters: list[Parameter] = []
    beginnings = hashlib.sha256()
    for group in groups:
        plain = group.file_segments if group.kind == "block" else []
        for segment in plain if frozen == "plain" else group.packed_segments:
            sizes[kept_name(segment, group.name)] = segment.size_bytes
            homes += [kept_name(segment, group.name)] if group.name in on_disk else []
            parameters += [
                (f"{group.name}.{m.name}", tuple(m.shape), segment.dtype) for m in segment.members
            ]
            for member in segment.members if frozen == "plain" else ():
                few = member.parameter.detach().reshape(-1)[:_BEGINNING].cpu()
                beginnings.update(few.view(torch.uint8).numpy().data)
    # plain weights may be no file's: frozen parts of adapters, which are drawn or trained anew
    more = [beginnings.hexdigest()] if frozen == "plain" else []
    try:
        key = cache_key(frozen, loaded.weight_files, parameters, more)
    except OSError as error:
        raise BadInput(f"the model's weights cannot be read any more: {error}") from error
    return PackedCache(key, sizes, say, homes=homes)
