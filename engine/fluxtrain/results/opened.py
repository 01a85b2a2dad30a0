"""Opens a model for use: its base, its adapter, its tokenizer, streamed through the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.core.wrap.engine import Engine
from fluxtrain.core.wrap.target import compute_devices
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model, tokenizer_of_folder
from fluxtrain.models.model_files import TOKENIZER_FILES
from fluxtrain.models.precision import Capability
from fluxtrain.models.quiet import quiet_transformers
from fluxtrain.plan import states
from fluxtrain.plan.states import StorageFormat
from fluxtrain.results.adapter.chosen_base import ChosenBase, chosen_base
from fluxtrain.results.model_request import FoundModel, ModelRequest, find_model
from fluxtrain.results.placed import place_for_use, refuse_before_loading

if TYPE_CHECKING:
    from fluxtrain.models.copies import Copied
    from fluxtrain.results.adapter.source import AdapterSource

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A wrapped model in evaluation mode, and what belongs to it."""

    model: PreTrainedModel
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    loaded: LoadedModel
    found: FoundModel
    name: str
    base: str | None  # of an adapter
    placed: str  # where its bytes are, in words

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.engine.device.torch_device

    def close(self) -> None:
        """Stop its threads; it is of no use afterwards."""
        self.engine.close()


def open_model(request: ModelRequest, tell: Tell) -> OpenedModel:
    """Find, load and place a model; `tell` is called with the progress.

    Raises BadInput where something is missing or damaged, DoesNotFit where memory lacks.
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
            fits = partial(refuse_before_loading, request, devices, "plain", found.path)
            loaded = _loaded(request, found, device, fits)
        storage: StorageFormat = base.storage if base else "plain"
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
    )


def _loaded(
    request: ModelRequest,
    found: FoundModel,
    device: torch.device,
    fits: Callable[[PreTrainedModel, Copied], None],
) -> LoadedModel:
    """Load a model of which all weights were trained."""
    if found.checkpoint is not None:
        return found.checkpoint.load(request, fits)
    source = ModelSource(
        path=found.path,
        dtype=request.torch_name,
        trust_remote_code=request.trust_remote_code,
        capability=_capability(device),
    )
    return load_model(source, fits)


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
    """Switch the loss that balances experts off: it is of training, and transformers fails to
    compute it beside a cache."""
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False


def generation_settings(folder: Path) -> GenerationConfig | None:
    """Read a folder's generation settings; None where it has none."""
    if not (folder / "generation_config.json").is_file():
        return None
    with quiet_transformers():
        return GenerationConfig.from_pretrained(folder)
