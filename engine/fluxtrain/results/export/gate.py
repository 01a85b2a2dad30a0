"""Refuses an exported model that does not compute what base and adapter compute.

Both are computed once on the same rows, each from its mapped files: a block's weights are read when
it runs and given up after it, so a model may be larger than the card and than host memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxtrain.config.data_settings import DataSettings
from fluxtrain.config.schema import RunConfig
from fluxtrain.core.device.heap import trim_heap
from fluxtrain.core.guards.arguments import to_device
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.core.wrap.grouping import group_parameters
from fluxtrain.core.wrap.module_patches import move_buffers
from fluxtrain.data.batches import in_order
from fluxtrain.data.encoding.encode import Encoder, check_vocabulary
from fluxtrain.data.packing import PackedRows
from fluxtrain.data.prepare import corpora
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.rendering.named import use_template
from fluxtrain.data.row import Row
from fluxtrain.data.splitting import whole
from fluxtrain.data.store.tokens import in_memory
from fluxtrain.errors import BadInput, Disagrees
from fluxtrain.events.answers.answers import ComparedLayers, ComparedLogits
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model
from fluxtrain.plan.states import StorageFormat
from fluxtrain.results.adapter.attached import put_beside
from fluxtrain.results.adapter.chosen_base import ChosenBase, ExportRequest
from fluxtrain.results.adapter.source import AdapterSource
from fluxtrain.results.export.agreement import agreement, unit_roundoff
from fluxtrain.results.export.base_files import dequantised

LEAST_KEPT = 0.75  # of the adapter's change, for a merge that is of use
_CURE = "nothing was written"


class Gate:
    """Compares the exported model with base and adapter, on the same rows."""

    def __init__(self, request: ExportRequest, source: AdapterSource, base: ChosenBase) -> None:
        self._request, self._source, self._base = request, source, base
        self._device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._rows: ComparedRows | None = None
        self._blocks = 0

    def trained(self, storage: StorageFormat, adapter: Path | None = None) -> Tensor:
        """Compute base and adapter, or its weights in another folder, with the base's weights in
        `storage`; return the logits."""
        loaded = self._loaded(self._base.files.folder, self._base.dtype)
        if self._rows is None:
            request = self._request
            self._rows = compared_rows(loaded, request.data, self._source.run, request.rows)
            self._blocks = len(take_apart(loaded.model).blocks)
        model = put_beside(self._source, loaded.model, adapter)
        return streamed_logits(model, self._rows, self._device, storage)

    def saved(self, folder: Path) -> tuple[Tensor, torch.dtype]:
        """Compute the model in `folder`: its logits, and its dtype."""
        assert self._rows is not None, "what was trained is computed first"
        loaded = self._loaded(folder, None)
        dtype: torch.dtype = getattr(torch, loaded.precision.dtype)
        return streamed_logits(loaded.model, self._rows, self._device, "plain"), dtype

    def compared(self, trained: Tensor, found: Tensor, dtype: torch.dtype) -> ComparedLogits:
        """Compare logits of the trained model with those of the export in `dtype`."""
        assert self._rows is not None
        coarser = max(map(unit_roundoff, (self._base.dtype, dtype)))
        source, rows = self._rows.source, self._rows.rows
        return agreement(trained, found, coarser, self._blocks, source=source, rows=rows)

    def _loaded(self, folder: Path, dtype: torch.dtype | None) -> LoadedModel:
        gc.collect()  # the model before
        trim_heap()
        wanted = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        capability = torch.cuda.get_device_capability() if self._device == "cuda" else None
        return load_model(
            ModelSource(
                path=str(folder),
                dtype=wanted,
                trust_remote_code=self._request.trust_remote_code,
                capability=capability,
            )
        )


def refuse_rounded_away(found: ComparedLayers) -> None:
    """Raise Disagrees where merged weights have lost the training to the rounding of
    their dtype."""
    if found.difference > found.limit:
        raise Disagrees(
            f"merged weights have no place in their dtype: {found.worst} would lose "
            f"{found.difference:.2e} of itself, where rounding takes {found.limit:.2e}; {_CURE}: "
            "use --dtype bf16 or fp32"
        )
    if not LEAST_KEPT <= found.kept <= 2 - LEAST_KEPT:  # NaN is neither
        raise Disagrees(
            f"the merged weights would hold {found.kept:.0%} of what the adapter changes: it is "
            f"smaller than the rounding of their dtype; {_CURE}: use --dtype fp32, or the adapter "
            "with its base"
        )


def accepted(found: ComparedLogits) -> ComparedLogits:
    """Return the comparison; raise Disagrees where logits differ by more than rounding explains."""
    if not found.agrees:
        raise Disagrees(
            f"on {found.tokens:,} tokens of {found.source} the exported model is not the trained "
            f"one: mean KL {found.mean_kl:.2e} (rounding explains {found.kl_limit:.2e}), largest "
            f"difference of a logit {found.largest:.3g} ({found.largest_limit:.3g}), the same most "
            f"likely token at {found.top1:.1%}; {_CURE}: report this, with the adapter's "
            "configuration"
        )
    return found


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


MOST_TOKENS = 128  # of a row
LOGITS_BYTES = 1 << 30  # that are kept of one model, in fp32
_DOCUMENTS = 16  # for each row
_CHARACTERS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ComparedRows:
    """Rows of tokens, and where they are from."""

    inputs: dict[str, Any]  # of the model's forward
    kept: Tensor  # (R, T) bool: no padding
    source: str

    @property
    def rows(self) -> int:
        """Count the rows."""
        return int(self.kept.shape[0])


def compared_rows(
    loaded: LoadedModel,
    data: str | None,
    run: RunConfig | None,
    rows: int,
    longest: int = MOST_TOKENS,
) -> ComparedRows:
    """Take the first documents of `data`, of what the run was evaluated or trained on, or of the
    demo's text, as `rows` rows of `longest` tokens at most.

    Raises BadInput where they cannot be read.
    """
    settings = DataSettings(path=data) if data else (run or RunConfig()).data
    trained, evaluated = corpora(read_request(settings.model_dump()))
    corpus = evaluated or trained
    given = settings.sequence_length
    wanted = longest if given == "auto" else min(longest, given)
    wanted = min(wanted, loaded.max_positions or wanted)
    most = max(2, LOGITS_BYTES // (4 * loaded.embedding_rows))
    use_template(loaded.tokenizer, settings.chat_template)
    encoder = Encoder(loaded.tokenizer, corpus.max_bad_rows)
    first = _first(Reading(corpus), rows * _DOCUMENTS)
    tokens = in_memory(sample for batch in encoder.batches(first) for sample in batch)
    check_vocabulary(tokens.largest, loaded.embedding_rows)
    count = int(tokens.starts[-1])
    length = min(wanted, most, count)
    if length < 2:
        raise BadInput(
            f"{corpus.name} holds {count} tokens, and 2 are compared at least: name another "
            "file with --data"
        )
    packed = PackedRows(tokens, whole(tokens), length, loaded.pad_id, loaded.packs)
    if not len(packed):
        raise BadInput(
            f"the first documents of {corpus.name} have nothing to learn in {length} tokens: name "
            "another file with --data"
        )
    batch = next(iter(in_order(packed, max(1, min(rows, most // length, len(packed))))))
    inputs = batch.inputs()
    for name in ("labels", "num_items_in_batch"):
        inputs.pop(name)
    documents = packed.take(np.arange(len(batch.input_ids)), trim=True).document_ids
    kept = torch.from_numpy(documents >= 0)
    return ComparedRows(inputs=inputs, kept=kept, source=corpus.name)


def _first(rows: Iterable[Row], most: int) -> Iterator[Row]:
    characters = 0
    for row in islice(rows, most):
        yield row
        characters += row.characters
        if characters >= _CHARACTERS:
            return
