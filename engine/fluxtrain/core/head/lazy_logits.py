"""The output of the last linear layer, not computed until code reads it.

The head's output is a `LazyLogits`: slicing, reshaping and casting are applied to the hidden
states instead, `cross_entropy` runs fused (logits of one chunk of tokens exist at a time; 32k
tokens of a vocabulary of 152k in fp32 would be 20 GB), and any other use computes the logits.

An autograd function outside the engine (a fused loss, a module's backward hook, reentrant
checkpointing) gets `LazyLogits` below torch's Python calls: it reads values that are computed for
it, its gradient arrives at the lazy logits, and from there it is passed on to the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fluxtrain.core.cards.on_card import backward_on_card, forward_on_card
from fluxtrain.core.head.call import NO_TARGETS, HeadCall, outside
from fluxtrain.core.head.loss import logits_backward, loss_of_head
from fluxtrain.core.head.steps import Step, Steps, after, cast, step_of
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import record
from fluxtrain.errors import MisusedModel

Computed = list[tuple[Tensor, int]]  # real logits that were read, and their versions then


class LazyHead(Protocol):
    """A head whose logits can be computed later."""

    unit: Unit

    @property
    def context(self) -> Context: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class LazyLogits(Tensor):
    """Logits (..., V) that are not computed yet: `hidden` (..., H) times the head's weight, and
    what the model does with the product before the loss."""

    hidden: Tensor
    head: LazyHead
    version: int
    product: torch.dtype  # of the logits before the steps
    steps: Steps
    differentiable: bool
    _real: Tensor | None
    _computed: Computed  # real logits of this tensor and its views, with their versions

    @staticmethod
    def of(head: LazyHead, hidden: Tensor, dtype: torch.dtype, version: int) -> LazyLogits:
        trained = hidden.requires_grad or any(
            m.parameter.requires_grad for _, m in head.unit.members
        )
        return LazyLogits._made(head, hidden, dtype, version, trained)

    @staticmethod
    def _made(
        head: LazyHead,
        hidden: Tensor,
        dtype: torch.dtype,
        version: int,
        trained: bool,
        computed: Computed | None = None,
        product: torch.dtype | None = None,
        steps: Steps = (),
    ) -> LazyLogits:
        assert head.unit.linear is not None, "only heads have such logits"
        size = (*hidden.shape[:-1], head.unit.linear.out_features)
        differentiable = trained and torch.is_grad_enabled()

        def make() -> Tensor:
            device, kind = hidden.device, LazyLogits
            made: Tensor = Tensor._make_wrapper_subclass(kind, size, dtype=dtype, device=device)
            return made

        seen: Computed = computed if computed is not None else []
        product = product or dtype
        lazy: Any = make()
        if differentiable:
            call = HeadCall(head.context, head.unit, NO_TARGETS, 0, "sum", product, steps)
            lazy = _Uncomputed.apply(call, call.context.anchor, hidden, make, seen)  # type: ignore[no-untyped-call]
        lazy.hidden, lazy.head, lazy.version, lazy._real = hidden, head, version, None
        lazy.product, lazy.steps = product, steps
        lazy.differentiable, lazy._computed = differentiable, seen
        found: LazyLogits = lazy
        return found

    def viewed(self, hidden: Tensor) -> LazyLogits:
        """Return a view; writes to it show in these logits, and the other way round."""
        return LazyLogits._made(
            self.head, hidden, self.dtype, self.version, self.differentiable, self._computed,
            self.product, self.steps,
        )  # fmt: skip

    def cast(self, dtype: torch.dtype) -> LazyLogits:
        if dtype == self.dtype:
            return self
        if self.steps:
            return self.stepped(cast(dtype), dtype)
        return LazyLogits._made(self.head, self.hidden, dtype, self.version, self.differentiable)

    def stepped(self, step: Step, dtype: torch.dtype) -> LazyLogits:
        """Return the logits after one more step, in `dtype`."""
        return LazyLogits._made(
            self.head, self.hidden, dtype, self.version, self.differentiable, None,
            self.product, (*self.steps, step),
        )  # fmt: skip

    def written(self) -> bool:
        """Return whether the real logits were changed in place. Raises when that was through a
        view."""
        changed = [real for real, version in self._computed if real._version != version]
        if any(real is not self._real for real in changed):
            raise MisusedModel(
                "outputs.logits were written in place through one view and are read through "
                "another, which does not see it: work on a copy, logits = outputs.logits.clone()"
            )
        return bool(changed)

    def watched(self) -> bool:
        """Return whether the gradient of the real logits is retained or hooked; then operations
        must compute with the real logits."""
        real = self._real
        return real is not None and (real.retains_grad or bool(real._backward_hooks))

    def computed(self) -> Tensor:
        """Return the logits as an ordinary tensor, computed once."""
        self.written()
        if self._real is None:
            if self.head.unit.group_of_weight().version != self.version:
                raise MisusedModel(
                    "these logits were not computed before the optimizer step that changed the "
                    "weights: read outputs.logits before optimizer.step()"
                )
            with torch.inference_mode(False), torch.set_grad_enabled(self.differentiable):
                product = self.head.compute_logits(self.hidden).to(self.product)
                self._real = after(self.steps, product)
            self._computed.append((self._real, self._real._version))
        return self._real

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], LazyLogits):
            answer = _lazily(func, args[0], args[1:], kwargs)
            if answer is not NotImplemented:
                return answer
        return func(*(_real(a) for a in args), **{k: _real(v) for k, v in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it for its own modes
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(_real(a) for a in args), **{k: _real(v) for k, v in (kwargs or {}).items()})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.computed().detach().clone()

    def tolist(self) -> Any:
        return self.computed().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.computed().numpy(force=force)


_FACTS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_leaf")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}
_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}


def _real(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.computed()
    if isinstance(value, list | tuple):
        return type(value)(_real(v) for v in value)
    return value


def _lazily(
    func: Callable[..., Any], lazy: LazyLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation that keeps the logits uncomputed; NotImplemented for any other."""
    if lazy.written() or lazy.watched():
        return NotImplemented
    if func in _CASTS and not rest and not kwargs:
        return lazy.cast(_CASTS[func])
    if func is Tensor.contiguous and not rest:
        return lazy
    if func is Tensor.to:
        return _cast(lazy, rest, kwargs)
    if func in (Tensor.view, Tensor.reshape) and not kwargs:
        return _reshaped(lazy, rest)
    if func is Tensor.__getitem__ and not kwargs:
        return _sliced(lazy, rest[0])
    if func is nn.functional.cross_entropy:
        return _cross_entropy(lazy, rest, kwargs)
    return NotImplemented if kwargs else _stepped(lazy, func, rest)


def _stepped(lazy: LazyLogits, func: Callable[..., Any], rest: tuple[Any, ...]) -> Any:
    step = step_of(func, rest, lazy.shape[-1])
    if step is None or (lazy.differentiable and not torch.is_grad_enabled()):
        return NotImplemented
    none = torch.empty((1,), dtype=lazy.dtype)
    dtype = torch.result_type(none, step.others[0]) if step.others else lazy.dtype
    return lazy.stepped(step, dtype)


def _cast(lazy: LazyLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wanted = [*rest, *kwargs.values()]
    if len(wanted) != 1:
        return NotImplemented
    if wanted[0] in _CASTS.values():
        return lazy.cast(wanted[0])
    if isinstance(wanted[0], torch.device) and wanted[0] == lazy.device:
        return lazy
    return NotImplemented


def _reshaped(lazy: LazyLogits, rest: tuple[Any, ...]) -> Any:
    shape = tuple(rest[0]) if rest and isinstance(rest[0], list | tuple | torch.Size) else rest
    if not all(isinstance(n, int) for n in shape) or shape[-1] != lazy.shape[-1]:
        return NotImplemented
    return lazy.viewed(lazy.hidden.reshape(*shape[:-1], lazy.hidden.shape[-1]))


def _sliced(lazy: LazyLogits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(p, slice | int | type(Ellipsis)) for p in parts):
        return NotImplemented
    if Ellipsis in parts:
        if parts.count(Ellipsis) > 1:
            return NotImplemented
        at = parts.index(Ellipsis)
        fill = (slice(None),) * (lazy.dim() - len(parts) + 1)
        parts = (*parts[:at], *fill, *parts[at + 1 :])
    if len(parts) > lazy.dim():
        return NotImplemented
    if len(parts) == lazy.dim():
        if parts[-1] != slice(None):
            return NotImplemented
        parts = parts[:-1]
    return lazy.viewed(lazy.hidden[parts])


def _cross_entropy(lazy: LazyLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    options = {**dict(zip(names, rest, strict=False)), **kwargs}
    target = options.pop("target", None)
    ignore_index = options.pop("ignore_index", -100)
    reduction = options.pop("reduction", "mean")
    plain = all(v is None or (type(v) in (int, float) and v == 0) for v in options.values())
    if not plain or len(rest) > len(names) or reduction not in ("mean", "sum"):
        return NotImplemented
    if lazy.dim() != 2 or not isinstance(target, Tensor) or _refused(lazy, target, ignore_index):
        return NotImplemented
    unit = lazy.head.unit
    if any(m.parameter._backward_hooks for _, m in unit.members):
        return NotImplemented
    context = lazy.head.context
    target = target.to(lazy.device)
    call = HeadCall(context, unit, target, ignore_index, reduction, lazy.product, lazy.steps)
    return loss_of_head(call, lazy.hidden)


def _refused(lazy: LazyLogits, target: Tensor, ignore_index: int) -> bool:
    """Return whether torch refuses these targets, for its reason.

    Values on a GPU are not read here: a target outside the vocabulary makes the loss NaN
    (`loss_of_head`).
    """
    if target.dtype != torch.int64 or target.shape != lazy.shape[:1]:
        return True
    wrong = outside(target, ignore_index, lazy.shape[-1])
    return target.device.type == "cpu" and bool(wrong.any())


class _Uncomputed(torch.autograd.Function):
    """Connects the lazy logits (..., V) that `make` returns to hidden (..., H) in torch's graph.
    `seen`: the real logits that code outside the engine read."""

    @staticmethod
    @forward_on_card
    def forward(
        ctx: Any,
        call: HeadCall,
        anchor: Tensor,
        hidden: Tensor,
        make: Callable[[], Tensor],
        seen: Computed,
    ) -> Tensor:
        record(ctx, call)
        ctx.seen = seen
        ctx.save_for_backward(hidden)
        return make()

    @staticmethod
    @once_differentiable
    @backward_on_card
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, None, None]:
        call: HeadCall = ctx.call
        (hidden,) = ctx.saved_tensors
        _refuse_other_gradients(call, ctx.seen)
        found = logits_backward(ctx, hidden, gradient, ctx.needs_input_grad[2])
        return None, None, found, None, None


def _refuse_other_gradients(call: HeadCall, seen: Computed) -> None:
    changed = any(real._version != version for real, version in seen)
    watched = any(real.retains_grad or real._backward_hooks for real, _ in seen)
    if changed or watched or any(m.parameter._backward_hooks for _, m in call.unit.members):
        raise MisusedModel(
            "outputs.logits were handed to an autograd function of its own (a fused loss, a "
            "module's backward hook), and were written in place, or they or the head's weight have "
            "a hook or retain_grad(), which would not see the gradient: hand it a copy, "
            "logits = outputs.logits.clone()"
        )
