"""Packed weights on a GPU: unpacked to the oracle's bits, and trained with like dense ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import fluxtrain
from fluxtrain.core.quantization import reference, triton_unpack
from fluxtrain.core.quantization.layout import PackedLayout
from fluxtrain.plan import states
from fluxtrain.plan.states import PACKED_FORMATS, PackedFormat
from tests.packed_models import LAYOUTS, LEAST, adapted, llama, trained, with_unpacked

pytestmark = pytest.mark.gpu
SHAPES = [(256, 512), (100, 96), (64, 72), (3, 64, 128), (1024, 333)]
ROWS = (8, 64)


@pytest.fixture(autouse=True, scope="module")
def small_weights_are_packed() -> Iterator[None]:
    """Tests have small models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "LEAST_PACKED", LEAST)
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("storage", PACKED_FORMATS)
def test_a_gpu_unpacks_the_oracles_bits(storage: PackedFormat, dtype: torch.dtype) -> None:
    assert triton_unpack.AVAILABLE
    layout = PackedLayout.of(storage, SHAPES)
    packed = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for index, shape in enumerate(SHAPES):
        weight = torch.randn(shape).to(dtype)
        weight.view(-1)[:64] = 0.0
        reference.pack(layout, index, weight, packed)
    expected = torch.empty(layout.elements, dtype=dtype)
    reference.unpack(layout, packed, expected)
    found = torch.full((layout.elements,), torch.nan, dtype=dtype, device="cuda")
    triton_unpack.unpack(layout, packed.cuda(), found)
    for weight in layout.weights:
        span = slice(weight.first, weight.first + weight.count)
        assert torch.equal(found[span].cpu(), expected[span])


@pytest.mark.parametrize("storage", PACKED_FORMATS)
def test_a_packed_base_trains_like_the_weights_it_unpacks_to(storage: PackedFormat) -> None:
    model = llama(128)
    with_unpacked(model, storage)
    dense = fluxtrain.wrap(adapted(model), device="cuda", cards=1, offload="none", chunk_rows=4)
    expected = trained(dense, shape=ROWS)
    for layout in LAYOUTS:
        packed = fluxtrain.wrap(
            adapted(llama(128)), device="cuda", chunk_rows=4, frozen=storage, **layout
        )
        assert trained(packed, shape=ROWS) == expected, layout


@pytest.mark.parametrize("double", [False, True])
def test_a_model_of_bitsandbytes_computes_what_its_own_kernels_unpack(double: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    dense, model = llama(128), llama(128).cuda()
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear):
                continue
            made = bnb.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, quant_type="nf4",
                compute_dtype=torch.bfloat16,
            )  # fmt: skip
            weight = bnb.nn.Params4bit(
                child.weight.data.cpu(), requires_grad=False, quant_type="nf4",
                compress_statistics=double,
            )  # fmt: skip
            made.weight = weight.to("cuda")
            setattr(parent, name, made)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)}
    for name, layer in layers.items():
        unpacked = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        dense.get_submodule(name).weight.data = unpacked.cpu()
    names = sorted({name.rpartition(".")[2] for name in layers})
    resident = fluxtrain.wrap(
        alike(dense, names), device="cuda", cards=1, offload="none", chunk_rows=4
    )
    expected = trained(resident, shape=ROWS)
    for layout in LAYOUTS[1:4]:
        taken = fluxtrain.wrap(alike(model, names), device="cuda", cards=1, chunk_rows=4, **layout)
        assert trained(taken, shape=ROWS) == expected, layout
        fluxtrain.unwrap(taken)
        model = taken.unload()


def alike(model: nn.Module, names: list[str]) -> Any:
    config = LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM")
    made: Any = get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    torch.manual_seed(3)
    for name, parameter in made.named_parameters():
        if "lora_" in name:  # drawn in another order beside other layers
            parameter.data = (0.02 * torch.randn(parameter.shape)).to(parameter)
    return made.train()
