"""`fluxtrain.wrap` with any knob of the placement by its name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

import fluxtrain
from fluxtrain.plan.request import PlacementRequest

_KNOBS = {knob.name for knob in fields(PlacementRequest)} - {"device"}


def wrap_with(model: nn.Module, **arguments: Any) -> nn.Module:
    """Wrap on one card, or as `cards` says; knobs that are None are left to the planner."""
    arguments.setdefault("cards", 1)
    asked = {name: value for name, value in arguments.items() if name in _KNOBS}
    asked = {name: value for name, value in asked.items() if value is not None}
    rest = {name: value for name, value in arguments.items() if name not in _KNOBS}
    return fluxtrain.wrap(model, placement=PlacementRequest(**asked), **rest)
