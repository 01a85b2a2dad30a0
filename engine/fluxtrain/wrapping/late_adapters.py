"""Adapters that were put into a model after it was wrapped, as TRL does with a `peft_config`."""

from __future__ import annotations

from torch import nn

from fluxtrain.errors import MisusedModel
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.request import RunRequest
from fluxtrain.wrapping.engine import Engine


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of peft's adapters in the model."""
    found = getattr(model, "peft_config", None)
    return tuple(found) if isinstance(found, dict) else ()


def refuse_late(engine: Engine, asked: RunRequest | Placement) -> None:
    """Raise MisusedModel where the model cannot be wrapped again as it was."""
    if any(group.packed_segments for group in engine.groups):
        why = "its base is packed, which packing once more would change"
    elif isinstance(asked, Placement):
        why = "its placement was made without them"
    else:
        return
    raise MisusedModel(
        f"adapters were put into the model after fluxtrain.wrap, and {why}: put them first, "
        "fluxtrain.wrap(get_peft_model(model, config)), and give a trainer that model without a "
        "peft_config"
    )
