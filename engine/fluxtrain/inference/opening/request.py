"""What a user asks of a trained model: which one, beside which base, and where it computes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from fluxtrain.config.schema import SHORT_NAMES
from fluxtrain.errors import BadInput
from fluxtrain.inference.opening.naming import refuse_missing
from fluxtrain.models.precision import DTYPES
from fluxtrain.plan.states import PACKED_FORMATS

_CARD = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A model as the command line names it."""

    named: str  # a run, `last`, a model's or an adapter's folder, a hub id, or `demo`
    base: str | None = None  # of an adapter, where it is now
    other_base: bool = False
    packed: str | None = None  # how another program packed the base of an adapter in training
    dtype: str = "auto"
    device: str | None = None
    cards: str | None = None  # how many GPUs, or their numbers such as 0,2; None: by need
    offload: str = "auto"
    budget_gib: float | None = None
    trust_remote_code: bool = False

    def check_values(self) -> None:
        """Raise BadInput for a value that is not known."""
        refuse_missing(self.named)
        for option, given, known in (
            ("--dtype", self.dtype, ("auto", *SHORT_NAMES, *DTYPES)),
            ("--packed", self.packed, (None, *PACKED_FORMATS)),
            ("--device", self.device, (None, "cpu", "cuda")),
            ("--offload", self.offload, ("auto", "none", "weights", "max")),
        ):
            if given not in known:
                words = ", ".join(str(one) for one in known if one is not None)
                raise BadInput(f"{option} is {given!r}: use one of {words}")
        _ = self.wished_cards
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BadInput("--device is cuda, and torch finds no GPU here: use --device cpu")
        if self.budget_gib is not None and not self.budget_gib > 0:
            raise BadInput(f"--budget-gib is {self.budget_gib}: use more than 0, or leave it out")

    @property
    def wished_cards(self) -> int | tuple[int, ...] | None:
        """How many GPUs compute, or which; None: as few as hold the model, else all.

        Raises BadInput for what is neither.
        """
        if self.cards is None:
            return None
        parts = [part.strip() for part in self.cards.split(",")]
        if not all(map(_CARD.fullmatch, parts)) or parts == ["0"]:
            raise BadInput(
                f"--cards is {self.cards!r}: use how many GPUs, from 1, or their numbers with "
                "commas, such as 0,1; leave it out for as few as hold the model"
            )
        numbers = tuple(map(int, parts))
        return numbers if len(numbers) > 1 else numbers[0]

    @property
    def wished_dtype(self) -> str:
        """The dtype as torch names it, or auto."""
        return SHORT_NAMES.get(self.dtype, self.dtype)
