"""Runs whose host holds no more than some blocks: kept, resumed, damaged, changed and used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fluxtrain.commands.preview import preview, table
from fluxtrain.config.schema import load_config
from fluxtrain.core.device import disk
from fluxtrain.core.quantization.packed_cache import cache_folder
from fluxtrain.errors import BadInput, Interrupted, ReadFailed
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.machine.disk import read_disk
from fluxtrain.plan import states
from fluxtrain.plan.facts import GroupFacts, ModelFacts
from fluxtrain.plan.placement import Placement
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.loop import TrainingLoop
from fluxtrain.train.placing import placing
from fluxtrain.train.run import train
from tests.engine.test_weights_on_disk import damaged

MakeConfig = Callable[..., Path]
METHODS = {"lora": ["method.name=lora"], "qlora": ["method.name=qlora"]}


@pytest.fixture(autouse=True)
def small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)


@pytest.fixture
def model_folder(model_folder: Callable[..., Path]) -> Callable[..., Path]:
    """The model has more blocks than slots: weights that stay in slots are read once a run."""

    def deeper(family: str) -> Path:
        folder = model_folder(family)
        config: Any = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = 5
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return deeper


def on_disk(plan: Placement) -> Placement:
    """All blocks but the first on disk: a host small enough for that has no room for a run."""
    blocks = [row.name for row in plan.groups if row.kind == "block"][1:]
    rows = (replace(r, weights="disk") if r.name in blocks else r for r in plan.groups)
    return replace(plan, groups=tuple(rows))


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    real = placing.place
    monkeypatch.setattr(placing, "place", lambda *a, **k: on_disk(real(*a, **k)))


def run(config: Path, run_dir: Path, *overrides: str, resume: str | None = None) -> list[Any]:
    made = load_config(config, ["method.rank=4", *overrides])
    train(made, locate(resume, None if resume else run_dir, made))
    return list(read_events(run_dir / "events.ndjson"))


def losses(events: list[Any]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, ev.StepFinished)}


def adapter(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "adapter_model.safetensors")


def after(steps: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    step, done = TrainingLoop._step, []  # type: ignore[attr-defined]

    def counted(loop: Any, *args: Any, **kwargs: Any) -> Any:
        if len(done) == steps:
            act()
        done.append(1)
        return step(loop, *args, **kwargs)

    monkeypatch.setattr(TrainingLoop, "_step", counted)


def stop() -> None:
    raise Interrupted("the test stops it")


def damage() -> None:
    damaged(cache_folder())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ends", [stop, damage], ids=["stopped", "damaged"])
@pytest.mark.thinned(2)
def test_a_run_has_the_bits_of_one_in_memory_also_when_it_was_stopped_or_its_files_damaged(
    method: str, ends: Any, run_config: MakeConfig, tmp_path: Path, request: Any
) -> None:
    config = run_config(model__dtype="bf16", train__steps=4, train__checkpoint_every=2)
    wanted = losses(run(config, tmp_path / "memory", *METHODS[method]))
    request.getfixturevalue("small_host")
    there = tmp_path / "disk"
    with pytest.MonkeyPatch.context() as patch, pytest.raises((Interrupted, ReadFailed)):
        after(2, ends, patch)
        run(config, there, *METHODS[method])
    events = run(config, there, *METHODS[method], resume=str(there))
    assert losses(events) == wanted
    traffic = [event for event in events if isinstance(event, ev.TrafficSampled)]
    assert max(event.disk_read_bytes for event in traffic) > 0
    tables = [event.placement for event in events if isinstance(event, ev.Planned)]
    assert tables and all("disk" in {rows.weights for rows in table} for table in tables)
    kept, found = adapter(tmp_path / "memory"), adapter(there)
    assert all(torch.equal(kept[name], found[name]) for name in kept)


@pytest.mark.usefixtures("small_host")
def test_a_block_that_was_read_wrong_once_is_named_at_the_end(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, wrong = disk.sum_of, []

    def once(block: torch.Tensor) -> int:
        if len(wrong) == 0 and in_training:
            wrong.append(1)
            return 0
        return real(block)

    in_training: list[int] = []
    monkeypatch.setattr(disk, "sum_of", once)
    monkeypatch.setattr(disk, "set_direct", lambda _: False)
    after(1, lambda: in_training.append(1), monkeypatch)
    config = run_config(model__dtype="bf16", train__steps=3)
    events = run(config, tmp_path / "run", *METHODS["qlora"])
    assert wrong, "nothing was read after the first step"
    warned = [event.text for event in events if isinstance(event, ev.LogWritten)]
    assert [".packed (1 times)" in text for text in warned if "read wrong" in text] == [True]
    assert sum("no direct reads" in text for text in warned) == 1


@pytest.mark.usefixtures("small_host")
def test_without_the_cache_weights_on_disk_are_refused(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="bf16", train__steps=1)
    with pytest.raises(BadInput, match=r"model\.packed_cache=true"):
        run(config, tmp_path / "run", *METHODS["qlora"], "model.packed_cache=false")


@pytest.mark.parametrize(
    ("allowed", "kind", "unusable"),
    [
        (True, "ext4", ""),
        (True, "nfs4", ""),
        (True, "tmpfs", "is in memory itself"),
        (False, "ext4", "packed_cache=true"),
    ],
)
def test_where_frozen_weights_may_live(
    monkeypatch: pytest.MonkeyPatch, allowed: bool, kind: str, unusable: str
) -> None:
    seen = read_disk(Path("/"))
    found = msgspec.structs.replace(seen, in_memory=kind == "tmpfs", on_network=kind == "nfs4")
    monkeypatch.setattr(placing, "read_disk", lambda _: found)
    block = GroupFacts(name="0", kind="block", weight_bytes=9, frozen=4, file_bytes=8)
    home = placing.disk_home(ModelFacts(groups=(block,)), {"disk_read": 2e9}, allowed=allowed)
    assert home is not None and home.on_network is (kind == "nfs4")
    assert home.read_bytes_per_s == 2e9
    assert unusable in home.unusable and bool(home.unusable) is bool(unusable)
    full = ModelFacts(groups=(replace(block, file_bytes=0),))
    assert placing.disk_home(full, {}, allowed=True) is None


@pytest.mark.usefixtures("small_host")
def test_a_base_of_other_values_in_the_same_files_gets_files_of_its_own(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as frozen parts of adapters, which no file of the base has."""
    config = run_config(model__dtype="bf16", train__steps=1)
    first = losses(run(config, tmp_path / "a", *METHODS["lora"]))
    real = placing.wrapped

    def scaled(made: Any, loaded: Any, *rest: Any) -> Any:
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if "layers" in name and not parameter.requires_grad:
                    parameter.data = parameter.data * 0.5
        return real(made, loaded, *rest)

    monkeypatch.setattr("fluxtrain.train.run.wrapped", scaled)
    assert losses(run(config, tmp_path / "b", *METHODS["lora"])) != first
    monkeypatch.setattr("fluxtrain.train.run.wrapped", real)
    assert losses(run(config, tmp_path / "c", *METHODS["lora"])) == first


def test_the_short_plan_names_weights_on_disk(run_config: MakeConfig) -> None:
    answer = preview(load_config(run_config(model__dtype="bf16"), METHODS["qlora"]))
    assert "weights on disk" not in table(answer)
    told = ev.ChoiceMade(name="weights on disk", value="2 of 3 blocks", because="8 s a step")
    short = table(msgspec.structs.replace(answer, choices=(*answer.choices, told)))
    assert "weights on disk: 2 of 3 blocks: 8 s a step" in short
