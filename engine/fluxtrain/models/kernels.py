"""Uses fused kernels of liger-kernel (norm, rotary embedding, gated activation) if installed.

Its own losses stay off where blocks stream: the head's loss is FluxTrain's there. A sharded model
has liger's, which makes no logits of all tokens. Liger's kernels round differently from the
plain operations; its test suite states the tolerances (https://github.com/linkedin/Liger-Kernel).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from importlib.metadata import PackageNotFoundError, version
from types import MethodType
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from fluxtrain.errors import BadInput

Kernels = Literal["auto", "liger", "torch"]


class ChosenKernels(NamedTuple):
    """The chosen kernels, `liger` or `torch`, and why."""

    value: str
    because: str


# What liger and Triton read when liger is imported. What a kernel is tuned to is kept. Those of
# experts are not tuned: they would try 32 ways each, for minutes, in memory that no plan counts,
# and the way that a run happens to take decides the last bits of its sums.
READ_AT_IMPORT = {"TRITON_CACHE_AUTOTUNING": "1", "LIGER_FUSED_MOE_AUTOTUNE": "0"}


NOT_FUSED = ("granite",)  # families whose logits liger's loss would not scale


def choose_kernels(
    wished: Kernels, model: PreTrainedModel, device: str, *, with_loss: bool = False
) -> ChosenKernels:
    """Give `model` the fastest kernels that are allowed and possible; return the choice.

    with_loss: the head is computed with its loss, if liger can do that.

    Liger replaces functions and classes of transformers too: for every model of that family that
    the process computes or makes from then on.

    Raises:
        BadInput: liger was asked for and cannot be used.
    """
    if wished == "torch":
        return ChosenKernels(value="torch", because="as set")
    kind = str(getattr(model.config, "model_type", "this model"))
    missing = _what_is_missing(kind, device)
    if missing is None:
        _apply(model, with_loss=with_loss and fuses_loss(wished, model))
        installed = f"liger-kernel {_liger_version()} is installed and knows {kind}"
        return ChosenKernels(value="liger", because="as set" if wished == "liger" else installed)
    if wished == "liger":
        raise BadInput(f"model.kernels = liger is not possible: {missing}; leave it on auto")
    return ChosenKernels(value="torch", because=missing)


def fuses_loss(wished: Kernels, model: nn.Module) -> bool:
    """Return whether liger would compute the head of `model` with its loss on a GPU."""
    known: Any = model
    kind = str(getattr(known.config, "model_type", ""))
    head = known.get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None  # liger would leave out adapter and bias
    allowed = wished != "torch" and kind not in NOT_FUSED
    return plain and allowed and _what_is_missing(kind, "cuda") is None


def _what_is_missing(kind: str, device: str) -> str | None:
    if device != "cuda":
        return "fused kernels need a GPU"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    for name, value in READ_AT_IMPORT.items():
        os.environ.setdefault(name, value)
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"liger-kernel {_liger_version()} does not load here ({error})"
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"liger-kernel {_liger_version()} does not know {kind}"
    return None


def _liger_version() -> str:
    try:
        return version("liger-kernel")
    except PackageNotFoundError:
        return "of unknown version"  # put beside the program without its metadata


def _apply(model: PreTrainedModel, *, with_loss: bool) -> None:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(
        model=model, fused_linear_cross_entropy=with_loss, cross_entropy=False
    )
    own: Any = getattr(model.forward, "__func__", None)  # liger's, bound to this model
    if not with_loss or own is None or "skip_logits" not in inspect.signature(own).parameters:
        return

    @functools.wraps(own)
    def without_logits(self: Any, *given: Any, labels: Tensor | None = None, **options: Any) -> Any:
        """Make no logits beside a loss in evaluations either."""
        return own(self, *given, labels=labels, skip_logits=labels is not None, **options)

    model.forward = MethodType(without_logits, model)  # copies of the model get one of their own
