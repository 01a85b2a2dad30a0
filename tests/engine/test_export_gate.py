"""A merge that is wrong is refused with the numbers, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.errors import EXIT_DISAGREES, BadInput, Disagrees
from fluxtrain.events.answers.answers import ComparedLayers, ComparedLogits
from fluxtrain.models.loading import ModelSource, load_model
from fluxtrain.results.adapter.attached import put_beside
from fluxtrain.results.adapter.source import read_adapter
from fluxtrain.results.export import merging
from fluxtrain.results.export.agreement import (
    RoundedWeight,
    agreement,
    compared_layers,
    rounded_weight,
    unit_roundoff,
)
from fluxtrain.results.export.gate import compared_rows, refuse_rounded_away, streamed_logits
from tests.engine.adapter_folders import exported, make_adapter

Folder = Callable[..., Path]
Change = Callable[[str, Tensor, Tensor], Tensor]  # name, base, merged -> what is written

WRONG: dict[str, Change] = {
    "scaled by 1.1": lambda name, base, merged: base + 1.1 * (merged - base),
    "scaled by a half": lambda name, base, merged: base + 0.5 * (merged - base),
    "one layer forgotten": lambda name, base, merged: base if "0.mlp.up_proj" in name else merged,
    "nothing merged": lambda name, base, merged: base,
    "transposed": lambda name, base, merged: (
        base + (merged - base).T if "self_attn.q_proj" in name else merged
    ),
    "rows moved by one": lambda name, base, merged: merged.roll(1, 0),
    "not finite": lambda name, base, merged: merged * torch.nan,
}


@pytest.fixture
def wrongly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Merge in another way than peft does."""
    right = merging.Merge.weight

    def use(change: Change) -> None:
        def weight(self: Any, tensor: Any, parameter: str) -> Tensor:
            made = right(self, tensor, parameter)
            if parameter not in self._changed:
                return made
            base = self.onto.read(parameter).float()
            return change(parameter, base, made.float()).to(tensor.dtype)

        monkeypatch.setattr(merging.Merge, "weight", weight)

    return use


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_merge_is_refused_and_leaves_nothing(
    what: str, wrongly: Any, model_folder: Folder, tmp_path: Path
) -> None:
    base = model_folder("llama", torch.float32)
    adapter = make_adapter(base, tmp_path / "adapter")
    wrongly(WRONG[what])
    told = "holds .* NaN" if what == "not finite" else r"on [\d,]+ tokens of .* mean KL .*e-0"
    with pytest.raises((Disagrees, BadInput), match=told) as refused:
        exported(adapter, to=tmp_path / "merged")
    assert what == "not finite" or refused.value.exit_code == EXIT_DISAGREES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", base.name]


def test_an_adapter_below_the_rounding_of_bf16_is_refused_with_the_cure(
    model_folder: Folder, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    base = model_folder("llama", torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    small = {n: t * (1e-3 if "lora_B" in n else 1) for n, t in load_file(path).items()}
    save_file(small, path, metadata={"format": "pt"})
    with pytest.raises(Disagrees, match=r"would hold \d+% of what .* use --dtype fp32"):
        exported(adapter, to=tmp_path / "merged")
    answer = exported(adapter, to=tmp_path / "merged", dtype="fp32")
    assert answer.layers is not None and answer.layers.kept == pytest.approx(1, abs=1e-3)


def test_the_check_can_be_left_out(wrongly: Any, model_folder: Folder, tmp_path: Path) -> None:
    adapter = make_adapter(model_folder("llama"), tmp_path / "adapter")
    wrongly(WRONG["nothing merged"])
    answer = exported(adapter, check=False)
    assert answer.logits is None and answer.layers is None and Path(answer.folder).is_dir()


@pytest.mark.parametrize("storage", ["plain", "nf4-double"])
def test_logits_from_mapped_files_are_those_of_a_wrapped_model(
    storage: Any, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fluxtrain
    from fluxtrain.plan import states

    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    base = model_folder("qwen2", torch.bfloat16)
    source = read_adapter(make_adapter(base, tmp_path / "adapter"))

    def adapted() -> tuple[Any, Any]:
        loaded = load_model(ModelSource(path=str(base), dtype="bfloat16"))
        return put_beside(source, loaded.model), loaded

    model, loaded = adapted()
    rows = compared_rows(loaded, None, None, 2)
    found = streamed_logits(model, rows, "cpu", storage)
    model, _ = adapted()
    fluxtrain.wrap(model.eval(), device="cpu", frozen=storage)
    with torch.no_grad():
        expected = (model(**rows.inputs).logits + 0)[rows.kept]
    fluxtrain.unwrap(model)
    assert found.shape == expected.shape == (int(rows.kept.sum()), 320)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.02)


# -- the numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("change", [1e-4, 1e-2, 1.0])
def test_rounding_a_weight_is_never_beyond_its_limit(dtype: torch.dtype, change: float) -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        base = (torch.randn(64, 48, generator=draw) * 0.02).to(dtype).float()
        merged = base + torch.randn(64, 48, generator=draw) * 0.02 * change
        found = rounded_weight("w", base, merged, merged.to(dtype))
        assert 0 < found.difference <= found.limit


def layers_of(*weights: RoundedWeight) -> ComparedLayers:
    found = compared_layers(weights)
    assert found is not None
    return found


def test_what_is_kept_is_the_share_of_the_change() -> None:
    base, delta = torch.randn(8, 16), torch.randn(8, 16)
    for share in (0.0, 0.4, 1.0, 2.0):
        found = rounded_weight("w", base, base + delta, base + share * delta)
        assert found.kept == layers_of(found).kept == pytest.approx(share, abs=1e-4)
    assert rounded_weight("w", base, base, base).kept == 1


def test_weights_too_small_for_fp16_are_refused_with_the_cure() -> None:
    merged = torch.full((8, 8), 1e-8)
    lost = rounded_weight("w", torch.zeros(8, 8), merged, merged.half())
    with pytest.raises(Disagrees, match="w would lose .*--dtype bf16"):
        refuse_rounded_away(layers_of(lost))


def compared(one: Tensor, other: Tensor, dtype: torch.dtype, blocks: int) -> ComparedLogits:
    return agreement(one, other, unit_roundoff(dtype), blocks, source="a file", rows=1)


def test_equal_logits_agree_and_a_nan_never_does() -> None:
    logits = torch.randn(100, 50)
    same = compared(logits, logits, torch.bfloat16, 4)
    assert (same.mean_kl, same.largest, same.top1, same.agrees) == (0, 0, 1, True)
    broken = logits.clone()
    broken[70, 3] = torch.nan
    assert not compared(logits, broken, torch.bfloat16, 4).agrees


def test_the_kl_is_that_of_torch() -> None:
    one, other = torch.randn(130, 40), torch.randn(130, 40)
    expected = torch.nn.functional.kl_div(
        other.double().log_softmax(-1), one.double().log_softmax(-1), log_target=True,
        reduction="batchmean",
    )  # fmt: skip
    found = compared(one, other, torch.float32, 1)
    assert found.mean_kl == pytest.approx(float(expected), rel=1e-9)
    assert found.largest == pytest.approx(float((one - other).abs().max()))
    assert found.top1 == float((one.argmax(-1) == other.argmax(-1)).double().mean())
