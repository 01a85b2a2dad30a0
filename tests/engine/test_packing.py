"""Packed weights: native kernels, the oracle and bitsandbytes give the same bits."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fluxtrain import _native
from fluxtrain.core.quantization import reference
from fluxtrain.core.quantization.layout import BLOCK, NESTED, PackedLayout
from fluxtrain.core.quantization.packing import pack, unpack
from fluxtrain.errors import BadInput
from fluxtrain.plan.states import PACKED_FORMATS, PackedFormat

pytestmark = pytest.mark.usefixtures("isa_put_back")

ISAS = pytest.mark.parametrize("isa", _native.ISA_NAMES)
FORMATS = pytest.mark.parametrize("format", PACKED_FORMATS)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [
    (1, 1), (1, 63), (100, 96), (64, 72), (7, 65), (3, 5, 40), (1, 16384), (16385, 1),
    (33, 777), (2, 32768),
]  # fmt: skip
KINDS = ("normal", "zeros", "constant", "subnormal", "huge", "mixed")


def any_weight(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    """Finite weights of a kind; zeros of both signs are among them."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=random).mul_(0.02)
    flat = weight.view(-1)
    if kind == "zeros":
        weight.zero_()
    elif kind == "constant":
        weight.fill_(-0.37)
    elif kind == "subnormal":
        weight.mul_(1e-37)
    elif kind == "huge":
        weight.mul_(torch.finfo(dtype).max / 0.2)
    elif kind == "mixed":
        bits = torch.randint(-(2**31), 2**31, (flat.numel(),), generator=random)
        wild = bits.to(torch.int32).view(torch.float32).nan_to_num(nan=1.0)
        where = torch.rand(flat.shape, generator=random) < 0.05
        flat[where] = wild[where]
    limit = torch.finfo(dtype).max
    weight = weight.clamp(-limit, limit).to(dtype)
    weight.view(-1)[::7] = 0.0
    weight.view(-1)[3::11] = -0.0
    return weight


def packed_by_all(layout: PackedLayout, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What the native kernels and the oracle write, each over other bytes."""
    native = torch.full((layout.size_bytes,), 0xAA, dtype=torch.uint8)
    oracle = torch.full((layout.size_bytes,), 0x55, dtype=torch.uint8)
    for index, weight in enumerate(weights):
        pack(layout, index, weight, native)
        reference.pack(layout, index, weight, oracle)
    return native, oracle


def unpacked(layout: PackedLayout, packed: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.full((layout.elements,), 7.0, dtype=dtype)
    unpack(layout, packed, out)
    return out


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@ISAS
@FORMATS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(27)
def test_native_packing_writes_the_oracles_bytes_and_all_of_them(
    isa: str, format: PackedFormat, kind: str
) -> None:
    _native.set_isa(isa)
    layout = PackedLayout.of(format, SHAPES)
    for dtype in DTYPES:
        weights = [any_weight(shape, dtype, kind, seed) for seed, shape in enumerate(SHAPES)]
        native, oracle = packed_by_all(layout, weights)
        assert torch.equal(native, oracle)


@ISAS
@FORMATS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(27)
def test_native_unpacking_computes_the_oracles_bits(
    isa: str, format: PackedFormat, kind: str
) -> None:
    _native.set_isa(isa)
    layout = PackedLayout.of(format, SHAPES)
    _, packed = packed_by_all(
        layout, [any_weight(shape, torch.float32, kind, 5) for shape in SHAPES]
    )
    for dtype in DTYPES:
        expected = torch.full((layout.elements,), 7.0, dtype=dtype)
        reference.unpack(layout, packed, expected)
        got = unpacked(layout, packed, dtype)
        assert same_bits(got, expected)
        for weight in layout.weights:  # padding is nothing
            assert not got[weight.first + weight.count : weight.first + weight.padded].any()


@ISAS
@settings(max_examples=40, deadline=None)
@given(
    format=st.sampled_from(PACKED_FORMATS),
    rows=st.integers(1, 40),
    columns=st.integers(1, 900),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**20),
    threads=st.integers(1, 3),
)
def test_any_weight_has_one_packed_form(
    isa: str, format: PackedFormat, rows: int, columns: int, dtype: torch.dtype, kind: str,
    seed: int, threads: int,
) -> None:  # fmt: skip
    _native.set_isa(isa)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layout = PackedLayout.of(format, [(rows, columns)])
        weight = any_weight((rows, columns), dtype, kind, seed)
        native, oracle = packed_by_all(layout, [weight])
        assert torch.equal(native, oracle)
        expected = torch.empty(layout.elements, dtype=dtype)
        reference.unpack(layout, oracle, expected)
        assert same_bits(unpacked(layout, native, dtype), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256), (100, 96), (64, 72), (33, 768), (1, 64), (8, 4096)])
def test_nf4_has_the_codes_and_absmax_of_bitsandbytes(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = any_weight(shape, dtype, "normal", 3)
    count = weight.numel() // BLOCK  # whole blocks: the last one it divides instead
    codes, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK)
    layout = PackedLayout.of("nf4", [shape])
    packed, _ = packed_by_all(layout, [weight])
    arrays = layout.arrays(packed)
    assert torch.equal(arrays["absmax"][: -(-weight.numel() // BLOCK)], state.absmax)
    assert torch.equal(arrays["codes"][: count * BLOCK // 2], codes.view(-1)[: count * BLOCK // 2])
    for to in DTYPES:  # flat: its rows that are no multiple of 64 come out wrong
        state.shape, state.dtype = torch.Size([weight.numel()]), to
        expected = bnb.dequantize_4bit(codes, state).view(-1)
        got = unpacked(layout, packed, to)[: weight.numel()]
        assert same_bits(got[: count * BLOCK], expected[: count * BLOCK])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256), (100, 96), (7, 65), (1, 1), (33, 777)])
def test_int8_is_that_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = any_weight(shape, dtype, "normal", 4)
    weight[:, 0] = 0.01  # a row of zeros has no codes there
    codes, absmax, _ = bnb.int8_vectorwise_quant(weight)
    layout = PackedLayout.of("int8", [shape])
    packed, _ = packed_by_all(layout, [weight])
    arrays = layout.arrays(packed)
    assert torch.equal(arrays["codes"][: weight.numel()].view(shape), codes)
    assert torch.equal(arrays["absmax"], absmax.float())
    expected = bnb.int8_vectorwise_dequant(codes, absmax)
    got = unpacked(layout, packed, torch.float32)[: weight.numel()].view(shape)
    assert same_bits(got, expected)


def searched(x: Tensor) -> Tensor:
    """The codes that bitsandbytes' CUDA kernels find (`dQuantize<0>`)."""
    values = reference.dynamic_map()
    pivot = torch.full(x.shape, 127)
    low, high = torch.zeros_like(pivot), torch.full_like(pivot, 255)
    for step in (64, 32, 16, 8, 4, 2, 1):
        is_more = x > values[pivot]
        low, high = torch.where(is_more, pivot, low), torch.where(is_more, high, pivot)
        pivot = pivot + torch.where(is_more, step, -step)
    up = torch.where(x > (values[high] + values[pivot]) * 0.5, high, pivot)
    down = torch.where(x < (values[low] + values[pivot]) * 0.5, low, pivot)
    return torch.where(x > values[pivot], up, down)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_codes_of_absmax_are_those_of_bitsandbytes_search_on_a_gpu(seed: int) -> None:
    absmax = any_weight((64 * NESTED,), torch.float32, "normal", seed).abs()
    codes, scales, offset = reference.nested(absmax, len(absmax))
    inverse = (1.0 / scales)[:, None]
    assert torch.equal(codes, searched((absmax - offset).view(-1, NESTED) * inverse).view(-1))


def test_all_borders_and_their_neighbours_have_the_codes_of_that_search() -> None:
    values = reference.dynamic_map()
    middle = torch.cat(((values[:-1] + values[1:]) / 2, values))
    above = torch.nextafter(middle, torch.tensor(2.0))
    below = torch.nextafter(middle, torch.tensor(-2.0))
    x = torch.cat((middle, above, below)).clamp(-1, 1)
    assert torch.equal(torch.bucketize(x, reference.nested_borders()), searched(x))


@ISAS
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_not_finite_are_refused_with_their_number(
    isa: str, format: PackedFormat, dtype: torch.dtype
) -> None:
    _native.set_isa(isa)
    weight = any_weight((70, 1000), dtype, "normal", 1)
    weight[0, 0], weight[40, 77], weight[69, 999] = torch.inf, torch.nan, -torch.inf
    layout = PackedLayout.of(format, [(70, 1000)])
    packed = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    with pytest.raises(BadInput, match="model.layers.0.up_proj holds 3 values of 70,000 that are"):
        pack(layout, 0, weight, packed, name="model.layers.0.up_proj")


@FORMATS
def test_strided_weights_and_other_dtypes_are_packed_as_their_values(format: PackedFormat) -> None:
    weight = any_weight((64, 300), torch.float32, "normal", 2)
    layout = PackedLayout.of(format, [(64, 300)])
    expected, _ = packed_by_all(layout, [weight])
    for same in (weight.t().contiguous().t(), weight.double(), weight.requires_grad_()):
        got = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        pack(layout, 0, same, got)
        assert torch.equal(got, expected)


def test_large_ranges_are_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PIECE_ELEMENTS", 16384)
    for format in PACKED_FORMATS:
        layout = PackedLayout.of(format, [(70, 1000), (3, 20000)])
        weights = [any_weight(w.shape, torch.bfloat16, "normal", 9) for w in layout.weights]
        packed, _ = packed_by_all(layout, weights)
        expected = torch.empty(layout.elements, dtype=torch.bfloat16)
        reference.unpack(layout, packed, expected)
        assert same_bits(unpacked(layout, packed, torch.bfloat16), expected)
