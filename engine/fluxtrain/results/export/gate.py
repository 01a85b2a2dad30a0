"""Refuses an exported model that does not compute what base and adapter compute.

Both are computed once on the same rows, each from its mapped files: a block's weights are read when
it runs and given up after it, so a model may be larger than the card and than host memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.device.heap import trim_heap
from fluxtrain.core.guards.arguments import to_device
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.core.wrap.grouping import group_parameters
from fluxtrain.core.wrap.module_patches import move_buffers
from fluxtrain.errors import Disagrees
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model
from fluxtrain.plan.states import StorageFormat
from fluxtrain.results.export.agreement import Agreement, RoundedWeight, agreement, kept_share
from fluxtrain.results.export.attached import put_beside
from fluxtrain.results.export.base_files import dequantised
from fluxtrain.results.export.compared_rows import ComparedRows, compared_rows
from fluxtrain.results.export.source import AdapterSource

LEAST_KEPT = 0.75  # of the adapter's change, for a merge that is of use
_CURE = "nothing was written"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What the exported model is compared with: a base, its adapter, and rows to compute."""

    source: AdapterSource
    base: Path
    dtype: torch.dtype  # that the base was trained in
    trust_remote_code: bool
    device: str
    data: str | None
    rows: int

    def expected(self, storage: StorageFormat) -> tuple[Tensor, ComparedRows, int]:
        """Compute base and adapter, with the base's weights in `storage`: logits, the rows that
        they are of, and the number of blocks."""
        loaded = self._loaded(self.base, self.dtype)
        rows = compared_rows(loaded, self.data, self.source.run, self.rows)
        blocks = len(take_apart(loaded.model).blocks)
        model = put_beside(self.source, loaded.model)
        return streamed_logits(model, rows, self.device, storage), rows, blocks

    def merged(self, folder: Path, rows: ComparedRows) -> tuple[Tensor, torch.dtype]:
        """Compute the model in `folder`: its logits, and its dtype."""
        loaded = self._loaded(folder, None)
        dtype: torch.dtype = getattr(torch, loaded.precision.dtype)
        return streamed_logits(loaded.model, rows, self.device, "plain"), dtype

    def adapted(self, adapter: Path, rows: ComparedRows, storage: StorageFormat) -> Tensor:
        """Compute the base with the adapter's weights in another folder."""
        loaded = self._loaded(self.base, self.dtype)
        model = put_beside(self.source, loaded.model, adapter)
        return streamed_logits(model, rows, self.device, storage)

    def _loaded(self, folder: Path, dtype: torch.dtype | None) -> LoadedModel:
        gc.collect()  # the model before
        trim_heap()
        wanted = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        capability = torch.cuda.get_device_capability() if self.device == "cuda" else None
        return load_model(
            ModelSource(
                path=str(folder),
                dtype=wanted,
                trust_remote_code=self.trust_remote_code,
                capability=capability,
            )
        )


def refuse_rounded_away(weights: Sequence[RoundedWeight]) -> None:
    """Raise Disagrees where merged weights have lost what was trained to the rounding of their
    dtype."""
    lost = [weight for weight in weights if not weight.difference <= weight.limit]  # NaN is lost
    if lost:
        worst = max(lost, key=lambda weight: weight.difference)
        raise Disagrees(
            f"{len(lost)} of {len(weights)} merged weights have no place in their dtype: "
            f"{worst.name} would lose {worst.difference:.2e} of itself, where rounding takes "
            f"{worst.limit:.2e}; {_CURE}: use --dtype bf16 or fp32"
        )
    kept = kept_share(weights)
    if not LEAST_KEPT <= kept <= 2 - LEAST_KEPT:
        raise Disagrees(
            f"the merged weights would hold {kept:.0%} of what the adapter changes: it is smaller "
            f"than their dtype's rounding; {_CURE}: use --dtype fp32, or the adapter beside its "
            "base"
        )


def refuse_logits(found: Agreement, source: str) -> None:
    """Raise Disagrees where logits differ by more than rounding explains."""
    if found.agrees:
        return
    raise Disagrees(
        f"on {found.positions:,} tokens of {source} the exported model is not the trained one: "
        f"mean KL {found.mean_kl:.2e} (rounding explains {found.kl_limit:.2e}), largest difference "
        f"of a logit {found.largest:.3g} ({found.largest_limit:.3g}), the same most likely token "
        f"at {found.top1:.1%}; {_CURE}: report this, with the adapter's configuration"
    )


def compared(
    expected: Tensor, found: Tensor, dtypes: tuple[torch.dtype, torch.dtype], blocks: int
) -> Agreement:
    """Compare logits of two models; the coarser of their dtypes decides what rounding explains."""
    coarser = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return agreement(expected, found, coarser, blocks)


def streamed_logits(
    model: nn.Module, rows: ComparedRows, device: str, storage: StorageFormat
) -> Tensor:
    """Return the logits (N, V) at the tokens of `rows`, on the host in the model's dtype.

    storage: in which large frozen weights of blocks are packed and unpacked before they are used.
    The model is of no use afterwards.
    """
    target = torch.device(device)
    model.eval()
    parts = take_apart(model)
    groups, _ = group_parameters(model, parts, frozen=storage)
    packed = {
        id(member.parameter): f"{group.name}.{member.name}"
        for group in groups.values()
        for segment in group.segments
        if segment.storage != "plain"
        for member in segment.members
    }

    def read(parameter: nn.Parameter) -> Tensor:
        weights = parameter.detach()
        if name := packed.get(id(parameter)):
            weights = dequantised(weights, storage, name)
        return weights.to(target)

    move_buffers(model, target)
    for _, parameter in parts.loose:
        parameter.data = parameter.data.to(target)
    with ExitStack() as hooks, torch.no_grad():
        for _, module in (*parts.edges, *parts.blocks):
            _fill_while_it_runs(module, read, hooks)
        moved, _ = to_device(((), rows.inputs), target)
        output: Any = model(*moved[0], **moved[1])
    logits: Tensor = output.logits.detach()
    return logits[rows.kept.to(logits.device)].cpu()


def _fill_while_it_runs(
    module: nn.Module, read: Callable[[nn.Parameter], Tensor], hooks: ExitStack
) -> None:
    own: list[tuple[nn.Parameter, Tensor]] = []

    def fill(*_: object) -> None:
        for parameter in module.parameters():
            own.append((parameter, parameter.data))
            parameter.data = read(parameter)

    def give_up(*_: object) -> None:
        while own:
            parameter, weights = own.pop()
            parameter.data = weights

    hooks.callback(module.register_forward_pre_hook(fill).remove)
    hooks.callback(module.register_forward_hook(give_up, always_call=True).remove)
