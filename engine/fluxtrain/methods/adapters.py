"""Low-rank adapters beside frozen weights: LoRA, rsLoRA and DoRA, by peft's own classes.

Hu et al. 2021, "LoRA" (https://arxiv.org/abs/2106.09685). Adapters are in the dtype of the layers
that they stand beside, with exact fp32 masters in the optimizer. Their files are peft's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model_state_dict
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn
from transformers import PreTrainedModel

from fluxtrain.config.schema import MethodSettings, ModelSettings
from fluxtrain.errors import BadInput
from fluxtrain.methods.targets import Targets, find_targets, refuse_uncomputed
from fluxtrain.methods.trained_on import TrainedOn
from fluxtrain.models.beside import write_adapter_files
from fluxtrain.models.export import save_folder
from fluxtrain.models.loading import LoadedModel
from fluxtrain.plan.states import StorageFormat

ADAPTER = "default"  # peft's name of the only adapter
_PREFIX = "base_model.model."  # of the names in peft's files
_WEIGHTS = "adapter_model.safetensors"


def attach_adapters(
    model: PreTrainedModel, settings: MethodSettings, source: ModelSettings
) -> Targets:
    """Put an adapter beside each target layer of `model`, in place, and freeze all other weights.

    Returns the layers. Raises BadInput where a name of `settings.targets` is no layer's, an adapter
    there cannot be computed, or the rank is larger than a layer.
    """
    targets = find_targets(model, settings.targets)
    _check_rank(model, targets.layers, settings.rank)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank if settings.alpha == "auto" else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets.names,
        use_rslora=settings.variant == "rslora",
        use_dora=settings.variant == "dora",
        task_type="CAUSAL_LM",
    )
    try:
        model.add_adapter(config, adapter_name=ADAPTER)
    except (NoMatchingPeftModuleError, ValueError) as error:
        raise BadInput(f"method.targets: {str(error).splitlines()[0]}") from error
    local = Path(source.path).expanduser()
    config.base_model_name_or_path = str(local.absolute()) if local.is_dir() else source.path
    config.revision = source.revision
    if not is_empty:
        refuse_uncomputed(model)
    return targets


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's weights by their names in peft's files. Embedding and head stay as the
    base has them, for which peft would ask the hub."""
    state: dict[str, Tensor] = get_peft_model_state_dict(
        model, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in state.items()}


def save_adapter(loaded: LoadedModel, storage: StorageFormat, folder: Path) -> int:
    """Write the adapter in peft's format, with tokenizer, chat template and generation settings.

    storage: how the frozen weights were stored. Returns the bytes written.

    Raises NoSpace if the disk fills up and BadInput if the place cannot be written.
    """
    from safetensors.torch import save_file

    model, tensors = loaded.model, adapter_tensors(loaded.model)
    base = TrainedOn(dtype=loaded.precision.dtype, storage=storage, key=loaded.base_key)
    peft_config: dict[str, Any] = model.peft_config

    def write(made: Path) -> None:
        save_file(tensors, made / _WEIGHTS, metadata={"format": "pt", **base.metadata()})
        config = peft_config[ADAPTER]
        config.inference_mode = True
        try:
            config.save_pretrained(str(made))
        finally:
            config.inference_mode = False
        # with the ends that were trained on, for an export
        write_adapter_files(made, model, loaded.tokenizer, loaded.beside)

    return save_folder(write, sum(tensor.nbytes for tensor in tensors.values()), folder)


def _check_rank(model: nn.Module, layers: Iterable[str], rank: int) -> None:
    """Raise BadInput for a rank above that of the layers themselves."""
    for name in layers:
        sizes: tuple[int, ...] = tuple(model.get_parameter(f"{name}.weight").shape)
        least = min(sizes)
        if rank > least:
            raise BadInput(
                f"method.rank is {rank} and {name} is {sizes[0]} x {sizes[1]}: an adapter of rank "
                f"{least} can express every change of it; use that or less, or leave the layer "
                "out of method.targets"
            )
