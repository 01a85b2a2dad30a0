"""Find out whether a block may run on some rows at a time: tried on first use, never assumed.

Sequence-first modules (58 % gradient error, silent), BatchNorm and masks without a batch dimension
give other results on rows than on the whole; a loss over the whole batch cannot be cut at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fluxtrain.core.block.capture import Capture, active_collector
from fluxtrain.core.block.rng import RandomState, randomness_kept
from fluxtrain.core.block.room import note_cure
from fluxtrain.core.device.device import Device
from fluxtrain.core.guards.arguments import (
    Tree,
    ambiguous,
    batch_rows,
    flatten,
    opaque,
    slice_rows,
    splits,
)
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.arrivals import note_arrivals, wait_for_all
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import bound

_TRIED_ROWS = 2
_COMPARED = 1 << 19  # numbers at a time
_KEPT_TRIALS = 256  # a bound: a dict with new keys in each call needs a trial each time
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def chunks(context: Context, unit: Unit, rows: int, tree: Tree, tensors: Sequence[Tensor]) -> bool:
    """Return whether this unit should cut a batch of `rows` into chunks."""
    if unit.group.kind != "block" or rows < 2 or 0 < rows <= context.chunk_rows:
        return False
    if not try_chunks(context, unit, tree, tensors, rows):
        return False
    if not context.chunk_rows:
        wait_for_all(context.card_of(unit).device, tensors)
        with bound(context, unit, "probe"):
            try:
                row_bytes = saved_row_bytes(unit, tree, tensors)
            except torch.OutOfMemoryError as error:
                note_cure(unit, 1, error)
                raise
        most = max(1, rows // (2 * len(context.cards))) if len(context.cards) > 1 else rows
        context.chunk_rows = min(most, context.plan.chunk_for(row_bytes, rows))  # keep all busy
    return rows > context.chunk_rows


def spans(rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """List [start, stop) of chunks of `chunk_rows`; the last may be shorter."""
    return [(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]


def try_chunks(
    context: Context, unit: Unit, tree: Tree, tensors: Sequence[Tensor], rows: int
) -> bool:
    """Return whether chunks give the results of the whole batch. Tried once for each mode, set of
    cut arguments, structure and choice of the arguments, which may each change what is computed."""
    name = ambiguous(unit.original, tree, tensors, rows)
    if name is not None:
        context.say(
            f"the argument {name} of {unit.name} is {rows} x {rows} where the batch has {rows} "
            "rows, and may be a mask or one row for each: it runs on the whole batch. Another "
            "number of rows or tokens a row runs in chunks"
        )
        return False
    key = (unit.module.training, splits(tensors, rows), tree.choices())
    if key not in unit.chunkable:
        if len(unit.chunkable) >= _KEPT_TRIALS:
            unit.chunkable.clear()
        wait_for_all(context.card_of(unit).device, tensors)
        with bound(context, unit, "probe"):
            unit.chunkable[key] = chunks_agree(unit, tree, tensors)
        if not unit.chunkable[key]:
            context.say(
                f"{unit.name} gives other results for chunks than for the whole batch: it "
                "runs on the whole batch"
            )
    return unit.chunkable[key]


def chunks_agree(unit: Unit, tree: Tree, tensors: Sequence[Tensor]) -> bool:
    """Compare two rows run together with the same rows run one by one (weights bound)."""
    rows = batch_rows(tensors)
    if rows is None or rows < _TRIED_ROWS:
        return False
    split = splits(tensors, rows)
    together = _run(unit, tree, slice_rows(tensors, split, 0, _TRIED_ROWS), split)
    if together is None:
        return False
    single = [
        _run(unit, tree, slice_rows(tensors, split, i, i + 1), split) for i in range(_TRIED_ROWS)
    ]
    if any(s is None or len(s) != len(together) for s in single):
        return False
    for position, whole in enumerate(together):
        parts = [s[position] for s in single if s is not None]
        if whole.dim() == 0 or sum(p.shape[0] for p in parts) != whole.shape[0]:
            return False
        if not _close(torch.cat(parts), whole):
            return False
    return True


def draws(unit: Unit, tree: Tree, tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Tell whether the block draws random numbers for these rows, from any generator of the process
    (weights bound)."""
    inside = _copies_inside(tree)
    with _left_as_it_was(unit.module, inside):
        before = RandomState.now(device, host=True)
        args, kwargs = tree.fill([t.detach().clone() for t in tensors])
        with torch.no_grad(), Capture.of(active_collector()).collecting():
            unit.original(*args, **kwargs)
        return before.has_moved(device)


def writes(unit: Unit, tree: Tree, tensors: Sequence[Tensor]) -> bool:
    """Return whether the block writes to its arguments in place, tested on copies of one row
    (weights bound); True where the test is impossible."""
    one = slice_rows(tensors, splits(tensors, batch_rows(tensors) or 1), 0, 1)
    given = [tensor.detach().clone() for tensor in one]
    with _left_as_it_was(unit.module, _copies_inside(tree)):
        args, kwargs = tree.fill(given)
        try:
            with torch.no_grad():
                unit.original(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError):  # memory that ran out is one
            return True
    return not all(map(_is_same, given, one))


def saved_row_bytes(unit: Unit, tree: Tree, tensors: Sequence[Tensor]) -> int:
    """Measure the bytes that autograd keeps for one row of the block (weights bound).

    For blocks without saved tensor hooks (torch.func refuses them) this is the size of the outputs
    of all their modules.
    """
    rows = batch_rows(tensors)
    kept: dict[int, int] = {}
    outputs_bytes = 0
    weights = {p.untyped_storage().data_ptr() for p in unit.module.parameters()}

    def count(tensor: Tensor) -> None:  # an output kept here would hold its own graph for ever
        if tensor.layout != torch.strided:  # a sparse tensor is too small to matter
            return
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            kept[address] = tensor.untyped_storage().nbytes()

    def count_outputs(_module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal outputs_bytes
        outputs_bytes += sum(t.numel() * t.element_size() for t in flatten(output)[1])

    split = splits(tensors, rows or 1)
    one = [t.detach() for t in slice_rows(tensors, split, 0, 1)]
    one = [t.requires_grad_(t.is_floating_point()) for t in one]
    inside = _copies_inside(tree)

    def run(watching: AbstractContextManager[Any]) -> None:
        with (
            watching,
            torch.enable_grad(),
            _left_as_it_was(unit.module, inside),
            Capture.of(active_collector()).collecting(),
        ):
            args, kwargs = tree.fill([t.clone() for t in one])
            held = unit.original(*args, **kwargs)
        del held

    try:
        run(torch.autograd.graph.saved_tensors_hooks(count, _not_there))
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        kept.clear()
        hooks = [m.register_forward_hook(count_outputs) for m in unit.module.modules()]
        try:
            run(nullcontext())
        finally:
            for hook in hooks:
                hook.remove()
    return max(sum(kept.values()) + outputs_bytes, 1)


def _run(
    unit: Unit, tree: Tree, tensors: Sequence[Tensor], split: Sequence[bool]
) -> list[Tensor] | None:
    """Run the block on rows without dropout; return its outputs and captured tensors, or None when
    rows fail or chunks would have side effects."""
    given = [t.detach().clone() for t in tensors]  # a block may write to its inputs
    args, kwargs = tree.fill(given)
    capture = Capture.of(active_collector())
    buffers = unit.buffers.before(unit.module)
    inside = _copies_inside(tree)
    with (
        torch.no_grad(),
        _left_as_it_was(unit.module, inside),
        _NoDropout(),
        capture.collecting() as extra,
    ):
        try:
            out = unit.original(*args, **kwargs)
        except torch.OutOfMemoryError as error:  # which tells nothing of the block
            note_cure(unit, batch_rows(tensors), error)
            raise
        except (RuntimeError, ValueError, IndexError):
            return None  # a shape without a batch dimension does not broadcast
        if unit.buffers.after(unit.module, buffers):
            return None  # each chunk would write to them
        if not all(_is_same(tensor, before) for tensor, before in inside):
            return None
    uncut = [i for i, cut in enumerate(split) if not cut]
    if not all(_is_same(given[i], tensors[i]) for i in uncut):
        return None  # each chunk would write to the same tensor
    if tree.nests() and not tree.is_in((args, kwargs), given):
        return None  # each chunk would append to the same list
    return flatten((out, extra))[1]


def _is_same(now: Tensor, before: Tensor) -> bool:
    """Compare values, where a NaN equals a NaN."""
    if not now.is_floating_point():
        return torch.equal(now, before)
    return torch.equal(now.isnan(), before.isnan()) and torch.equal(
        now.nan_to_num(0.0, math.inf, -math.inf), before.nan_to_num(0.0, math.inf, -math.inf)
    )


def _not_there(_: object) -> Tensor:
    """Raise for a block that runs backward inside of its forward."""
    raise RuntimeError("saved tensor hooks that only count were asked for a tensor")


def _close(parts: Tensor, whole: Tensor) -> bool:
    if parts.shape != whole.shape:
        return False
    if not whole.is_floating_point():
        return bool(torch.equal(parts, whole))
    if not whole.numel():
        return True
    limit = _TOLERANCE.get(whole.dtype, 1e-4)
    scale = float(torch.stack([own.double().abs().max() for own in _ranges(whole)]).max())
    if not scale < float("inf"):
        return bool(torch.equal(parts.isfinite(), whole.isfinite()))
    pairs = zip(_ranges(parts), _ranges(whole), strict=True)
    off = [(part.double() - own.double()).abs().max() for part, own in pairs]
    return float(torch.stack(off).max()) <= limit * max(scale, 1e-30)


def _ranges(values: Tensor) -> tuple[Tensor, ...]:
    """Return the values in ranges that take a few MiB of device memory in fp64: the trial must not
    take more than the block."""
    found: tuple[Tensor, ...] = values.reshape(-1).split(_COMPARED)
    return found


def _copies_inside(tree: Tree) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors inside of opaque arguments, each with a copy."""
    return [(tensor, tensor.clone()) for _, held in opaque(tree) for tensor in held]


@contextmanager
def _left_as_it_was(module: nn.Module, inside: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Restore afterwards the random state, buffers (BatchNorm's statistics), and tensors inside
    opaque arguments."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    places = [(m, name) for m in module.modules() for name in m._buffers]
    buffers = [(m, name, m._buffers[name]) for m, name in places]
    copies = [(b, b.clone()) for _, _, b in buffers if b is not None]
    try:
        with randomness_kept(device):
            yield
    finally:
        for owner, name, buffer in buffers:  # a forward may have put another tensor there
            owner._buffers[name] = buffer
        with torch.no_grad():
            for buffer, before in (*copies, *inside):
                buffer.copy_(before)


class _NoDropout(TorchFunctionMode):
    """Runs every dropout with probability 0."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention and kwargs.get("dropout_p"):
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUTS = {
    nn.functional.dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.alpha_dropout,
    nn.functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
}


class Merging:
    """Collects the rows of some tensors of a batch, by chunk.

    in_place: every chunk is put into its rows at once, and the whole tensor notes when they arrive.
    So the next block begins with them where several cards compute; and two halves of a batch whose
    memory ran out need less of it.
    """

    def __init__(self, device: Device, rows: int, *, in_place: bool) -> None:
        self._device, self._rows, self.in_place = device, rows, in_place
        self._parts: dict[int, list[Tensor]] = {}
        self._whole: dict[int, Tensor] = {}
        self._pieces: dict[int, list[tuple[tuple[int, int], Any]]] = {}

    def add(self, place: int, span: tuple[int, int], part: Tensor) -> None:
        """Take the rows [first, stop) of the tensor at `place`, which the device has computed."""
        first, stop = span
        has_rows = part.dim() and part.shape[0] == stop - first
        if not self.in_place or not has_rows or place in self._parts:
            self._parts.setdefault(place, self._taken_apart(place)).append(part)
            return
        part = part.detach()
        if stop - first == self._rows:
            self._whole[place] = _without_rest(part)
        else:
            if place not in self._whole:
                self._whole[place] = part.new_empty((self._rows, *part.shape[1:]))
            self._whole[place][first:stop].copy_(part)
        self._pieces.setdefault(place, []).append((span, self._device.mark()))

    def _taken_apart(self, place: int) -> list[Tensor]:
        """Return earlier chunks' tensors, which had as many rows as the chunk by chance."""
        if place not in self._whole:
            return []
        whole = self._whole.pop(place)
        return [whole[first:stop] for (first, stop), _ in self._pieces.pop(place)]

    def take(self, place: int) -> Tensor:
        """Return the whole tensor, once every chunk has added its rows."""
        if place in self._whole:
            spans, points = zip(*self._pieces[place], strict=True)
            return note_arrivals(self._whole.pop(place), spans, points)
        parts = self._parts.pop(place)
        return _without_rest(parts[0]) if len(parts) == 1 else torch.cat(parts)


def _without_rest(part: Tensor) -> Tensor:
    """Return a result that is cut out of a larger tensor in memory of its own, as chunks that are
    put together are: else it cannot wait on the host, and keeps all of that tensor."""
    if part.layout != torch.strided or part.is_contiguous():
        return part
    return part.contiguous() if part.nbytes < part.untyped_storage().nbytes() else part
