"""Adapters of a FLUX transformer: where they go, and their file as diffusers names its tensors.

The file holds no alpha: the scale, alpha / rank, is in B. diffusers reads alpha from metadata that
other programs do not write, ComfyUI from tensors of its own; without either both take 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from fluxtrain.config.schema import MethodSettings
from fluxtrain.errors import BadInput
from fluxtrain.methods.adapters import ADAPTER, check_rank, lora_config
from fluxtrain.methods.trained_on import TrainedOn
from fluxtrain.models.export import save_folder
from fluxtrain.models.pipeline import save_compared
from fluxtrain.models.quiet import quiet_diffusers

LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for
LISTS = ("transformer_blocks", "single_transformer_blocks")
TARGETS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
    "attn.add_v_proj", "attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj",
    "ff_context.net.2", "proj_mlp",
)  # fmt: skip


def find_layers(model: nn.Module, wanted: str | Sequence[str]) -> list[str]:
    """Return the full names of the layers for `method.targets`, in the model's order; auto is
    `TARGETS`. Raises BadInput for a name that is no linear layer of a block."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    inside = [name for name in layers if name.startswith(LISTS)]
    chosen: set[str] = set()
    for target in TARGETS if isinstance(wanted, str) else wanted:
        found = [name for name in layers if name == target or name.endswith(f".{target}")]
        outside = [name for name in found if name not in inside]
        if outside:
            named = [name for name in found if name in inside]
            cure = f"name {LISTS[1]}.0.{target} and so on" if named else f"leave {target} out"
            raise BadInput(
                f"method.targets: {target!r} also names {outside[0]}, which stands outside the "
                f"blocks: {cure}, or use auto"
            )
        if not found and not isinstance(wanted, str):
            raise BadInput(
                f"method.targets: no linear layer of {type(model).__name__} is called {target!r}: "
                f"use some of {', '.join(TARGETS)}, or auto"
            )
        chosen.update(found)
    return [name for name in inside if name in chosen]


def attach(model: Any, settings: MethodSettings) -> list[str]:
    """Add an adapter to each target layer, in place, and freeze all other weights; return the
    layers. Raises BadInput where `method.*` cannot be had."""
    if settings.variant == "dora":
        raise BadInput(
            "method.variant=dora scales by columns, which programs that load FLUX adapters do not "
            "all read: use lora or rslora"
        )
    layers = find_layers(model, settings.targets)
    check_rank(model, layers, settings.rank)
    model.requires_grad_(False)
    model.add_adapter(lora_config(settings, layers), adapter_name=ADAPTER)
    return layers


def folded(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter by diffusers' names, with the scale in B."""
    state: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    scales = {
        name: layer.scaling[ADAPTER]
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    found = {}
    for name, tensor in state.items():
        layer, is_b, _ = name.partition(".lora_B.")
        scale = scales[layer] if is_b else 1.0
        found[f"transformer.{name}"] = (tensor.detach().cpu() * scale).contiguous()
    return found


def save_adapter(model: nn.Module, base: TrainedOn, folder: Path) -> int:
    """Write the adapter to `folder`, read it again and compare. Returns the bytes written.

    Raises NoSpace, BadInput, or Disagrees where the file is not what was written.
    """
    tensors = folded(model)
    needed = sum(tensor.nbytes for tensor in tensors.values())
    return save_folder(
        lambda made: save_compared(tensors, made / LORA_FILE, **base.metadata()), needed, folder
    )


def load_adapter(model: Any, folder: Path) -> None:
    """Put the adapter of `folder` on a transformer, by diffusers' own code. Raises BadInput."""
    try:
        with quiet_diffusers():
            model.load_lora_adapter(folder / LORA_FILE, prefix="transformer")
    except (OSError, ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())[:200]
        raise BadInput(f"{folder / LORA_FILE} cannot be put on the transformer: {words}") from error
