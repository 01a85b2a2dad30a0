"""Compressors by name, with options as JSON; what would diverge is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from fluxtrain.config.parallel_settings import options_of
from fluxtrain.errors import BadInput, brief
from fluxtrain.parallel.compress import low_rank, quantised, sparse
from fluxtrain.parallel.compress.compressor import Compressor
from fluxtrain.parallel.compress.quantised import Plain

_QUANTISERS = {kind.name: kind for kind in quantised.ALONE}
_SPARSE = {kind.name: kind for kind in sparse.CHOOSING}
COMPRESSORS: dict[str, type[Compressor]] = {
    Plain.name: Plain,
    **_QUANTISERS,
    quantised.Int8Sum.name: quantised.Int8Sum,
    **_SPARSE,
    **{kind.name: kind for kind in (sparse.Sketch, low_rank.GradiVeq, low_rank.PowerSgd)},
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
    made = _made(_Hybrid if name == HYBRID else _kind(name), chosen)
    compressor: Compressor = made.compressor() if name == HYBRID else made
    if feedback and (why := compressor.refuses_feedback()):
        raise BadInput(f"comm.compress={name} with {FEEDBACK}: {why}")
    return Method(compressor=compressor, feedback=feedback)


def _kind(name: str, of: Mapping[str, type[Any]] = COMPRESSORS) -> type[Any]:
    found = of.get(name)
    if found is not None:
        return found
    every = [*of, HYBRID] if of is COMPRESSORS else [*of]
    near = get_close_matches(name, every, n=1, cutoff=0.4)
    meant = f"did you mean {near[0]}? " if near else ""
    raise BadInput(
        f"no compression is named {brief(name, 40)!r}: {meant}There are {', '.join(every)}"
    )


def _made(kind: type[Any], options: dict[str, Any]) -> Any:
    known = [field.name for field in fields(kind) if field.init]
    for option in options:
        if option not in known:
            near = get_close_matches(option, [*known, FEEDBACK], n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            has = f"It has {', '.join([*known, FEEDBACK])}"
            if not known:  # as where the method was forgotten
                has = "name the method whose option that is, as in comm.compress=int8"
            raise BadInput(
                f"comm.config: {kind.name} has no option {brief(option, 40)!r}: {meant}{has}"
            )
    try:
        return TypeAdapter(kind).validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, value = str(first["loc"][0]), first["input"]
        words = first["msg"].replace("Input should be", "it must be")
        raise BadInput(f"comm.config: {name} is {brief(repr(value), 60)}: {words}") from None


@dataclass(frozen=True, kw_only=True)
class _Hybrid:
    """The options of a sparsifier whose values are quantised."""

    name: ClassVar[str] = HYBRID
    sparse: str = "topk"
    quant: str = "int8"
    sparse_config: dict[str, Any] = field(default_factory=dict)
    quant_config: dict[str, Any] = field(default_factory=dict)

    def compressor(self) -> Compressor:
        """Make the sparsifier."""
        outer: sparse.Sparse = _made(_kind(self.sparse, _SPARSE), self.sparse_config)
        return outer.with_values(_made(_kind(self.quant, _QUANTISERS), self.quant_config))
