"""Patch the forward, `.to()`, `.compile()`, deepcopy and pickle of a wrapped module.

All patches are in the instance's `__dict__`; class and identity stay. A copy (deepcopy, pickle) is
a plain, unwrapped module: a copied forward would otherwise use the original's weights.

`torch.compile` is kept away: compiled code would hold the weights that were bound when it was
traced, but streamed weights change memory. Tracing stops at the call of every guarded module, so
that a compiled model, a compiled function around it and `model.compile()` give the results of the
uncompiled model.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.runtime.context import Context
from fluxtrain.core.wrap.unit_forward import UnitForward
from fluxtrain.errors import MisusedModel

_UNCOMPILED = ("_compiled_call_impl", "compile")  # on the instance, of torch's own names
_WHY = (
    "torch.compile does nothing on a wrapped model: its weights come and go, so its blocks run as "
    "they are"
)
_OURS = (
    "forward",
    "_apply",
    "__deepcopy__",
    "__reduce_ex__",
    "_fluxtrain_engine",
    "_fluxtrain_forward",
    "_fluxtrain_unit",
    "_fluxtrain_guard",
    "_fluxtrain_hooks",
    *_UNCOMPILED,
)
_HOOKED = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_always_called",
)


def replace_forward(module: nn.Module, instead: UnitForward) -> None:
    """Let `module(...)` run through the engine. The original forward stays on the class; one that
    was set on the instance (by fused kernels, say) is kept under another name."""
    own = module.__dict__.get("forward")
    if _is_method_of(own, module):
        module.__dict__["_fluxtrain_forward"] = own
    elif own is not None:
        raise MisusedModel(
            f"{instead.unit.name}.forward was replaced on the instance already (another wrapper, "
            "hooks of accelerate or a compiled block): wrap the model before that"
        )

    @functools.wraps(instead.unit.original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return instead.run(args, kwargs)

    module.__dict__["_fluxtrain_unit"] = instead.unit
    module.__dict__["forward"] = types.MethodType(forward, module)


def guard_module(module: nn.Module, context: Context) -> None:
    """Make moves no-ops with a warning, refuse conversions, and let copies be plain modules."""
    module.__dict__["_fluxtrain_guard"] = context
    module.__dict__["_apply"] = types.MethodType(_apply, module)
    module.__dict__["__deepcopy__"] = types.MethodType(_plain_deepcopy, module)
    module.__dict__["__reduce_ex__"] = types.MethodType(_plain_reduce, module)
    _leave_uncompiled(module)


def release_module(module: nn.Module) -> None:
    """Remove everything that `replace_forward` and `guard_module` put on the instance."""
    if "_fluxtrain_guard" in module.__dict__ or "_fluxtrain_unit" in module.__dict__:
        own = module.__dict__.get("_fluxtrain_forward")
        others = "_fluxtrain_unit" not in module.__dict__  # such as TRL's, on the model itself
        for name in _OURS:
            if name != "_fluxtrain_engine" and not (others and name == "forward"):
                module.__dict__.pop(name, None)
        if own is not None:
            module.__dict__["forward"] = own


def _is_method_of(value: object, module: nn.Module) -> bool:
    return isinstance(value, types.MethodType) and value.__self__ is module


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    context: Context = self.__dict__["_fluxtrain_guard"]
    for dtype in {p.dtype for p in self.parameters()}:
        probe = torch.zeros(1, dtype=dtype)
        converted = fn(probe)
        if converted.dtype != dtype:
            raise MisusedModel(
                f"a wrapped model cannot be converted from {dtype} to {converted.dtype}: convert "
                "before fluxtrain.wrap(model), or fluxtrain.unwrap(model) first"
            )
    context.say(
        f".to(), .cuda() and .cpu() do nothing on a wrapped model: its blocks compute on "
        f"{context.device.torch_device} and their weights stay where the plan put them"
    )
    return self


def _plain_state(self: nn.Module) -> dict[str, Any]:
    state = {k: v for k, v in self.__dict__.items() if k not in _OURS}
    if "_fluxtrain_forward" in self.__dict__:
        state["forward"] = self.__dict__["_fluxtrain_forward"]
    ours = {hook.id for hook in self.__dict__.get("_fluxtrain_hooks", ())}
    if ours:
        for name in _HOOKED:
            state[name] = type(state[name])((k, v) for k, v in state[name].items() if k not in ours)
    return state


def _plain_deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    made = type(self).__new__(type(self))
    memo[id(self)] = made
    made.__dict__.update(copy.deepcopy(_plain_state(self), memo))
    return made


def _rebuild(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    made = cls.__new__(cls)
    made.__dict__.update(state)
    return made


def _plain_reduce(self: nn.Module, protocol: Any) -> Any:
    state = _plain_state(self)  # without the methods on the instance, which lead back to it
    kept = {k: v for k, v in state.items() if not _is_method_of(v, self)}
    return _rebuild, (type(self), kept)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def ancestors(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    """Yield the modules above the units: their `.to()` would reach wrapped parameters."""
    yield module
    for child in module.children():
        if id(child) not in units:
            yield from ancestors(child, units)


def _leave_uncompiled(module: nn.Module) -> None:
    """End torch.compile's tracing at calls of a guarded `module`."""
    uncompiled = torch.compiler.disable(module._call_impl, reason=_WHY)
    module.__dict__["_compiled_call_impl"] = uncompiled
    module.__dict__["compile"] = types.MethodType(_compile, module)


def _compile(self: nn.Module, *_: Any, **__: Any) -> None:
    engine: Context = self.__dict__["_fluxtrain_guard"]
    engine.say(_WHY)
