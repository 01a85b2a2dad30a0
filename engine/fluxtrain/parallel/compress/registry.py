"""Compressors by name, with options as JSON; what would diverge is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fluxtrain.config.parallel_settings import options_of
from fluxtrain.errors import BadInput, brief
from fluxtrain.parallel.compress.compressor import Compressor
from fluxtrain.parallel.compress.low_rank import GradiVeq, PowerSgd
from fluxtrain.parallel.compress.quantised import (
    Bf16,
    Fp8,
    Fp16,
    Int8,
    Int8Sum,
    Natural,
    OneBit,
    Plain,
    Qsgd,
    SignSgd,
)
from fluxtrain.parallel.compress.sparse import RandomK, Sketch, Sparse, ThresholdV, TopK

_QUANTISERS = (Fp16, Bf16, Int8, Fp8, Qsgd, Natural, OneBit, SignSgd)
_SPARSE = (TopK, RandomK, ThresholdV)
COMPRESSORS: dict[str, type[Compressor]] = {
    kind.name: kind for kind in (Plain, *_QUANTISERS, Int8Sum, *_SPARSE, Sketch, GradiVeq, PowerSgd)
}
HYBRID = "hybrid"
FEEDBACK = "error_feedback"
BY_TORCH = ("none", "fp16", "bf16")  # a dtype of the reduction: nothing of ours runs


@dataclass(frozen=True, kw_only=True)
class Method:
    """A compressor as a user configured it."""

    compressor: Compressor
    feedback: bool = False  # what encoding loses is added to the gradient of the next step

    @property
    def bytes_of_torch(self) -> int | None:
        """Return the bytes of a number of torch's own reduction; None: it is ours."""
        plain = self.compressor
        return plain.dtype.itemsize if isinstance(plain, Plain) else None


def method_named(name: str, options: Mapping[str, Any] | str | None = None) -> Method:
    """Return the method `name` with `options`, a mapping or JSON.

    Raises BadInput for an unknown name or option, broken JSON, and what would diverge.
    """
    chosen = options_of(options)
    feedback = chosen.pop(FEEDBACK, False)
    if not isinstance(feedback, bool):
        raise BadInput(f"comm.config: {FEEDBACK} is {feedback!r}: use true or false")
    compressor = _hybrid(chosen) if name == HYBRID else _made(_kind(name), chosen)
    if feedback and (why := compressor.refuses_feedback()):
        raise BadInput(f"comm.compress={name} with {FEEDBACK}: {why}")
    return Method(compressor=compressor, feedback=feedback)


def _kind(name: str, of: Mapping[str, type[Compressor]] = COMPRESSORS) -> type[Compressor]:
    found = of.get(name)
    if found is not None:
        return found
    every = [*of, HYBRID] if of is COMPRESSORS else [*of]
    near = get_close_matches(name, every, n=1, cutoff=0.4)
    meant = f"did you mean {near[0]}? " if near else ""
    raise BadInput(f"no compression is named {brief(name, 40)!r}: {meant}There are {_list(every)}")


def _list(names: list[str]) -> str:
    return ", ".join(names)


def _made(kind: type[Compressor], options: dict[str, Any]) -> Compressor:
    known = [field.name for field in fields(kind) if field.init]
    for option in options:
        if option not in known:
            near = get_close_matches(option, [*known, FEEDBACK], n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            raise BadInput(
                f"comm.config: {kind.name} has no option {brief(option, 40)!r}: {meant}It has "
                f"{_list([*known, FEEDBACK])}"
            )
    try:
        return TypeAdapter(kind).validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, value = str(first["loc"][0]), first["input"]
        words = first["msg"].replace("Input should be", "it must be")
        raise BadInput(f"comm.config: {name} is {brief(repr(value), 60)}: {words}") from None


def _hybrid(options: dict[str, Any]) -> Compressor:
    """Make a sparsifier whose values are quantised."""
    known = {"sparse": "topk", "quant": "int8", "sparse_config": {}, "quant_config": {}}
    for option in options:
        if option not in known:
            raise BadInput(
                f"comm.config: hybrid has no option {brief(option, 40)!r}: it has "
                f"{_list([*known, FEEDBACK])}"
            )
    chosen = {**known, **options}
    sparse, quant = str(chosen["sparse"]), str(chosen["quant"])
    outer = _made(_kind(sparse, {k.name: k for k in _SPARSE}), options_of(chosen["sparse_config"]))
    inner = _made(
        _kind(quant, {k.name: k for k in _QUANTISERS}), options_of(chosen["quant_config"])
    )
    assert isinstance(outer, Sparse)
    return outer.with_values(inner)
