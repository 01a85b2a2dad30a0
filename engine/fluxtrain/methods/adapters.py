"""Low-rank adapters on frozen weights: LoRA, rsLoRA and DoRA, by peft's own classes.

Hu et al. 2021, "LoRA" (https://arxiv.org/abs/2106.09685). Adapters are in the dtype of the layers
that they are added to, with exact fp32 masters in the optimizer. Their files are peft's.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fluxtrain.config.schema import MethodSettings, ModelSettings
from fluxtrain.errors import BadInput
from fluxtrain.files.opening import whole
from fluxtrain.machine.failures import first_line
from fluxtrain.methods.trained_on import TrainedOn
from fluxtrain.models.beside import write_adapter_files
from fluxtrain.models.export import save_folder
from fluxtrain.models.isolation import first_blocks
from fluxtrain.models.loading import LoadedModel
from fluxtrain.plan.states import StorageFormat

LINEAR = (nn.Linear, Conv1D)  # layers that peft's LoRA adapts; Conv1D is GPT-2's linear layer
# `self.out_proj.weight` as a kernel's argument; comparing or setting it up is no reading of it.
_READ_PAST = re.compile(
    r"(?<!isinstance\()\bself\.(\w+)\.weight\b"
    r"(?!\s*=[^=]|\[|\.(?:data|dtype|device|shape|ndim|size|_\w+)\b)"
)
_NUMBER = re.compile(r"\d+")
_TOKENS = 8
_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Layers that get adapters."""

    layers: tuple[str, ...]  # their full names
    names: list[str]  # the same for peft: last names where they say enough
    because: str


def find_targets(model: PreTrainedModel, wanted: str | Sequence[str]) -> Targets:
    """Find the layers for `method.targets`; `auto` is every linear layer that can be adapted but
    the head, routers and gates of one value.

    Raises BadInput where there is none, and for a name of `wanted` that is none or cannot have an
    adapter.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LINEAR)}
    taken = {last for last in {_last(name) for name in layers} if _taken_for_experts(model, last)}
    in_text = {id(module) for module in _text_model(model).modules()} | {id(_head(model))}

    def why_not(name: str, layer: nn.Module) -> str:
        if _last(name) in taken:
            return "peft takes its name for the experts'"
        return _why_not(model, name, layer) if id(layer) in in_text else "text does not reach it"

    whys = {name: why_not(name, layer) for name, layer in layers.items()}
    if isinstance(wanted, str):
        whys = {name: why or _why_not_asked(model, name) for name, why in whys.items()}
        chosen = [name for name, why in whys.items() if not why]
        because = _because(model, chosen, whys)
    else:
        chosen = _named(model, wanted, whys)
        because = "as set"
    if not chosen:
        raise BadInput(
            f"{type(model).__name__} has no linear layers except its head to put adapters "
            "on: name the layers in method.targets, or use method.name=full"
        )
    return Targets(layers=tuple(chosen), names=_for_peft(model, chosen), because=because)


def _named(model: nn.Module, wanted: Sequence[str], whys: dict[str, str]) -> list[str]:
    """Return the layers of these names that can have adapters, in the model's order."""
    chosen: set[str] = set()
    for target in wanted:
        found = [name for name in whys if name == target or name.endswith(f".{target}")]
        if not found:
            known = sorted({_last(name) for name in whys})
            near = difflib.get_close_matches(target, known, n=3, cutoff=0.4) or known[:8]
            raise BadInput(
                f"method.targets: no linear layer of {type(model).__name__} is called {target!r}: "
                f"use {', '.join(near)}, or auto for all that can be adapted"
            )
        fit = [name for name in found if not whys[name]]
        if not fit:
            raise BadInput(
                f"method.targets: {found[0]} cannot have an adapter: {whys[found[0]]}; leave "
                f"{target!r} out, or use auto for all layers that can be adapted"
            )
        chosen.update(fit)
    return [name for name in whys if name in chosen]


def _why_not(model: PreTrainedModel, name: str, layer: nn.Module) -> str:
    """Say why a layer cannot have an adapter that is trained; "" where it can."""
    parent: Any = type(model.get_submodule(name.rpartition(".")[0]))
    own = next(kind for kind in LINEAR if isinstance(layer, kind))
    if type(layer).forward is not own.forward:
        return f"it is a {type(layer).__name__}, which computes more than a linear layer"
    if _last(name) in _read_past(parent):
        return f"{parent.__name__} reads its weight past the layer"
    return ""


def _why_not_asked(model: PreTrainedModel, name: str) -> str:
    """Say why a layer gets no adapter unless it is named."""
    layer: Any = model.get_submodule(name)
    if layer is _head(model):
        return "the head"
    if min(layer.weight.shape) == 1:
        return "a gate of one value"
    return "a router" if _is_router(model, name) else ""


def _text_model(model: PreTrainedModel) -> nn.Module:
    """Return the text model, without the parts that see pictures or hear."""
    decoder: nn.Module | None = model.get_decoder()  # type: ignore[no-untyped-call]
    return model if decoder is None else decoder


def _head(model: PreTrainedModel) -> nn.Module | None:
    found: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found


@cache
def _read_past(kind: type[Any]) -> frozenset[str]:
    """Return the layers whose weight a class passes to a kernel (state space models do): an
    adapter on such a layer is not computed."""
    found: set[str] = set()
    for one in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        try:
            found |= set(_READ_PAST.findall(inspect.getsource(one)))
        except (OSError, TypeError):  # a class without source
            continue
    return frozenset(found)


def _taken_for_experts(model: nn.Module, name: str) -> bool:
    """Return whether peft takes a layer's name for one that experts had before they became
    parameters, as it does whenever it loads such an adapter."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older peft
        return False
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it wants the other layers of an expert too
        return True
    return name not in (config.target_modules or ())


def _is_router(model: nn.Module, name: str) -> bool:
    """Return whether a layer has one output for each of the experts in its module or in its
    parent."""
    outputs = getattr(model.get_submodule(name), "out_features", 0)
    near = name.split(".")[:-1]
    for path in (near, near[:-1]):
        for child in model.get_submodule(".".join(path)).children():
            listed = len(child) if isinstance(child, nn.ModuleList) else _stacked(child)
            if listed and listed == outputs:
                return True
    return False


def _stacked(module: nn.Module) -> int:
    """Count the matrices that a module has in one parameter, as experts are stored; 0 for none."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0
    return max((p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3), default=0)


def _because(model: nn.Module, chosen: Iterable[str], whys: dict[str, str]) -> str:
    """Say which layers get adapters and which get none, by their last names."""
    without: dict[str, dict[str, None]] = {}
    for name, why in whys.items():
        if why and why != "the head":
            without.setdefault(why, {})[_last(name)] = None
    stacked = {_last(name): None for name, one in model.named_modules() if _stacked(one) > 1}
    if stacked:
        without["matrices in one parameter"] = stacked
    left = [f"{_few(names)} ({why})" for why, names in without.items()]
    told = f"linear layers that text passes through: {_few(dict.fromkeys(map(_last, chosen)))}"
    return f"{told}; none on {', '.join(left)}" if left else told


def _for_peft(model: nn.Module, chosen: Sequence[str]) -> list[str]:
    """Return last names where all modules of that name are chosen, else full names."""
    given = set(chosen)
    others = {_last(name) for name, _ in model.named_modules() if name not in given}
    return list(dict.fromkeys(n if _last(n) in others else _last(n) for n in chosen))


def refuse_uncomputed(model: PreTrainedModel) -> None:
    """Run a few tokens through the first blocks of an adapted model on the CPU.

    Raises BadInput where an adapter breaks the forward pass, or a kind of layer that has adapters
    is never called.
    """
    ids = torch.arange(1, _TOKENS + 1)[None] % model.config.get_text_config().vocab_size
    was_training, called = model.training, set[str]()
    model.train(False)
    try:
        with first_blocks(model), torch.no_grad():
            adapted: dict[str, Any] = {
                n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)
            }
            hooks = [
                branch.register_forward_hook(lambda *_, name=name: called.add(name))
                for name, layer in adapted.items()
                for branch in layer.lora_A.values()
            ]
            try:
                model(input_ids=ids, use_cache=False)
            except Exception as error:  # whatever a layer makes of an adapter's output
                model.disable_adapters()
                try:
                    model(input_ids=ids, use_cache=False)
                except Exception:  # noqa: BLE001 - it computes on a GPU alone: nothing is known
                    return
                finally:
                    model.enable_adapters()
                raise BadInput(
                    f"method.targets: the forward pass of {type(model).__name__} breaks with "
                    f"adapters ({first_line(error)}), and computes without: leave out the layers "
                    "whose output is no single tensor, such as routers"
                ) from error
            finally:
                for hook in hooks:
                    hook.remove()
    finally:
        model.train(was_training)
    kinds = {_NUMBER.sub("#", name) for name in called}
    idle = [name for name in adapted if _NUMBER.sub("#", name) not in kinds]
    if idle:
        raise BadInput(
            f"method.targets: {_few(idle)}: text never passes through "
            f"{'this layer' if len(idle) == 1 else f'these {len(idle)} layers'} of "
            f"{type(model).__name__}, so an adapter there would stay as it began: leave "
            f"{_few(dict.fromkeys(map(_last, idle)))} out of method.targets"
        )


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_MOST_NAMED]) + (", ..." if len(listed) > _MOST_NAMED else "")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


ADAPTER = "default"  # peft's name of the only adapter
_PREFIX = "base_model.model."  # of the names in peft's files
_WEIGHTS = "adapter_model.safetensors"


def attach_adapters(
    model: PreTrainedModel, settings: MethodSettings, source: ModelSettings
) -> Targets:
    """Add an adapter to each target layer of `model`, in place, and freeze all other weights.

    Returns the layers. Raises BadInput where a name of `settings.targets` is no layer's, an
    adapter there cannot be computed, or the rank is larger than a layer.
    """
    targets = find_targets(model, settings.targets)
    check_rank(model, targets.layers, settings.rank)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    config = lora_config(settings, targets.names, task_type="CAUSAL_LM")
    try:
        model.add_adapter(config, adapter_name=ADAPTER)
    except (NoMatchingPeftModuleError, ValueError) as error:
        raise BadInput(f"method.targets: {first_line(error)}") from error
    local = Path(source.path).expanduser()
    config.base_model_name_or_path = str(whole(local)) if local.is_dir() else source.path
    config.revision = source.revision
    if not is_empty:
        refuse_uncomputed(model)
    return targets


def lora_config(settings: MethodSettings, names: Sequence[str], **more: Any) -> LoraConfig:
    """Return peft's configuration of adapters on the layers of these names."""
    return LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank if settings.alpha == "auto" else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(names),
        use_rslora=settings.variant == "rslora",
        use_dora=settings.variant == "dora",
        **more,
    )


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


def check_rank(model: nn.Module, layers: Iterable[str], rank: int) -> None:
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
