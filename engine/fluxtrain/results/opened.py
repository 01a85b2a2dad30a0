"""Opens a model for use: its base, its adapter, its tokenizer, streamed through the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.core.wrap.target import compute_devices, placed
from fluxtrain.core.wrap.wrap import Keeping, wrap_placed
from fluxtrain.errors import DoesNotFit
from fluxtrain.machine.machine import read_machine
from fluxtrain.models.copies import Copied
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model, tokenizer_of_folder
from fluxtrain.models.model_files import TOKENIZER_FILES
from fluxtrain.models.precision import Capability
from fluxtrain.models.quiet import quiet_transformers
from fluxtrain.plan import states
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.group_placement import GroupPlacement
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import PlacementRequest, RunRequest
from fluxtrain.plan.states import StorageFormat
from fluxtrain.results.adapter.chosen_base import ChosenBase, chosen_base
from fluxtrain.results.model_request import FoundModel, ModelRequest, find_model
from fluxtrain.train.placing.cards import hold_to_budget
from fluxtrain.train.placing.placing import capacity_of, disk_home, packed_cache
from fluxtrain.units import GIB, bytes_text

if TYPE_CHECKING:  # peft is imported where there are adapters
    from fluxtrain.results.adapter.slots import Slots
    from fluxtrain.results.adapter.source import AdapterSource

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A wrapped model in evaluation mode, with its tokenizer and facts."""

    model: PreTrainedModel
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    loaded: LoadedModel
    found: FoundModel
    name: str
    base: str | None  # of an adapter
    placed: str  # where its bytes are, in words
    storage: StorageFormat = "plain"
    slots: Slots | None = None  # for adapters
    generation: GenerationConfig | None = None  # of an adapter in a slot

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Return the default settings of answers."""
        return self.generation or self.model.generation_config

    @property
    def device(self) -> torch.device:
        """Return the device that computes."""
        return self.engine.device.torch_device

    def close(self) -> None:
        """Stop its threads; it is of no use afterwards."""
        self.engine.close()


def open_model(request: ModelRequest, tell: Tell) -> OpenedModel:
    """Find, load and place a model; `tell` is called with the progress.

    Raises BadInput for missing or damaged files, DoesNotFit where memory is too small.
    """
    request.check_values()
    found = find_model(request.named, request.step)
    devices = compute_devices(request.device, request.wished_cards)
    device = devices[0]
    if device.type == "cuda" and len(devices) > 1:
        torch.cuda.set_device(device)  # where code around the blocks computes, and budgets are held
    with ExitStack() as until_placed:
        adapter, base = found.adapter, None
        if found.checkpoint is not None and not found.checkpoint.is_whole:
            adapter = until_placed.enter_context(found.checkpoint.adapter(request))
        if adapter is not None:
            base = until_placed.enter_context(chosen_base(request, adapter))
            tell(f"reading {base.name} and the adapter {found.path}")
            loaded = _beside_adapter(request, base, adapter, devices)
        else:
            tell(f"reading {found.path}")

            def fits(empty: PreTrainedModel, copied: Copied) -> None:
                _slots(request, empty)  # they take memory, too
                storage = request.slot_storage
                refuse_before_loading(request, devices, storage, found.path, empty, copied)

            loaded = _loaded(request, found, device, fits)
        storage: StorageFormat = base.storage if base else request.slot_storage
        slots = _slots(request, loaded.model)
        loaded.model.train(False)
        _leave_router_losses_out(loaded.model)
        for parameter in loaded.model.parameters():
            # Trainable ones are never packed with the frozen weights.
            parameter.requires_grad_(parameter.requires_grad and storage != "plain")
        engine, placed = place_for_use(loaded, devices, storage, request, tell)
    return OpenedModel(
        model=loaded.model,
        engine=engine,
        tokenizer=loaded.tokenizer,
        loaded=loaded,
        found=found,
        name=found.name,
        base=base.name if base else None,
        placed=placed,
        storage=storage,
        slots=slots,
    )


def _loaded(
    request: ModelRequest,
    found: FoundModel,
    device: torch.device,
    fits: Callable[[PreTrainedModel, Copied], None],
) -> LoadedModel:
    """Load a model all of whose weights were trained."""
    if found.checkpoint is not None:
        return found.checkpoint.load(request, fits)
    source = ModelSource(
        path=found.path,
        dtype=request.torch_name,
        trust_remote_code=request.trust_remote_code,
        capability=_capability(device),
    )
    packs = request.slot_storage != "plain"
    return load_model(source, fits, packed_elements=states.LEAST_PACKED if packs else None)


def _slots(request: ModelRequest, model: PreTrainedModel) -> Slots | None:
    """Make the slots that are asked for, before the model is wrapped."""
    if not request.slots:
        return None
    from fluxtrain.results.adapter.slots import Slots

    return Slots.make(model, request.slots, request.slot_rank)


def _capability(device: torch.device) -> Capability | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _beside_adapter(
    request: ModelRequest,
    base: ChosenBase,
    source: AdapterSource,
    devices: Sequence[torch.device],
) -> LoadedModel:
    """Load a base with the adapter in it, the adapter's tokenizer and generation settings."""
    from fluxtrain.results.adapter.attached import attach, put_beside
    from fluxtrain.results.adapter.refusals import note_without_effect

    def fits(empty: PreTrainedModel, copied: Copied) -> None:
        refuse_before_loading(request, devices, base.storage, base.name, empty, copied)
        if source.config.peft_type == "LORA":  # some other kinds need the weights
            attach(source, empty, "plain")  # refuses one that does not fit

    note_without_effect(source.folder, source.config, source.weights)
    wished = request.torch_name
    packs = base.storage != "plain"
    loaded = load_model(
        ModelSource(
            path=str(base.files.folder),
            dtype=str(base.dtype).removeprefix("torch.") if wished == "auto" else wished,
            trust_remote_code=request.trust_remote_code,
            capability=_capability(devices[0]),
        ),
        fits,
        packed_elements=states.LEAST_PACKED if packs else None,
    )
    adapted: Any = put_beside(source, loaded.model)
    model = adapted.get_base_model()
    if any((source.folder / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = tokenizer_of_folder(source.folder, request.trust_remote_code)
        loaded = replace(loaded, tokenizer=tokenizer)
    settings = generation_settings(source.folder)
    if settings is not None:
        model.generation_config = settings
    return replace(loaded, model=model)


def _leave_router_losses_out(model: PreTrainedModel) -> None:
    """Switch the loss that balances experts off: it belongs to training, and transformers fails to
    compute it with a cache."""
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False


def generation_settings(folder: Path) -> GenerationConfig | None:
    """Read a folder's generation settings; None where it has none."""
    if not (folder / "generation_config.json").is_file():
        return None
    with quiet_transformers():
        return GenerationConfig.from_pretrained(folder)


def place_for_use(
    loaded: LoadedModel,
    devices: Sequence[torch.device],
    storage: StorageFormat,
    request: ModelRequest,
    tell: Callable[[str], None],
) -> tuple[Engine, str]:
    """Stream a loaded model through `devices`, the fewest that hold it, or all; return its engine,
    and its places in words.

    Half of a device's memory is left for the cache of keys and values and for activations.
    Raises DoesNotFit where neither the devices nor the host have room.
    """
    on_gpus = devices[0].type == "cuda"
    others = [device.index for device in devices[1:]]
    budget_bytes = hold_to_budget(request.budget_gib, others) if on_gpus else None
    facts = facts_of(loaded.model, "fp32", storage)
    asked = _asked(request, budget_bytes)
    placement, used = _placed(loaded.name, facts, loaded.model, devices, request, asked)
    keeping: Keeping | None = None
    if storage != "plain" and loaded.weight_files:
        away = {row.name for row in placement.groups if row.is_on("disk")}
        keeping = partial(packed_cache, loaded, storage, tell, on_disk=away)
    how: dict[str, Any] = {"states": "fp32", "frozen": storage, "keeping": keeping}
    if len(used) > 1:
        how["cards"] = [one.index for one in used] if on_gpus else range(len(used))
    wrap_placed(loaded.model, devices[0].type if "cards" in how else str(used[0]), placement, **how)
    return engine_of(loaded.model), _in_words(placement, used)


def refuse_before_loading(
    request: ModelRequest,
    devices: Sequence[torch.device],
    storage: StorageFormat,
    name: str,
    empty: nn.Module,
    copied: Copied,
) -> None:
    """Raise DoesNotFit, from a model without its weights, where they cannot be read or placed."""
    empty.requires_grad_(False)
    needed = copied.weights_bytes + copied.sources_bytes
    there = capacity_of(read_machine(), devices[0].type).host_available_bytes
    if there is not None and needed > there:
        raise DoesNotFit(
            f"{name} cannot be used here: reading it in another dtype than its files' makes copies "
            f"of {bytes_text(needed)}, and {bytes_text(there)} of host memory are free: leave "
            "--dtype out, or close other programs"
        )
    facts = facts_of(empty, "fp32", storage)
    _placed(name, facts, empty, devices, request, _asked(request, None))


def _asked(request: ModelRequest, budget_bytes: int | None) -> RunRequest:
    budget_gib = request.budget_gib if budget_bytes is None else budget_bytes / GIB
    offload: Any = request.offload
    return RunRequest.of(PlacementRequest(offload=offload, budget_gib=budget_gib))


def _placed(
    name: str,
    facts: ModelFacts,
    model: nn.Module,
    devices: Sequence[torch.device],
    request: ModelRequest,
    asked: RunRequest,
) -> tuple[Placement, list[torch.device]]:
    """Place a model on as few devices as hold all blocks, or on all; or on the named ones."""
    least = len(devices) if request.cards is not None else 1
    # not plain weights: among them are adapters, which other ones replace while it is used
    packed = any(group.packed_bytes for group in facts.groups)
    disk = disk_home(facts, {}, allowed=True) if packed else None
    found: tuple[Placement, list[torch.device]] | None = None
    refused: DoesNotFit | None = None
    for number in range(least, len(devices) + 1):
        try:
            found = placed(facts, model, devices[:number], asked, disk=disk)
        except DoesNotFit as error:
            refused = refused or error
            continue
        blocks = _blocks(found[0])
        if all(map(_stays, blocks)):
            break
    if found is None:
        raise DoesNotFit(f"{name} cannot be used here: {refused}") from refused
    return found


def _blocks(placement: Placement) -> list[GroupPlacement]:
    return [row for row in placement.groups if row.kind == "block"]


def _stays(row: GroupPlacement) -> bool:
    """Return whether the weights are on the device for good."""
    return row.is_on("device") or row.resident


def _in_words(placement: Placement, devices: Sequence[torch.device]) -> str:
    """Say where the weights are."""
    weights = _blocks(placement)
    here = sum(map(_stays, weights))
    size = bytes_text(placement.device_bytes)
    where = "the GPU" if devices[0].type == "cuda" else "the CPU"
    if len(devices) > 1:
        where = f"{len(devices)} {'GPUs' if devices[0].type == 'cuda' else 'parts of the CPU'}"
    if here == len(weights):
        return f"all {here} blocks on {where} ({size})"
    return f"{len(weights) - here} of {len(weights)} blocks streamed through {where} ({size})"
