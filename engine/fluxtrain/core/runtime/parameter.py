"""Parameters whose bytes are on the host, and gradients that are read lazily.

A wrapped parameter keeps its identity; between computations its class is `HostParameter`, a
subclass that sees every read. A read waits for an update under way; a read of the values of `.grad`
waits for the gradient's transfer. While its block computes, the class is plain `nn.Parameter`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.guards.writes import watch
from fluxtrain.core.memory.states_on_disk import OnDisk
from fluxtrain.core.runtime import user_gradients
from fluxtrain.core.runtime.context import Context, Owner
from fluxtrain.errors import MisusedModel

_GRAD: Any = Tensor.grad
_PARTIAL = (torch.autograd.grad, torch.autograd.backward)  # of some inputs alone
_GRAD_GET, _GRAD_SET, _GRAD_DELETE = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__
_DATA_GET = Tensor.data.__get__  # type: ignore[attr-defined]
_METADATA = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "layout",
        "ndim",
    )
    if hasattr(getattr(Tensor, name, None), "__get__")
} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.stride,
    Tensor.is_contiguous,
}


class HostParameter(nn.Parameter):
    """A wrapped parameter at rest. Made by changing the class of an existing parameter."""

    _fluxtrain: Owner

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in (_GRAD_GET, _GRAD_SET, _GRAD_DELETE):
            return _gradient_access(func, args)
        if func is Tensor.detach and _is_on_disk(args[0]):
            return _copy_from_disk(args[0]._fluxtrain)
        if any(is_packed(value) for value in (*args, *(kwargs or {}).values())):
            return without_values(func, args, kwargs or {})
        if func in _PARTIAL:
            _refuse_weights_behind_blocks(args, kwargs or {})
        _bring_up_to_date(*args, *(kwargs or {}).values())
        if func == _DATA_GET:
            watch(args[0]._fluxtrain.member)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        _record_use(found, *args, *(kwargs or {}).values())
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


def _gradient_access(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    parameter: HostParameter = args[0]
    owner = parameter._fluxtrain
    if func == _GRAD_GET:
        if not owner.group.memory.holds_gradients:
            _end_what_is_over(owner.context)
        if owner.hidden or not owner.member.has_gradient:
            return None
        return HostGradient.over(
            user_gradients.stored_gradient(owner.context, owner.group, owner.member), owner
        )
    value = args[1] if func == _GRAD_SET else None
    if value is not None:
        _refuse_no_gradient(value, owner)
    user_gradients.replace(owner.context, owner.group, owner.member, value)
    return None


def _end_what_is_over(context: Context) -> None:
    """Forget a backward pass that raised, and a step in backward whose optimizer is gone.

    Only the thread of the forward pass can know whether a pass has ended.
    """
    if threading.get_ident() == context.thread:
        context.forget_broken_pass()
        context.forget_orphaned_step()


def _refuse_no_gradient(value: object, owner: Owner) -> None:
    """Raise as torch does for plain parameters; a copy into the arena would broadcast."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner.name}.grad can be a tensor or None, not {type(value).__name__}")
    if value.shape != owner.member.shape:
        raise MisusedModel(
            f"{owner.name}.grad was assigned a tensor of {tuple(value.shape)}, and the parameter "
            f"is {tuple(owner.member.shape)}: give it one of that shape"
        )


def _is_on_disk(parameter: Any) -> bool:
    return parameter._fluxtrain.member.segment.weights_on_disk is not None


def _copy_from_disk(owner: Owner) -> Tensor:
    """Return a copy of trained weights that live on disk, for `state_dict()` and what saves it."""
    owner.group.jobs.wait_for_weights()
    home = owner.member.home
    assert isinstance(home, OnDisk)
    return home.mapped()


def _record_use(found: Any, *arguments: Any) -> None:
    """Note weights among the arguments that the result's graph needs, or that the
    result aliases."""
    results = [x for x in _each(found) if isinstance(x, Tensor) and type(x) is not HostParameter]
    if not results:
        return
    differentiable = any(x.requires_grad for x in results)
    for value in (value for argument in arguments for value in _each(argument)):
        if not isinstance(value, HostParameter):
            continue
        owner = value._fluxtrain
        if differentiable or owner.context.use.computing:  # in a block, which is recomputed later
            owner.context.graphs.record_outside(owner.group)
            continue
        with torch._C.DisableTorchFunctionSubclass():
            memory = value.untyped_storage().data_ptr()
        for alias in results:
            if alias.layout is torch.strided and alias.untyped_storage().data_ptr() == memory:
                owner.context.graphs.record_alias(owner.group, alias)


def _each(given: Any) -> Any:
    return given if isinstance(given, list | tuple) else (given,)


class HostGradient(Tensor):
    """A gradient on the host.

    Norms are those computed by the device, a multiplication by a number is recorded, and any other
    operation first applies it to the stored values.
    """

    _owner: Owner

    @staticmethod
    def over(values: Tensor, owner: Owner) -> HostGradient:
        gradient = values.as_subclass(HostGradient)
        gradient._owner = owner
        return gradient

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        ours = bool(args) and isinstance(args[0], HostGradient)
        if ours and func in _NORMS and _is_two_norm(func, args, kwargs):
            owner = args[0]._owner
            return user_gradients.norm_of(owner.context, owner.group, owner.member)
        if ours and func in (Tensor.mul_, Tensor.__imul__):
            factor = args[1] if len(args) > 1 else kwargs.get("other")
            if isinstance(factor, int | float) or (
                isinstance(factor, Tensor) and factor.numel() == 1
            ):
                args[0]._owner.member.gradient_scale *= float(factor)
                return args[0]
        if func is torch._amp_foreach_non_finite_check_and_unscale_ and not kwargs:
            return _unscale(*args)
        _bring_up_to_date(*args, *kwargs.values())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _bring_up_to_date(*arguments: Any) -> None:
    """Wait for the updates of weights, and apply the scales recorded for gradients."""
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(value, HostParameter):
                value._fluxtrain.group.jobs.wait_for_weights()
            elif isinstance(value, HostGradient):
                owner = value._owner
                user_gradients.hand_out(owner.context, owner.group, owner.member)


def _unscale(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale for GradScaler: norms show infinities and the factor is only recorded, so no value is
    read, and fp16 gradients keep their scale."""
    ours = [gradient for gradient in gradients if isinstance(gradient, HostGradient)]
    others = [gradient for gradient in gradients if not isinstance(gradient, HostGradient)]
    owners = [gradient._owner for gradient in ours]
    if any(owner.context.partly_updated for owner in owners):
        raise MisusedModel(
            "a step in backward has updated weights with gradients that a GradScaler was still to "
            "unscale: leave begin_step_in_backward out, or the scaler (bf16 needs none)"
        )
    device = owners[0].context.device.torch_device
    norms = torch.stack(
        [user_gradients.norm_of(o.context, o.group, o.member).to(device) for o in owners]
    )
    finite = bool(torch.isfinite(norms).all())
    # A scaler on a GPU copies both numbers to the host without waiting. They are there now: the
    # norms were queued after them and have been read.
    if others:
        torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inverse_scale)
    if not finite:
        found_inf.fill_(1.0)
    factor = float(inverse_scale)
    for owner in owners:
        owner.member.gradient_scale *= factor


_NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}


def _is_two_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the call asks for the root of the sum of all squares."""
    given = args[1:] or [kwargs[name] for name in ("ord", "p") if name in kwargs]
    if len(given) > 1 or not set(kwargs) <= {"ord", "p"}:
        return False
    if func is torch.linalg.norm and given and args[0].dim() > 1:
        return False  # `ord` is then that of a matrix: 2 is its largest singular value
    return not given or given[0] in (2, None, "fro")


def adopt_parameter(parameter: nn.Parameter, owner: Owner) -> None:
    """Make `parameter` a HostParameter, in place."""
    parameter.__class__ = HostParameter
    parameter._fluxtrain = owner  # type: ignore[attr-defined]


def release_parameter(parameter: nn.Parameter) -> None:
    """Make `parameter` a plain parameter again (`unwrap`)."""
    parameter.__class__ = nn.Parameter
    parameter.__dict__.pop("_fluxtrain", None)


def owner_of(parameter: Any) -> Owner | None:
    """Return the owner of a wrapped parameter, None for any other object."""
    return getattr(parameter, "__dict__", {}).get("_fluxtrain")


def _refuse_weights_behind_blocks(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise MisusedModel when a call of one of `_PARTIAL` with these arguments asks for gradients
    of wrapped weights, of a value that wrapped blocks of their model computed.

    A wrapped block is one node of torch's graph, and its weights are not inputs of that node: torch
    would say that they were not used, return None, or leave out the part through blocks."""
    asked = kwargs.get("inputs")
    if asked is None:
        asked = args[1] if len(args) > 1 else ()  # of `grad`; those of `backward` are gradients
    owners = [vars(x)["_fluxtrain"] for x in _tensors(asked) if "_fluxtrain" in vars(x)]
    if not owners:
        return
    anchors = {id(owner.context.anchor_node): owner for owner in reversed(owners)}
    owner = _first_reached(_tensors(args[0] if args else ()), anchors)
    if owner is not None:
        raise MisusedModel(
            f"torch.autograd.grad and backward(inputs=...) do not reach {owner.name}: wrapped "
            "blocks put gradients of their weights into .grad and nowhere else. Use "
            "loss.backward(), and read .grad"
        )


def _tensors(given: Any) -> list[Tensor]:
    each = given if isinstance(given, tuple | list) else (given,)
    return [tensor for tensor in each if isinstance(tensor, Tensor)]


def _first_reached(outputs: list[Tensor], anchors: Mapping[int, Any]) -> Any:
    """Return the value in `anchors` of the first node of the graph of `outputs` that is there."""
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = {id(node): node for node in nodes}  # a node's id is its own as long as it is held
    while nodes:
        node = nodes.pop()
        if id(node) in anchors:
            return anchors[id(node)]
        for following, _ in node.next_functions:
            if following is not None and id(following) not in seen:
                seen[id(following)] = following
                nodes.append(following)
    return None


_WITHOUT_VALUES = {Tensor.detach, Tensor.requires_grad_, _DATA_GET, Tensor.data_ptr}
_COMPUTED = {"T", "H", "mT", "mH", "real", "imag"}  # attributes that are tensors with values


class PackedValues(Tensor):
    """What stands for the values of a packed parameter outside of its block's computation.

    A module tree is walked by many libraries that want names and shapes alone: `state_dict()`
    detaches every parameter, and peft's `save_pretrained` keeps the adapters of it. So a detached
    one has no values either, and whatever would compute with them is refused."""

    _name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return without_values(func, args, kwargs or {})


def is_packed(value: Any) -> bool:
    """Return whether `value` is a wrapped parameter whose weights are packed, or on disk."""
    owner = getattr(value, "__dict__", {}).get("_fluxtrain")
    return owner is not None and not owner.member.segment.has_values


def without_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer operations that need no values of packed weights; raise MisusedModel for others."""
    name = _name_of(next(v for v in _flat(args, kwargs) if _name_of(v)))
    metadata = getattr(func, "__name__", "") in ("__get__", "__set__") and not _is_computed(func)
    asks = getattr(func, "__name__", "") in _ASKED
    if not (metadata or asks or func in _WITHOUT_VALUES):
        raise MisusedModel(
            f"{name} is packed in 4 or 8 bits, or on disk, outside of its block's computation, so "
            "its values cannot be read or written here: use fluxtrain.unwrap(model) first, which "
            "brings them back, "
            "or `fluxtrain export` for a merged model"
        )
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
        if func in (Tensor.detach, _DATA_GET):
            found = found.as_subclass(PackedValues)
            found._name = name
    return found


_ASKED = {
    "size", "dim", "numel", "element_size", "stride", "is_contiguous", "is_floating_point",
    "is_complex", "storage_offset", "__len__", "nelement", "get_device", "is_inference",
    "untyped_storage", "has_names", "type", "is_shared", "is_pinned", "__hash__", "__repr__",
}  # fmt: skip


def _is_computed(func: Callable[..., Any]) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") in _COMPUTED


def _name_of(value: Any) -> str:
    if isinstance(value, PackedValues):
        return value._name
    return value._fluxtrain.name if is_packed(value) else ""


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found += value if isinstance(value, list | tuple) else [value]
    return found
