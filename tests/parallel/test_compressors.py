"""Every compressor alone: what comes back, its bias over many draws, its bytes, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.parallel.compress.compressor import Compressor, columns_of, joined, pack, unpack
from fluxtrain.parallel.compress.registry import COMPRESSORS, HYBRID, method_named

# relative 2-norm of the error of one Gaussian row of 4,000 numbers: at most
LARGEST_ERROR = {
    "none": 0.0, "fp16": 5e-4, "bf16": 3e-3, "int8": 8e-3, "int8_sum": 2e-2, "fp8": 3e-2,
    "qsgd": 0.25, "nc": 0.5, "onebit": 0.7, "topk": 0.96, "thresholdv": 0.01, "gradiveq": 0.9,
    "powersgd": 0.96,
}  # fmt: skip
UNBIASED = {"qsgd", "nc", "randomk"}


def _gaussian(rows: int, count: int) -> Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(3)) * 0.01


def _there_and_back(
    compressor: Compressor, rows: Tensor, seed: int = 0
) -> tuple[Tensor, Tensor, float]:
    """Return the decoded rows, the bytes, and what the ranks would have agreed on."""
    proposal = compressor.proposal(rows)
    agreed = 0.0 if proposal is None else float(proposal)
    columns = compressor.encode(rows, torch.Generator().manual_seed(seed), agreed)
    wire = joined(columns)
    sent = columns_of(wire, columns)
    return compressor.decode(sent, rows.shape[1], agreed), wire, agreed


def _bytes(compressor: Compressor, count: int, agreed: float = 0.0) -> int:
    """Return the bytes of a row, which other values of it must have, too."""
    return joined(compressor.encode(torch.ones(1, count), torch.Generator(), agreed)).shape[1]


def _named(name: str, **options: Any) -> Compressor:
    return method_named(name, options).compressor.for_ranks(2)


def test_what_comes_back_is_near_what_was_sent() -> None:
    rows = _gaussian(2, 4000)
    for name, largest in LARGEST_ERROR.items():
        back, _, _ = _there_and_back(_named(name), rows)
        error = float((back - rows).norm() / rows.norm())
        assert error <= largest, name
        assert (error > 0) is (name != "none")


@pytest.mark.parametrize("name", [*COMPRESSORS, HYBRID])
def test_rows_of_every_length_come_back_and_have_the_bytes_that_are_told(name: str) -> None:
    compressor = _named(name)
    for count in (1, 7, 129, 4000):
        rows = _gaussian(3, count)
        back, wire, agreed = _there_and_back(compressor, rows)
        assert back.shape == rows.shape
        assert torch.isfinite(back).all()
        assert wire.shape == (3, _bytes(compressor, count, agreed))
        sent = compressor.encode(rows, torch.Generator(), agreed)
        assert compressor.decode_sum(sent, count, agreed).shape == (count,)
    back, _, _ = _there_and_back(compressor, torch.zeros(2, 300))
    if name == "signsgd":  # a coin for each, so that no weight drifts
        assert back.abs().eq(1).all()
        assert abs(float(back.mean())) < 0.2
    else:
        assert torch.equal(back, torch.zeros(2, 300))


def test_bytes_are_those_of_the_formats_counted_by_hand() -> None:
    count = 4096
    blocks = count // 128
    expected = {
        "none": 4 * count, "fp16": 2 * count, "bf16": 2 * count, "int8": count + 4 * blocks,
        "int8_sum": count, "fp8": count + 4 * blocks, "qsgd": count // 2 + 4 * 2 * blocks,
        "nc": count + 4, "onebit": count // 8 + 2 * 4 * 16, "signsgd": count // 8,
        "topk": 41 * 8, "randomk": 41 * 4 + 4, "sketch": 3 * 342 * 4,
        "gradiveq": 16 * 64 * 4 + 64 * 16 * 2, "powersgd": (64 + 64) * 4 * 4,
    }  # fmt: skip
    assert {name: _bytes(_named(name), count) for name in expected} == expected
    assert _bytes(_named("thresholdv"), count, 100) == 100 * 8
    hybrid = _named("hybrid", sparse="topk", quant="int8")
    assert _bytes(hybrid, count) == 41 * 4 + (41 + 4)
    # the targets, against two bytes a number
    assert 2 * count / _bytes(_named("int8"), count) > 1.9
    assert 2 * count / _bytes(_named("qsgd"), count) > 3.5


@pytest.mark.parametrize("name", sorted(UNBIASED))
def test_the_mean_of_many_draws_of_an_unbiased_method_is_the_value(name: str) -> None:
    rows, draws = _gaussian(1, 300), 3000
    compressor = _named(name, **({"ratio": 0.1} if name == "randomk" else {}))
    assert compressor.bias == "unbiased"
    back, _, _ = _there_and_back(compressor, rows.expand(draws, -1))
    # a value next to a level may be drawn the same each time: then the sample has no deviation
    deviation = (back.std(0) + 0.02 * rows.abs().max()) / math.sqrt(draws)
    assert ((back.mean(0) - rows[0]).abs() <= 5 * deviation).all()


def test_one_value_of_each_stretch_is_drawn_evenly() -> None:
    compressor = _named("randomk", ratio=0.1, scale=False)
    back, _, _ = _there_and_back(compressor, torch.ones(4000, 95))
    share = back.mean(0)
    assert ((share[:90] - 0.1).abs() < 0.03).all()
    assert ((share[90:] - 0.2).abs() < 0.04).all()  # the last stretch has five


def test_the_largest_values_are_kept_and_a_threshold_holds() -> None:
    rows = _gaussian(2, 1000)
    back, _, _ = _there_and_back(_named("topk", ratio=0.05), rows)
    for sent, row in zip(back, rows, strict=True):
        kept = sent.nonzero().flatten()
        assert len(kept) == 50
        assert torch.equal(sent[kept], row[kept])
        assert row[kept].abs().min() >= row[sent == 0].abs().max()
    limit = 0.015
    back, _, agreed = _there_and_back(_named("thresholdv", threshold=limit), rows)
    assert torch.equal(back, torch.where(rows.abs() >= limit, rows, 0.0))
    assert agreed == (rows.abs() >= limit).sum(1).max()


def test_sketches_add_up_and_find_large_values_of_the_sum() -> None:
    rows = _gaussian(2, 4000) * 0.01
    rows[:, 17] += 1.0
    rows[0, 2900] -= 3.0
    compressor = _named("sketch", keep=0.001)
    wire = compressor.encode(rows, torch.Generator())
    total = compressor.decode_sum(wire, 4000)
    assert float(total[17]) == pytest.approx(2.0, abs=0.02)
    assert float(total[2900]) == pytest.approx(-3.0, abs=0.02)


def test_low_rank_rows_come_back_whole() -> None:
    left, right = _gaussian(64, 2), _gaussian(2, 64)
    rows = (left @ right).reshape(1, -1)
    back, _, _ = _there_and_back(_named("powersgd", rank=2), rows)
    assert float((back - rows).norm() / rows.norm()) < 1e-4
    back, _, _ = _there_and_back(_named("gradiveq", components=2), rows)
    assert float((back - rows).norm() / rows.norm()) < 1e-2  # coefficients are bf16


def test_majorities_and_signs() -> None:
    rows = torch.tensor([[2.0, -1.0, 5.0], [1.0, -3.0, -5.0]])
    compressor = _named("signsgd")
    wire = compressor.encode(rows, torch.Generator())
    assert compressor.decode_sum(wire, 3).tolist() == [2.0, -2.0, 0.0]


def test_one_bit_stands_for_the_mean_of_its_side() -> None:
    rows = torch.tensor([[1.0, 3.0, -2.0, -4.0, -6.0]])
    back, _, _ = _there_and_back(_named("onebit"), rows)
    assert back.tolist() == [[2.0, 2.0, -4.0, -4.0, -4.0]]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_of_any_bits_are_packed_without_loss(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 13), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape[1] == math.ceil(13 * bits / 8)
    assert torch.equal(unpack(packed, bits, 13), codes)


# -- what a user may get wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("int7", "", "did you mean int8?"),
        ("zzz", "", "There are none, fp16"),
        ("int8", "{num_bits: 8}", "no JSON"),
        ("int8", "[8]", "write an object"),
        ("int8", '{"num_bit": 8}', "did you mean num_bits?"),
        ("int8", '{"num_bits": 5}', "num_bits is 5"),
        ("int8", '{"levels": 5}', "has no option"),
        ("none", '{"block": 128}', "as in comm.compress=int8"),
        ("topk", '{"ratio": 0}', "greater than 0"),
        ("topk", '{"values": {}}', "has no option"),
        ("hybrid", '{"quant": "int8_sum"}', "no compression is named 'int8_sum'"),
        ("hybrid", '{"sparse_config": {"ratio": 2}}', "less than or equal to 1"),
        ("int8", '{"error_feedback": 1}', "use true or false"),
        ("randomk", '{"error_feedback": true}', 'set "scale": false'),
        ("signsgd", '{"error_feedback": true}', "take onebit"),
        ("qsgd", '{"error_feedback": true, "block": 512}', "blocks of at most 195"),
        ("qsgd", '{"error_feedback": true, "num_bits": 2}', "take more num_bits"),
        ("sketch", '{"error_feedback": true}', "take topk"),
        ("bf16", '{"error_feedback": true}', "torch's own reduction"),
    ],
)
def test_mistakes_are_refused_with_the_cure(name: str, options: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        method_named(name, options)
    assert words in str(refused.value)


def test_the_cure_of_each_refusal_is_accepted() -> None:
    assert method_named("randomk", '{"error_feedback": true, "scale": false}').feedback
    assert method_named("qsgd", '{"error_feedback": true, "block": 195}').feedback
    assert method_named("hybrid", '{"sparse": "topk", "quant": "qsgd"}').compressor


def test_scaled_values_with_feedback_do_diverge_and_unscaled_ones_do_not() -> None:
    """The reason of the refusal, shown: residuals of a constant gradient, step by step."""
    gradient = torch.ones(1, 500)
    for scale, grows in ((True, True), (False, False)):
        compressor = _named("randomk", ratio=0.01, scale=scale)
        draws, residual = torch.Generator().manual_seed(0), torch.zeros(1, 500)
        norms = []
        for _ in range(200):
            sent = gradient + residual
            residual = sent - compressor.decode(compressor.encode(sent, draws), 500)
            norms.append(float(residual.norm()))
        assert (norms[-1] > 1e12) is grows


def test_too_many_ranks_for_a_sum_in_eight_bits_are_refused() -> None:
    with pytest.raises(BadInput, match="take int8"):
        method_named("int8_sum").compressor.for_ranks(128)
