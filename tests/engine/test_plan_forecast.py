"""`fluxtrain plan` tells time and three plans, also for a machine that is not here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from transformers import LlamaConfig

from fluxtrain.commands.preview import preview, table
from fluxtrain.config.schema import RunConfig, demo_config
from fluxtrain.errors import EXIT_DOES_NOT_FIT, BadInput, DoesNotFit
from fluxtrain.plan.machine_file import PlannedMachine, read_machine_file
from fluxtrain.units import GIB

RATES = {"gpu_matmul": 1.6e14, "adamw": 1.5e9, "h2d_pinned": 2.5e10, "d2h_pinned": 2.5e10}


def machine(folder: Path, device_gib: float, host_gib: float, rates: Any = None) -> PlannedMachine:
    path = folder / "machine.json"
    gpus = [{"name": "card", "memory_total_bytes": device_gib * GIB}] if device_gib else []
    told = {"machine": {"memory_total_bytes": host_gib * GIB, "gpus": gpus},
            "rates": RATES if rates is None else rates}  # fmt: skip
    path.write_text(json.dumps(told))
    return read_machine_file(path)


@pytest.fixture
def large(tmp_path: Path) -> RunConfig:
    """Eight billion parameters of which there is nothing but the configuration."""
    folder = tmp_path / "eight-billion"
    LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    settings = ("data.sequence_length=1024", "train.batch_rows=8", f"model.path={folder}")
    return demo_config(list(settings))


def test_a_model_without_weights_is_planned_for_a_machine_that_is_not_here(
    large: RunConfig, tmp_path: Path
) -> None:
    plan = preview(large, machine(tmp_path, 24, 160))
    assert plan.model.parameters == pytest.approx(8.03e9, rel=0.01)
    assert plan.device == "cuda"
    assert plan.device_bytes <= 24 * GIB * 0.9
    assert plan.need["host_bytes"] <= 160 * GIB * 0.9 == plan.host_limit_bytes * 0.9
    # the states of what is at home pass through the optimizer, in two passes of 18 of 26 bytes
    parts, home = plan.predicted.parts_s, plan.need["arena_bytes"] / 14
    once_s = home / RATES["adamw"]
    assert parts["host_update"] == pytest.approx(once_s * 18 / 26, rel=0.01)
    assert parts["deferred_moments"] == parts["host_update"]
    assert plan.predicted.step_s >= parts["host_update"]
    assert [one.name for one in plan.plans] == ["fast", "balanced", "fit"]
    text = table(plan)
    assert "bound by" in text
    assert "balanced" in text


def test_copies_for_checkpoints_count_in_each_plan_of_the_dial(
    large: RunConfig, tmp_path: Path
) -> None:
    plan, end = (
        preview(with_checkpoints(large, every), machine(tmp_path, 24, 260)) for every in (10, "end")
    )
    copies_bytes = plan.host_bytes - end.host_bytes
    assert copies_bytes > 8e9, "the last checkpoint alone needs no copies"
    for one, without in zip(plan.plans, end.plans, strict=True):
        assert one.host_bytes - without.host_bytes == copies_bytes
    assert plan.plans[0].host_bytes == plan.host_bytes


def with_checkpoints(config: RunConfig, every: int | str) -> RunConfig:
    train = config.train.model_copy(update={"checkpoint_every": every})
    return config.model_copy(update={"train": train})


def test_all_cards_of_a_file_are_planned_for_and_told(large: RunConfig, tmp_path: Path) -> None:
    gpus = [{"name": "card", "memory_total_bytes": 24 * GIB}] * 2
    path = tmp_path / "two.json"

    def planned(**rates: float) -> tuple[Any, str]:
        told = {"machine": {"memory_total_bytes": 160 * GIB, "gpus": gpus},
                "rates": {**RATES, **rates}}  # fmt: skip
        path.write_text(json.dumps(told))
        found = preview(large, read_machine_file(path))
        return found, table(found)

    plan, text = planned(cards_h2d=5e10, cards_d2h=5e10)
    alone = preview(large, machine(tmp_path, 24, 160))
    assert [(card.blocks, card.edges) for card in plan.cards] == [(16, True), (16, False)]
    assert plan.predicted.step_s < alone.predicted.step_s and alone.cards == ()
    assert all(card.device_bytes <= 0.9 * 24 * GIB for card in plan.cards)
    assert "card 0 (card): 16 of 32 blocks, embedding and head; device memory" in text
    assert "card 1 (card): 16 of 32 blocks; device memory" in text
    slow, text = planned(card1_gpu_matmul=1e12)
    assert slow.cards == () and [one.index for one in slow.left_out] == [1]
    assert re.search(
        r"card 1 \(card\) is left out: .* s a step .* predicted with it, \d+% of", text
    )


def test_when_moments_are_updated_is_predicted_chosen_and_said(
    large: RunConfig, tmp_path: Path
) -> None:
    """The states of what is at home pass through the optimizer once, or later and once more."""
    told = {}
    for moments in ("auto", "deferred", "with_weights"):
        asked = large.model_copy(
            update={"train": large.train.model_copy(update={"moments": moments})}
        )
        told[moments] = preview(asked, machine(tmp_path, 24, 160))
    seconds = {name: plan.predicted.step_s for name, plan in told.items()}
    assert seconds["auto"] == seconds["deferred"] < seconds["with_weights"]
    whole = told["with_weights"]
    home = whole.need["arena_bytes"] / 14
    parts = whole.predicted.parts_s
    assert parts["host_update"] == pytest.approx(home / RATES["adamw"], rel=0.01)
    assert parts["deferred_moments"] == 0
    for name, plan in told.items():
        choice = next(one for one in plan.choices if one.name == "train.moments")
        assert choice.value == ("with_weights" if name == "with_weights" else "deferred")
        assert (choice.because == "as set") == (name != "auto")


def test_a_host_that_is_too_small_is_refused_with_the_numbers(
    large: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(DoesNotFit, match="of host memory and 57.6 GiB may be used"):
        preview(large, machine(tmp_path, 24, 64))


def test_a_model_that_is_larger_than_the_host_fits_where_its_files_are_only_mapped(
    large: RunConfig, tmp_path: Path
) -> None:
    plan = preview(large, machine(tmp_path, 160, 8))
    weights = 2 * plan.model.parameters
    assert plan.layout.offload == "none" and weights > plan.host_limit_bytes == 8 * GIB
    assert 2e9 <= plan.host_bytes < 8 * GIB, "two weights, while the model is saved"
    with pytest.raises(DoesNotFit, match=r"while they are saved 1.96 GiB need .* is available"):
        preview(large, machine(tmp_path, 160, 1.5))


def test_a_model_whose_weights_loading_converts_must_fit_the_host_as_a_whole(
    large: RunConfig, tmp_path: Path, fluxtrain: Callable[..., CompletedProcess[str]]
) -> None:
    shape = Path(large.model.path) / "config.json"
    shape.write_text(json.dumps({**json.loads(shape.read_text()), "dtype": "float32"}))
    assert preview(large, machine(tmp_path, 160, 24)).model.dtype == "bfloat16"
    machine(tmp_path, 160, 8)
    asked = [f"--set={setting}" for setting in (f"model.path={shape.parent}",
             "data.sequence_length=1024", "train.batch_rows=8")]  # fmt: skip
    ended = fluxtrain("plan", "--demo", *asked, "--machine", tmp_path / "machine.json")
    assert ended.returncode == EXIT_DOES_NOT_FIT, ended.stderr
    told = r"\(converted, merged or pickled\) need 1[56]\.\d GiB, and 8\.00 GiB is available: store"
    assert re.search(told, ended.stderr)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "is quantised .bitsandbytes."),
        ({"vocab_size": 0}, "says vocab_size = 0"),
        ({"hidden_size": -4}, "says hidden_size = -4"),
    ],
)
def test_another_machine_trains_no_model_that_this_one_refuses(
    large: RunConfig, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    shape = Path(large.model.path) / "config.json"
    shape.write_text(json.dumps({**json.loads(shape.read_text()), **changes}))
    with pytest.raises(BadInput, match=told):
        preview(large, machine(tmp_path, 160, 160))


def test_a_machine_without_rates_has_a_plan_but_no_time(large: RunConfig, tmp_path: Path) -> None:
    plan = preview(large, machine(tmp_path, 24, 160, rates={"adamw": 1e9}))
    assert plan.predicted is None
    assert plan.plans == ()
    assert "gpu_matmul" in plan.predicted_because
    assert "time is not predicted: not measured on this machine" in table(plan)


def test_no_plans_are_offered_where_the_least_of_the_device_is_asked_for(
    large: RunConfig, tmp_path: Path
) -> None:
    placement = replace(large.placement, offload="max")
    plan = preview(large.model_copy(update={"placement": placement}), machine(tmp_path, 24, 160))
    assert plan.layout.offload == "max" and plan.predicted is not None
    assert plan.plans == (), "no setting of the dial leads to another plan"
    assert "plans by their memory" not in table(plan)


def test_without_a_gpu_an_offload_as_set_leaves_plans_to_choose_from(tmp_path: Path) -> None:
    rates = {"cpu_matmul": 1e11, "adamw": 1e9, "host_copy": 1e10}
    asked = demo_config(["placement.offload=max"])
    assert preview(asked, machine(tmp_path, 0, 8, rates)).plans


def test_a_gpu_is_not_invented(tmp_path: Path) -> None:
    rates = {"cpu_matmul": 1e11, "adamw": 1e9, "host_copy": 1e10}
    plan = preview(demo_config(), machine(tmp_path, 0, 8, rates))
    assert plan.device == "cpu"
    assert plan.predicted.step_s > 0
    with pytest.raises(BadInput, match="has no GPU"):
        preview(demo_config(["placement.device=cuda"]), machine(tmp_path, 0, 8, rates))


def test_with_the_settings_of_a_plan_train_takes_just_that_plan(
    large: RunConfig, tmp_path: Path
) -> None:
    elsewhere = machine(tmp_path, 24, 160)
    for one in preview(large, elsewhere).plans:
        sets = [f"{key}={value}" for key, value in one.settings.items()]
        asked = demo_config([*sets, "data.sequence_length=1024", f"model.path={large.model.path}"])
        again = preview(asked, elsewhere)
        assert again.layout == one.layout
        assert again.device_bytes == one.device_bytes
        seconds = again.predicted.step_s
        assert seconds == pytest.approx(one.predicted.step_s)
