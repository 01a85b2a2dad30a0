"""A merge that is wrong is refused with the numbers, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.errors import EXIT_DISAGREES, Disagrees, DoesNotFit
from fluxtrain.exporting import merging
from fluxtrain.exporting.attached import Attached
from fluxtrain.exporting.check import gate
from fluxtrain.exporting.check.agreement import agreement, layer_agreement
from fluxtrain.exporting.check.probing import Probed
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_wrong_merge_is_refused_by_its_layers(
    what: str, dtype: torch.dtype, wrongly: Any, model_folder: Folder, tmp_path: Path
) -> None:
    base = model_folder("llama", dtype)
    adapter = make_adapter(base, tmp_path / "adapter")
    wrongly(WRONG[what])
    with pytest.raises(Disagrees) as refused:
        exported(adapter, to=tmp_path / "merged")
    assert refused.value.exit_code == EXIT_DISAGREES
    count = 1 if what == "one layer forgotten" else 2 if what == "transposed" else 14
    if what != "not finite":
        assert f"{count} of 14 merged weights do not compute" in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", base.name]


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_merge_is_refused_by_its_logits_alone(
    what: str, wrongly: Any, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluxtrain.exporting import export

    monkeypatch.setattr(export, "refuse_layers", lambda probed: None)
    base = model_folder("llama", torch.float32)
    adapter = make_adapter(base, tmp_path / "adapter")
    wrongly(WRONG[what])
    told = "holds .* NaN" if what == "not finite" else r"on [\d,]+ tokens of .* mean KL .*e-0"
    with pytest.raises((Disagrees, ValueError), match=told):
        exported(adapter, to=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


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


def test_every_merged_layer_is_probed_with_pefts_own_forward(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = list[str]()
    outputs = Attached.outputs

    def seen(self: Attached, name: str, *rest: Any) -> Any:
        probed.append(name)
        return outputs(self, name, *rest)

    monkeypatch.setattr(Attached, "outputs", seen)
    answer = exported(make_adapter(model_folder("llama"), tmp_path / "adapter"))
    assert len(set(probed)) == len(probed) == answer.changed == 14


def test_the_models_are_streamed_in_what_they_were_trained_in(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluxtrain.plan import states

    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    streamed: list[tuple[str, str]] = []
    wrapped = gate.streamed_logits

    def seen(model: Any, rows: Any, device: str, storage: Any) -> Tensor:
        streamed.append((type(model).__name__, storage))
        return wrapped(model, rows, device, storage)

    monkeypatch.setattr(gate, "streamed_logits", seen)
    base = model_folder("llama", torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "adapter")
    exported(adapter, packed="nf4-double", to=tmp_path / "one")
    assert streamed == [("PeftModelForCausalLM", "nf4-double"), ("LlamaForCausalLM", "plain")]


@pytest.mark.parametrize("storage", ["plain", "nf4-double"])
def test_a_model_larger_than_host_memory_is_computed_from_its_files(
    storage: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fluxtrain
    from fluxtrain.plan import states

    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    base = model_folder("qwen2", torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "adapter")
    packed = None if storage == "plain" else storage
    wrapped = exported(adapter, packed=packed, to=tmp_path / "one").logits

    def without_room(*_: Any, **__: Any) -> None:
        raise DoesNotFit("no room here")

    monkeypatch.setattr(fluxtrain, "wrap", without_room)
    mapped = exported(adapter, packed=packed, to=tmp_path / "other").logits
    assert wrapped is not None and mapped is not None
    assert mapped.mean_kl == pytest.approx(wrapped.mean_kl, rel=0.2)
    assert mapped.kl_limit == pytest.approx(wrapped.kl_limit, rel=1e-3)


# -- the numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("change", [1e-4, 1e-2, 1.0])
def test_rounding_a_weight_is_never_refused(dtype: torch.dtype, change: float) -> None:
    draw = torch.Generator().manual_seed(1)
    for seed in range(20):
        base = (torch.randn(64, 48, generator=draw) * 0.02).to(dtype).float()
        delta = torch.randn(64, 48, generator=draw) * 0.02 * change
        x = torch.randn(32, 48, generator=draw)
        found = (base + delta).to(dtype).float()
        told = layer_agreement(f"w{seed}", x @ base.T, x @ (base + delta).T, x @ found.T, dtype)
        assert told.agrees, told


def test_what_is_kept_is_the_share_of_the_change() -> None:
    x = torch.randn(32, 16)
    base, delta = torch.randn(8, 16), torch.randn(8, 16)
    for share in (0.0, 0.4, 1.0, 2.0):
        found = x @ (base + share * delta).T
        told = layer_agreement("w", x @ base.T, x @ (base + delta).T, found, torch.float32)
        assert told.kept == pytest.approx(share, abs=1e-4)
        assert Probed(layers=(told,)).kept == pytest.approx(share, abs=1e-4)


def test_a_layer_that_changes_nothing_keeps_all() -> None:
    x = torch.randn(4, 8)
    told = layer_agreement("w", x, x, x, torch.bfloat16)
    assert told.agrees and told.kept == 1


def test_equal_logits_agree_and_a_nan_never_does() -> None:
    logits = torch.randn(100, 50)
    same = agreement(logits, logits, torch.bfloat16, 4)
    assert (same.mean_kl, same.largest, same.top1, same.agrees) == (0, 0, 1, True)
    broken = logits.clone()
    broken[70, 3] = torch.nan
    assert not agreement(logits, broken, torch.bfloat16, 4).agrees


def test_the_kl_is_that_of_torch() -> None:
    one, other = torch.randn(130, 40), torch.randn(130, 40)
    expected = torch.nn.functional.kl_div(
        other.double().log_softmax(-1), one.double().log_softmax(-1), log_target=True,
        reduction="batchmean",
    )  # fmt: skip
    found = agreement(one, other, torch.float32, 1)
    assert found.mean_kl == pytest.approx(float(expected), rel=1e-9)
    assert found.largest == pytest.approx(float((one - other).abs().max()))
    assert found.top1 == float((one.argmax(-1) == other.argmax(-1)).double().mean())


def test_limits_grow_with_the_blocks_and_the_roundoff() -> None:
    logits = torch.randn(64, 30)
    few, many = (agreement(logits, logits, torch.bfloat16, n) for n in (3, 15))
    assert many.kl_limit == pytest.approx(4 * few.kl_limit)
    assert many.largest_limit == pytest.approx(2 * few.largest_limit)
    exact = agreement(logits, logits, torch.float32, 3)
    assert exact.kl_limit < few.kl_limit * 1e-5
