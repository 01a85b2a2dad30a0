"""Plans of sharded models: memory by parts, seconds, what fits, and when `auto` shards."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.commands import processes
from fluxtrain.commands.preview import preview, table
from fluxtrain.config.parallel_settings import FsdpSettings
from fluxtrain.config.schema import RunConfig, demo_config
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.errors import EXIT_DOES_NOT_FIT, BadInput, DoesNotFit
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.machine.gpu import Gpus
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.probe import probe as probing
from fluxtrain.models.copies import Copied
from fluxtrain.parallel.forecast import Sharding, on_device, rank_bytes, refuse_larger, step_seconds
from fluxtrain.plan.facts import ModelFacts, RowFacts
from fluxtrain.plan.guard import UNKNOWN_DISK
from fluxtrain.plan.machine_file import read_machine_file
from fluxtrain.plan.rates import CardsRates, Rates
from fluxtrain.train.placing.preflight import refuse_before_loading
from fluxtrain.train.placing.sharded import sharding_of, why_streamed
from fluxtrain.units import GIB
from tests.unit.plan_models import group

BLOCK = 100_000_000
ROW = RowFacts(
    hidden=2048, vocabulary=32_000, sequence_length=1024, dtype_bytes=2, activation_bytes=100 << 20
)
FACTS = ModelFacts(
    groups=(
        group("embed", 65_536_000), *(group(f"layers.{i}", BLOCK) for i in range(20)),
        group("head", 65_536_000),
    ),
    row=ROW,
)  # fmt: skip
TRAINED = 20 * BLOCK + 2 * 65_536_000


def sharding(ranks: int = 4, **settings: Any) -> Sharding:
    return Sharding(settings=FsdpSettings(**settings), ranks=ranks, local_ranks=ranks)


def cards(number: int, link: float = 3e11) -> CardsRates:
    card = Rates(
        has_gpu=True, matmul_per_s=7e14, adamw_per_s=1.5e9, h2d_bytes_per_s=5e10,
        d2h_bytes_per_s=5e10,
    )  # fmt: skip
    peers = {(a, (a + 1) % number): link for a in range(number)}
    return CardsRates(cards=(card,) * number, peers=peers)


def test_ranks_share_weights_gradients_and_states_and_ddp_shares_nothing() -> None:
    four, ddp = (
        rank_bytes(FACTS, sharding(), 1),
        rank_bytes(FACTS, sharding(sharding_strategy="NO_SHARD"), 1),
    )
    assert (four.parameters, four.gradients, four.states) == (TRAINED, TRAINED, 2 * TRAINED)
    assert (ddp.parameters, ddp.gradients) == (4 * TRAINED, 4 * TRAINED)
    assert four.gathered == 2 * 2 * BLOCK + 2 * 2 * 65_536_000
    assert ddp.gathered == 2 * TRAINED
    assert four.total < 0.6 * ddp.total
    whole = rank_bytes(FACTS, sharding(activation_checkpointing=False), 1)
    assert whole.activations - four.activations == 19 * ROW.activation_bytes
    fused = rank_bytes(replace(FACTS, fuses_loss=True), sharding(), 2)
    logits = 1024 * 32_000 * (2 + 4 + 4)  # with their gradients, of a row
    head = 2 * 2 * ROW.block_input_bytes + 2 * 32_000 * 2048  # of its input and weight
    assert rank_bytes(FACTS, sharding(), 2).activations - fused.activations == 2 * logits - head
    offloaded = sharding(cpu_offload=True)
    need = rank_bytes(FACTS, offloaded, 1).footprint(offloaded, FACTS, has_gpu=True)
    assert need.arena_bytes == 4 * TRAINED
    assert need.device_bytes == four.activations + four.gathered + four.staging


def test_what_compression_keeps_and_computes_with_is_counted() -> None:
    plain = rank_bytes(FACTS, sharding(), 1)
    ours = replace(sharding(), work_bytes=20, keeps_losses=True)
    kept = rank_bytes(FACTS, ours, 1)
    assert kept.residuals == 4 * TRAINED  # all that a rank encodes, and not its shard of it
    assert kept.staging - plain.staging == 20 * 2 * 65_536_000
    between = replace(ours, settings=FsdpSettings(sharding_strategy="HYBRID"), local_ranks=2)
    assert rank_bytes(FACTS, between, 1).residuals == 2 * TRAINED
    assert rank_bytes(FACTS, between, 1).staging - plain.staging == 22 * 65_536_000
    rounded = rank_bytes(FACTS, replace(sharding(), gather_bytes=1), 1)
    assert rounded.gathered - plain.gathered == 10 * 2 * 65_536_000
    config = demo_config(
        ["parallel.mode=fsdp", "comm.compress=int8", "comm.config={error_feedback: true}"]
    )
    asked = sharding_of(config, 4, 4)
    assert (asked.work_bytes, asked.keeps_losses) == (14, True)
    assert (
        sharding_of(demo_config(["parallel.mode=fsdp", "comm.compress=bf16"]), 4, 4).work_bytes == 0
    )
    with pytest.raises(DoesNotFit, match=r"comm\.compress=bf16 without comm\.config fits"):
        refuse_larger(FACTS, asked, 1, on_device(FACTS, sharding(), 1) + GIB)


def test_small_blocks_are_gathered_with_what_is_outside_of_blocks() -> None:
    together = rank_bytes(FACTS, sharding(min_num_params=BLOCK + 1), 1)
    assert together.gathered == 2 * TRAINED
    assert together.staging == (2 + 4) * TRAINED
    apart, base = (rank_bytes(FACTS, sharding(min_num_params=n), 1) for n in (BLOCK, 0))
    assert apart == base


def test_communication_counts_where_nothing_hides_it() -> None:
    rows = 8
    fast, slow = (step_seconds(FACTS, sharding(), cards(4, link), rows) for link in (3e11, 3e9))
    alone = step_seconds(FACTS, sharding(1), cards(1), rows)
    assert alone.parts_s["communication"] == 0
    assert fast.tokens_per_s > 3 * alone.tokens_per_s
    assert slow.binds == "communication between the ranks"
    # two gathers of half the weights in bf16 and one sum in fp32, of which 3 in 4 are sent
    assert slow.parts_s["communication"] == pytest.approx(0.75 * 8 * TRAINED / 3e9)
    assert slow.step_s > slow.parts_s["communication"]
    kept = step_seconds(FACTS, sharding(sharding_strategy="SHARD_GRAD_OP"), cards(4, 3e9), rows)
    assert kept.parts_s["communication"] == pytest.approx(0.75 * 6 * TRAINED / 3e9)
    ddp = step_seconds(FACTS, sharding(sharding_strategy="NO_SHARD"), cards(4, 3e9), rows)
    assert ddp.parts_s["communication"] == pytest.approx(1.5 * 4 * TRAINED / 3e9)


@pytest.mark.parametrize("gib", [14, 11, 3])
def test_every_cure_of_a_rank_that_is_too_large_fits(gib: float) -> None:
    asked = sharding(activation_checkpointing=False)
    with pytest.raises(DoesNotFit) as refused:
        refuse_larger(FACTS, asked, 8, int(gib * GIB))
    text = str(refused.value)
    assert text.endswith("parallel.mode=layers streams what does not fit")
    ways = {
        "cpu_offload=true": asked.with_settings(cpu_offload=True),
        "activation_checkpointing=true": asked.with_settings(activation_checkpointing=True),
    }
    for word, other in ways.items():
        assert (word in text) == (on_device(FACTS, other, 8) <= gib * GIB)
    for rows in re.findall(r"batch_rows=(\d+)", text):
        assert on_device(FACTS, asked, int(rows) // 4) <= gib * GIB
    for ranks in re.findall(r"processes=(\d+)", text):
        more = replace(asked, ranks=int(ranks), local_ranks=int(ranks))
        assert on_device(FACTS, more, 8) <= gib * GIB
    refuse_larger(FACTS, asked, 8, on_device(FACTS, asked, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three billion parameters, of which there is nothing but the configuration."""
    folder = tmp_path_factory.mktemp("three-billion")
    LlamaConfig(
        vocab_size=32_000, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
        num_attention_heads=24, num_key_value_heads=8, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    return folder


def planned(
    model: Path, *settings: str, number: int = 2, gib: float = 80, link: float = 3e11
) -> PlanAnswer:
    """The plan for some cards."""
    rates = {"gpu_matmul": 7e14, "adamw": 1.5e9, "h2d_pinned": 2.5e10, "d2h_pinned": 2.5e10}
    rates |= {f"peer_{a}_{b}": link for a in range(number) for b in range(number) if a != b}
    gpus = [{"name": "card", "memory_total_bytes": gib * GIB}] * number
    told = {"machine": {"memory_total_bytes": 400 * GIB, "gpus": gpus}, "rates": rates}
    (path := model / "machine.json").write_text(json.dumps(told))
    own = ("data.sequence_length=1024", "train.batch_rows=8", "train.steps=10")
    config: RunConfig = demo_config([*own, f"model.path={model}", *settings])
    return preview(config, read_machine_file(path))


def reason(plan: PlanAnswer, name: str) -> tuple[str, str]:
    return next((c.value, c.because) for c in plan.choices if c.name == name)


def test_a_plan_of_ranks_tells_their_parts_their_seconds_and_those_of_ddp(model: Path) -> None:
    plan = planned(model, "parallel.mode=fsdp", "parallel.processes=2")
    (note,) = [note for note in plan.notes if "each of 2 ranks takes" in note]
    for part in ("parameters", "gradients", "states", "activations", "gathered", "staging"):
        assert f"{part} " in note
    assert re.search(r"as DDP [\d.]+ GiB \(-\d\d%\), .* a step against", note)
    assert note in table(plan)
    assert reason(plan, "train.batch_rows")[0] == "8"
    assert plan.layout.batch_rows == 4
    assert plan.predicted is not None
    assert plan.predicted.tokens_per_s == pytest.approx(8 * 1024 / plan.predicted.step_s)
    assert not plan.plans
    without = planned(model, "parallel.mode=fsdp", "parallel.processes=2", "placement.device=cpu")
    assert without.predicted is None
    assert "without GPUs" in without.predicted_because


def test_a_plan_of_ranks_refuses_what_does_not_fit(model: Path) -> None:
    settings = ("parallel.mode=fsdp", "parallel.processes=2")
    with pytest.raises(DoesNotFit, match=r"fsdp\.cpu_offload=true fits") as refused:
        planned(model, *settings, gib=24)
    assert refused.value.exit_code == EXIT_DOES_NOT_FIT
    planned(model, *settings, "fsdp.cpu_offload=true", gib=24)
    with pytest.raises(BadInput, match=r"set train\.batch_rows=10"):
        planned(model, *settings, "train.batch_rows=9")


def test_what_fits_as_shards_alone_is_not_refused_before_it_is_loaded(model: Path) -> None:
    config = demo_config(["parallel.mode=fsdp", f"model.path={model}"])
    shape = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4,
        num_attention_heads=16, dtype="float32",
    )  # fmt: skip
    with torch.device("meta"):
        empty = LlamaForCausalLM(shape)
    numbers = sum(p.numel() for p in empty.parameters())

    def refuse(bytes_of_each: int) -> None:
        machine = msgspec.structs.replace(
            read_machine(), memory_available_bytes=bytes_of_each * numbers
        )
        ranks = Ranks(world=8, local_world=8)
        refuse_before_loading(config, machine, "cpu", UNKNOWN_DISK, ranks, empty, Copied())

    refuse(12)  # all of it would take 16 in a process that streams
    with pytest.raises(DoesNotFit, match="each of 8 ranks of a machine needs"):
        refuse(3)  # each loads all weights in fp32


def test_auto_shards_where_that_is_predicted_faster_and_says_why(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(model, "train.batch_rows=4", number=4)  # few chunks for a pipeline of four
    assert reason(plan, "parallel.mode")[0] == "fsdp"
    assert re.match(r"[\d,]+ tokens/s .*layers\), [\d,]+ sharded", reason(plan, "parallel.mode")[1])
    assert (plan.config["parallel"]["mode"], plan.config["parallel"]["processes"]) == ("fsdp", 4)
    asked: list[Any] = []

    async def ask(*words: Any) -> PlanAnswer:
        asked.append(words)
        return plan

    monkeypatch.setattr(processes, "ask_engine", ask)
    monkeypatch.setattr(
        processes, "read_gpus", lambda: Gpus(gpus=(None,) * 4, driver=None, reason=None)
    )  # type: ignore[arg-type]
    config = demo_config([])
    monkeypatch.setattr(probing, "known_rates", lambda folder: {})
    processes.with_planned_mode(config, None, True, ["train.steps=3"], None)
    assert not asked, "on a machine that was not measured nothing is planned"
    monkeypatch.setattr(probing, "known_rates", lambda folder: {"adamw": 1.0})
    chosen, overrides = processes.with_planned_mode(config, None, True, ["train.steps=3"], None)
    assert asked == [(PlanAnswer, "--demo", "--set", "train.steps=3")]
    assert (chosen.is_sharded, chosen.ranks_planned) == (True, 4)
    assert overrides == ["train.steps=3", "parallel.mode=fsdp", "parallel.processes=4"]
    assert processes.with_planned_mode(chosen, None, True, overrides, None) == (chosen, overrides)
    slow: dict[str, Any] = {"link": 1e9}
    for where, words in ((slow, "tokens/s are predicted"), ({"gib": 10}, "does not fit")):
        streamed = planned(model, "train.batch_rows=4", number=4, **where)
        value, because = reason(streamed, "parallel.mode")
        assert (value, words in because) == ("layers", True), because


def test_settings_of_layers_are_never_left_for_fsdp() -> None:
    assert not why_streamed(demo_config(["train.batch_rows=4"]), FACTS, 4)
    for setting, words in (
        ("train.states=8bit", "leave both out"),
        ("placement.offload=none", "settings of placement"),
        ("parallel.order=fast", "other settings of parallel"),
        ("train.batch_rows=3", "shared evenly"),
    ):
        assert words in why_streamed(demo_config([setting]), FACTS, 4)
