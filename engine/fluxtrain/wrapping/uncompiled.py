"""Keep `torch.compile` away from a wrapped model: its blocks run uncompiled.

Compiled code would hold the weights that were bound when it was traced, but streamed weights
change memory. Tracing stops at the call of every guarded module, so that a compiled model, a
compiled function around it and `model.compile()` give the results of the uncompiled model.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from fluxtrain.wrapping.engine import Engine

UNCOMPILED = ("_compiled_call_impl", "compile")  # on the instance, of torch's own names
_WHY = (
    "torch.compile does nothing on a wrapped model: its weights come and go, so its blocks run as "
    "they are"
)


def leave_uncompiled(module: nn.Module) -> None:
    """End torch.compile's tracing at calls of a guarded `module`."""
    uncompiled = torch.compiler.disable(module._call_impl, reason=_WHY)
    module.__dict__["_compiled_call_impl"] = uncompiled
    module.__dict__["compile"] = types.MethodType(_compile, module)


def _compile(self: nn.Module, *_: Any, **__: Any) -> None:
    engine: Engine = self.__dict__["_fluxtrain_guard"]
    engine.say(_WHY)
