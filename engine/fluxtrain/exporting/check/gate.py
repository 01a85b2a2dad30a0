"""Refuses an exported model that does not compute what base and adapter compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fluxtrain.errors import Disagrees
from fluxtrain.exporting.check.agreement import Agreement, agreement
from fluxtrain.exporting.check.logits import give_back_memory, streamed_logits, with_adapter
from fluxtrain.exporting.check.probing import Probed
from fluxtrain.exporting.check.rows import ComparedRows, compared_rows
from fluxtrain.exporting.source import AdapterSource
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model
from fluxtrain.plan.states import StorageFormat
from fluxtrain.wrapping.block_discovery import take_apart

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
        model = with_adapter(loaded.model, self.source.folder, self.source)
        return self._logits(model, rows, storage), rows, blocks

    def merged(self, folder: Path, rows: ComparedRows) -> tuple[Tensor, torch.dtype]:
        """Compute the model in `folder`: its logits, and its dtype."""
        loaded = self._loaded(folder, None)
        dtype: torch.dtype = getattr(torch, loaded.precision.dtype)
        return self._logits(loaded.model, rows, "plain"), dtype

    def adapted(self, adapter: Path, rows: ComparedRows, storage: StorageFormat) -> Tensor:
        """Compute the base with the adapter in another folder."""
        loaded = self._loaded(self.base, self.dtype)
        model = with_adapter(loaded.model, adapter, self.source)
        return self._logits(model, rows, storage)

    def _loaded(self, folder: Path, dtype: torch.dtype | None) -> LoadedModel:
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

    def _logits(self, model: nn.Module, rows: ComparedRows, storage: StorageFormat) -> Tensor:
        try:
            return streamed_logits(model, rows, self.device, storage)
        finally:
            del model
            give_back_memory()


def refuse_layers(probed: Probed) -> None:
    """Raise Disagrees where a merged weight is not its layer with the adapter, or its dtype has
    lost what was trained."""
    if probed.wrong:
        worst = probed.wrong[0]
        raise Disagrees(
            f"{len(probed.wrong)} of {len(probed.layers)} merged weights do not compute what layer "
            f"and adapter do; the worst is {worst.name}: its outputs differ by "
            f"{worst.difference:.2e} of themselves, and rounding explains {worst.limit:.2e}; "
            f"{_CURE}: report this, with the adapter's configuration"
        )
    if not LEAST_KEPT <= probed.kept <= 2 - LEAST_KEPT:
        raise Disagrees(
            f"the merged weights would hold {probed.kept:.0%} of what the adapter changes: it is "
            f"smaller than their dtype's rounding; {_CURE}: use --dtype fp32, or the adapter "
            "beside its base"
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
