"""Chooses the dtype of training by what the GPU supports. Pure functions, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Capability = tuple[int, int]  # of a card, as CUDA counts them: 8.0 is Ampere (2020)

BF16_SINCE: Capability = (8, 0)
FP16_SINCE: Capability = (7, 0)  # matrix units for fp16; before them it is often slower than fp32
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Precision:
    """A dtype as torch names it, and the reason."""

    dtype: str
    because: str


def choose_dtype(wished: str, stored: str, capability: Capability | None) -> Precision:
    """Choose the dtype of weights and activations, with the reason.

    wished: `auto` or one of `DTYPES`; stored: dtype of the checkpoint's weights, torch's name;
    capability: of the GPU that computes, None for a CPU.
    """
    if wished != "auto":
        return Precision(wished, "model.dtype says so" + _warning(wished, capability))
    if capability is None:
        return _without_a_card(stored)
    card = f"the card (compute capability {_text(capability)})"
    if capability >= BF16_SINCE:
        kept = ", as the checkpoint is" if stored == "bfloat16" else f"; the checkpoint is {stored}"
        return Precision("bfloat16", f"{card} computes in bf16{kept}")
    if capability >= FP16_SINCE:
        return Precision(
            "float16", f"{card} has no bf16, which begins with 8.0: fp16 with a loss scale"
        )
    return Precision("float32", f"{card} has neither bf16 nor fast fp16")


def with_odd_tensors(choice: Precision, odd_dtypes: Sequence[str]) -> Precision:
    """Add to the reason the tensors stored in another dtype than most, one entry for each."""
    if not odd_dtypes:
        return choice
    stored = " and ".join(sorted(set(odd_dtypes)))
    are = "is" if len(odd_dtypes) == 1 else "are"
    told = f"{len(odd_dtypes)} of its tensors, stored as {stored}, {are} converted"
    return Precision(choice.dtype, f"{choice.because}; {told}")


def demo_dtype(wished: str) -> Precision:
    """Choose the dtype of the demo's fresh weights."""
    if wished != "auto":
        return Precision(wished, "model.dtype says so")
    return Precision("float32", "the demo must learn fast on any CPU")


def _without_a_card(stored: str) -> Precision:
    """Choose the checkpoint's own dtype if a CPU can train it."""
    if stored == "float16":
        return Precision(
            "bfloat16", "the checkpoint is fp16, whose gradients underflow without a loss scale"
        )
    if stored == "float64":
        return Precision("float32", "the checkpoint is fp64, more than training needs")
    return Precision(stored if stored in DTYPES else "float32", f"the checkpoint is {stored}")


def _warning(wished: str, capability: Capability | None) -> str:
    if wished == "bfloat16" and capability is not None and capability < BF16_SINCE:
        return f"; compute capability {_text(capability)} only emulates it: float16 is faster"
    return ""


def _text(capability: Capability) -> str:
    return "{}.{}".format(*capability)
