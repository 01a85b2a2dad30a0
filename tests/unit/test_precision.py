"""In which dtype a model is trained, and why."""

from __future__ import annotations

import pytest

from fluxtrain.config.schema import validate
from fluxtrain.errors import BadInput
from fluxtrain.models.precision import DTYPES, Capability, choose_dtype, demo_dtype


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("capability", "dtype", "word"),
    [
        ((12, 0), "bfloat16", "12.0"),
        ((8, 0), "bfloat16", "8.0"),
        ((7, 5), "float16", "loss scale"),
        ((7, 0), "float16", "7.0"),
        ((6, 1), "float32", "6.1"),
    ],
)
def test_a_card_computes_in_what_it_is_fast_in(
    stored: str, capability: Capability, dtype: str, word: str
) -> None:
    chosen = choose_dtype("auto", stored, capability)
    assert chosen.dtype == dtype
    assert word in chosen.because


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("float16", "bfloat16"),
        ("float64", "float32"),
        ("int8", "float32"),
    ],
)
def test_a_processor_keeps_the_checkpoints_own_where_it_can(stored: str, dtype: str) -> None:
    chosen = choose_dtype("auto", stored, None)
    assert chosen.dtype == dtype
    assert "the checkpoint is" in chosen.because


@pytest.mark.parametrize("wished", DTYPES)
@pytest.mark.parametrize("capability", [None, (7, 5), (9, 0)])
def test_what_is_set_is_taken(wished: str, capability: Capability | None) -> None:
    chosen = choose_dtype(wished, "float32", capability)
    assert chosen.dtype == demo_dtype(wished).dtype == wished
    emulated = wished == "bfloat16" and capability == (7, 5)
    assert ("emulates" in chosen.because) == emulated


@pytest.mark.parametrize(
    ("written", "meant"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("float16", "float16")],
)
def test_short_names_are_understood(written: str, meant: str) -> None:
    assert validate({"model": {"dtype": written}}).model.dtype == meant


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadInput, match="float16"):
        validate({"model": {"dtype": "fp8"}})
