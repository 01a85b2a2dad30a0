"""Models sharded over two gloo ranks against the engine that streams, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fluxtrain.config.parallel_settings import FsdpSettings
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.wrap import wrap
from fluxtrain.errors import UnsupportedModel
from fluxtrain.methods.optimizer import EngineAdamW, parameter_groups
from fluxtrain.parallel.forecast import Sharding
from fluxtrain.parallel.sharding import refuse_unshardable
from tests.parallel import sharded_work as work
from tests.parallel.rank_pool import Ranks

STEPS = 3


def _alone(kind: str, dtype: str = "float32", first: int = 0, state: Any = None) -> Any:
    """Train with the streaming engine, from a state; return losses and the state."""
    model = work.model_of(kind, dtype)
    wrap(model, device="cpu", frozen="nf4-double" if kind == "qlora" else "plain")
    engine = engine_of(model)
    engine.model = model  # type: ignore[attr-defined]
    groups = parameter_groups(model, learning_rate=1e-2, weight_decay=0.1, no_decay=("norms",))
    optimizer = EngineAdamW(engine, groups, lr=1e-2)
    for name, tensors in (state or {}).items():
        engine.load_state_shard(name, tensors)
    losses = work.steps(engine, optimizer, first, first + STEPS, 1, 0)
    engine.flush()
    shards = {n: {k: t.clone() for k, t in ts.items()} for n, ts in engine.state_shards()}
    engine.close()
    return losses, shards


def _far(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference of weights and moments, whose names must be the same."""
    assert {n: set(t) for n, t in ours.items()} == {n: set(t) for n, t in theirs.items()}
    return max(
        float((a.double() - theirs[name][key].double()).abs().max())
        for name, tensors in ours.items()
        for key, a in tensors.items()
        if not key.endswith(".lo")
    )


@pytest.mark.parametrize("kind", ["full", "tied", "lora", "qlora"])
def test_a_sharded_model_trains_as_one_process_does_and_keeps_its_checkpoints(
    kind: str, ranks: Ranks
) -> None:
    losses, state = _alone(kind)
    (ours, shards), (other, _) = ranks.run(work.train, kind, STEPS, {})
    assert ours == other
    assert ours == pytest.approx(losses, abs=2e-5)
    assert _far(shards, state) < 5e-4
    # what either has saved the other goes on from
    on_alone, end_alone = _alone(kind, first=STEPS, state=shards)
    (on_ranks, end_ranks), _ = ranks.run(work.train, kind, STEPS, {}, "float32", STEPS, state)
    assert on_ranks == pytest.approx(on_alone, abs=5e-5)
    assert _far(end_ranks, end_alone) < 5e-3


SETTINGS: list[dict[str, Any]] = [
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "NO_SHARD"},
    {"sharding_strategy": "HYBRID"},
    {"cpu_offload": True},
    {"activation_checkpointing": False},
    {"backward_prefetch": "BACKWARD_POST"},
    {"forward_prefetch": False},
    {"sync_module_states": False},
    {"min_num_params": 10**9},
    {"mixed_precision": False},
]


def test_every_setting_trains_the_same(ranks: Ranks) -> None:
    (losses, _), _ = ranks.run(work.train, "full", STEPS, {})
    for settings in SETTINGS:
        (ours, _), (other, _) = ranks.run(work.train, "full", STEPS, settings)
        assert ours == other
        assert ours == pytest.approx(losses, abs=1e-6), settings


def test_settings_have_the_effect_that_they_name(ranks: Ranks) -> None:
    """How many bytes of weights a rank holds, between steps and while it computes."""
    found = {str(s): ranks.run(work.effects, s)[0] for s in [{}, *SETTINGS]}
    base = found["{}"]
    assert base["units"] == ["model.layers.0", "model.layers.1", ""]
    assert found[str(SETTINGS[1])]["shard_bytes"] == 2 * base["shard_bytes"]
    assert base["gathered_after_forward"] == [""]
    assert found[str(SETTINGS[0])]["gathered_after_forward"] == base["units"]
    assert found[str({"min_num_params": 10**9})]["units"] == [""]
    assert found[str({"activation_checkpointing": False})]["forwards"] == base["forwards"] // 2
    assert found[str({"backward_prefetch": "BACKWARD_POST"})]["order"] != base["order"]
    assert found[str({"sync_module_states": False})]["equal"] is False
    assert base["equal"] is True


def test_bfloat16_models_have_fp32_masters_and_mixed_dtypes_work(ranks: Ranks) -> None:
    (losses, shards), _ = ranks.run(work.train, "full", STEPS, {}, "bfloat16")
    assert any(key.endswith(".lo") for tensors in shards.values() for key in tensors)
    alone, _ = _alone("full", "bfloat16")
    assert losses == pytest.approx(alone, abs=2e-3)
    adapters, _ = ranks.run(work.train, "lora", STEPS, {}, "bfloat16")
    assert adapters[0] == pytest.approx(_alone("lora", "bfloat16")[0], abs=5e-3)


def test_compressed_gradients_train_alike_and_their_residuals_are_in_the_state(
    ranks: Ranks,
) -> None:
    (raw, _), _ = ranks.run(work.train, "full", STEPS, {})
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        comm = {"compress": "int8", "config": {"error_feedback": True}, "gather": "none"}
        settings = {"comm": comm, "sharding_strategy": strategy}
        (losses, shards), (other, others) = ranks.run(work.train, "full", STEPS, settings)
        assert losses == other
        # it is the first that writes them: whole ones in the memory of all would be too much
        assert max(t.numel() for part in others.values() for t in part.values()) == 1
        assert 0 < max(abs(a - b) for a, b in zip(losses, raw, strict=True)) < 0.05
        kept = [name for name in shards if name.startswith("exchange.")]
        between = "shards" if strategy == "FULL_SHARD" else "replicas"
        assert kept == [f"exchange.{rank}.int8 between {between} on 2 ranks" for rank in (0, 1)]
        assert "model.layers.1" in shards[kept[0]]
        assert not torch.equal(*(shards[name]["model.layers.1"] for name in kept))
        lost = sum(t.nbytes for name, t in shards[kept[1]].items() if name != "draws")
        asked = Sharding(settings=FsdpSettings(sharding_strategy=strategy), ranks=2, local_ranks=2)
        numbers = sum(p.numel() for p in work.llama().parameters())
        assert lost == 4 * numbers // asked.parts_encoded  # as the plan counts them


@pytest.mark.parametrize(
    "now",
    [
        {"comm": {"compress": "topk", "config": {"error_feedback": True}}},
        {"comm": {"compress": "int8"}},
        {
            "comm": {"compress": "int8", "config": {"error_feedback": True}},
            "sharding_strategy": "NO_SHARD",
        },
    ],
    ids=["another method", "no error feedback", "between other ranks"],
)
def test_residuals_of_another_exchange_begin_anew(ranks: Ranks, now: dict[str, Any]) -> None:
    kept = {"comm": {"compress": "int8", "config": {"error_feedback": True}}}
    (_, shards), _ = ranks.run(work.train, "full", 2, kept)
    bare = {name: tensors for name, tensors in shards.items() if not name.startswith("exchange.")}
    (ours, _), _ = ranks.run(work.train, "full", 2, now, "float32", 2, shards)
    (anew, _), _ = ranks.run(work.train, "full", 2, now, "float32", 2, bare)
    assert ours == anew


def test_what_cannot_be_sharded_is_refused_with_the_cure() -> None:
    model: Any = work.llama("float16")
    with pytest.raises(UnsupportedModel, match=r"model\.dtype=bfloat16"):
        refuse_unshardable(model)
    model = work.llama()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(UnsupportedModel, match=r"layers\.1 shares a weight"):
        refuse_unshardable(model)
    model = work.llama()
    model.model.norm.weight = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(UnsupportedModel, match=r"shape \(1,\)"):
        refuse_unshardable(model)


def test_gauges_call_no_operation_and_read_no_gradient(ranks: Ranks) -> None:
    for seen, there in ranks.run(work.looked_at):
        assert seen == there > 0


def test_a_whole_weight_is_gone_once_its_unit_is_sharded(ranks: Ranks) -> None:
    """Else the model would have to fit on each card, where a unit is put before it is sharded."""
    for left in ranks.run(work.whole_ones_left):
        assert left == [9 + 3, 3, 0]  # of the second block, and outside of blocks


def test_room_for_a_checkpoint_counts_what_compression_keeps(ranks: Ranks) -> None:
    (told, taken), _ = ranks.run(work.bytes_of_a_checkpoint)
    assert taken <= told + (64 << 10)  # of generators
    assert told < 1.05 * taken


def test_weights_that_are_those_of_the_first_rank_are_not_written(ranks: Ranks) -> None:
    """A weight that is mapped from its file and written to takes host memory of its own."""
    assert ranks.run(work.written_to_get_the_first_ones, True) == [0, 0]
    of_first, of_second = ranks.run(work.written_to_get_the_first_ones, False)
    assert of_first == 0 < of_second


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_not_finite_changes_no_weight(ranks: Ranks, fused: bool) -> None:
    assert ranks.run(work.refused_step, fused) == [(True, True)] * 2


def test_a_fused_step_trains_as_the_others_do_without_a_wait_for_its_norm(ranks: Ranks) -> None:
    (losses, plain), _ = ranks.run(work.train, "full", STEPS, {})
    (fused_losses, fused), _ = ranks.run(work.train, "full", STEPS, {"fused": True})
    assert fused_losses == pytest.approx(losses, abs=1e-5)
    assert _far(fused, plain) < 1e-5
    on, _ = ranks.run(work.train, "full", STEPS, {"fused": True}, "float32", STEPS, fused)
    plainly, _ = ranks.run(work.train, "full", STEPS, {}, "float32", STEPS, plain)
    assert on[0] == pytest.approx(plainly[0], abs=1e-5)


@pytest.mark.slow
def test_four_ranks_go_on_from_two_and_replicas_of_shards_train_alike(
    ranks: Ranks, four_ranks: Ranks
) -> None:
    (_, state), _ = ranks.run(work.train, "full", STEPS, {})
    (two, _), _ = ranks.run(work.train, "full", STEPS, {}, "float32", STEPS, state)
    four = four_ranks.run(work.train, "full", STEPS, {}, "float32", STEPS, state)
    assert four[0][0] == pytest.approx(two, abs=1e-5)
    hybrid = {"sharding_strategy": "HYBRID", "local": 2}
    (raw, _), *_ = four_ranks.run(work.train, "full", STEPS, hybrid)
    assert raw == pytest.approx(ranks.run(work.train, "full", STEPS, {})[0][0], abs=1e-5)
    comm = {"compress": "int8"}
    (losses, _), *_ = four_ranks.run(work.train, "full", STEPS, {**hybrid, "comm": comm})
    assert losses != raw
    assert losses == pytest.approx(raw, abs=0.05)
