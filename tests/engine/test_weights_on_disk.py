"""Frozen weights on disk: the bits of a training are those of one that holds them in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.core.memory.group import Group, prepare_move
from fluxtrain.core.memory.packed import kept_name
from fluxtrain.core.quantization.packed_cache import PackedCache
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.core.wrap.wrap import wrap_placed
from fluxtrain.errors import BadInput, MisusedModel, NoSpace, ReadFailed
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.choose import place
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import ParallelRequest, RunRequest
from fluxtrain.plan.states import StorageFormat
from tests.packed_models import LEAST, adapted, llama, trained
from tests.placements import placement_of, planned_reads

KEY = "0" * 32
LAYOUTS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "max": {"offload": "max"},
    "resident": {"resident_blocks": 2, "blocks_without_recompute": 1},
    "on device": {"device_groups": 2},
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxtrain.plan.states.LEAST_PACKED", LEAST)


def keeping(folder: Path, groups: Iterable[Group]) -> PackedCache:
    sizes = {kept_name(s, g.name): s.size_bytes for g in groups for s in g.file_segments}
    return PackedCache(KEY, sizes, lambda _: None, folder)


def placed(model: nn.Module, storage: StorageFormat, on_disk: int, **counts: Any) -> Placement:
    facts = facts_of(model, "fp32", storage)
    layout = Layout(**{"offload": "weights", "chunk_rows": 2, **counts})
    made = placement_of(facts, layout, footprint(facts, layout, has_gpu=False))
    streamed = [row.name for row in made.groups if row.kind == "block" and row.weights == "host"]
    there = streamed[:on_disk]
    rows = (replace(r, weights="disk") if r.name in there else r for r in made.groups)
    return replace(made, groups=tuple(rows))


def wrapped(
    folder: Path, storage: StorageFormat, on_disk: int, *, device: str = "cpu", width: int = 64,
    **counts: Any,
) -> Any:  # fmt: skip
    model = adapted(llama(width), **counts.pop("adapter", {}))
    plan = placed(model, storage, on_disk, **counts)
    how: dict[str, Any] = {"states": "fp32", "frozen": storage}
    return wrap_placed(model, device, plan, keeping=partial(keeping, folder), **how)


def damaged(folder: Path) -> None:
    """Write to each file of weights, as a failing disk or another program would."""
    for path in folder.rglob("*.packed"):
        with path.open("r+b") as file:
            file.write(b"\x55\xaa")
            file.flush()
            os.fsync(file.fileno())


def bits(model: Any) -> dict[str, torch.Tensor]:
    fluxtrain.sync(model)
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def on_disk(engine: Engine) -> list[Group]:
    return [group for group in engine.groups if group.is_on("disk")]


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(24).view(2, 12)).logits  # type: ignore[no-any-return]


@cache
def in_memory(
    storage: StorageFormat,
) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Losses, trained weights and an answer of a model that no layout puts on a disk."""
    with tempfile.TemporaryDirectory() as folder:
        model = wrapped(Path(folder), storage, 0)
        return trained(model), bits(model), answer(model)


@pytest.mark.parametrize("storage", ["nf4-double", "int8", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.thinned(5)
def test_a_training_has_the_bits_of_one_in_memory(
    tmp_path: Path, storage: StorageFormat, layout: str
) -> None:
    counts = LAYOUTS[layout]
    wanted, weights, logits = in_memory(storage)
    streamed = wrapped(tmp_path / "b", storage, 3, **counts)
    engine = engine_of(streamed)
    assert 2 <= len(on_disk(engine)) <= 3
    for group in on_disk(engine):
        held = group.memory.weight_bytes
        assert held["disk"] > group.weight_bytes / 2 and sum(held.values()) == group.weight_bytes
        assert group.memory.flat_weights is not None
        assert group.memory.flat_weights.nbytes <= max(1, held["host"])
    assert trained(streamed) == wanted
    assert same(bits(streamed), weights)
    assert torch.equal(answer(streamed), logits)
    assert engine.traffic().disk_read_bytes > 0
    if layout == "streamed":
        again = wrapped(tmp_path / "b", storage, 3, **counts)  # from the files that are there
        assert trained(again) == wanted


def test_what_is_in_a_slot_is_not_read_again_by_the_next_pass(tmp_path: Path) -> None:
    """Frozen weights stay in their slots when the pass turns, at the loss and at the step."""
    blocks, slots = 4, 3
    model = wrapped(tmp_path, "nf4", blocks, slots=slots)
    engine = engine_of(model)
    assert engine.plan.slots == slots and len(on_disk(engine)) == blocks
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids, read = torch.arange(48).view(2, 24), list[int]()
    for _ in range(4):
        before = engine.traffic().disk_read_bytes
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.flush()
        read.append(engine.traffic().disk_read_bytes - before)
    file_bytes = max(file.size_bytes for _, file in on_disk(engine)[0].memory.files)
    assert read[2:] == [2 * (blocks - slots) * file_bytes] * 2
    assert planned_reads(engine.plan, facts_of(adapted(llama()), "fp32", "nf4")) == read[-1]


def test_two_cards_read_their_blocks_from_disk(tmp_path: Path) -> None:
    wanted = trained(wrapped(tmp_path / "a", "nf4", 0))
    model = adapted(llama())
    cards = tuple(CardCapacity(index=at, free_bytes=1 << 30) for at in range(2))
    request = RunRequest(offload="weights", chunk_rows=2, resident_blocks=0, device_groups=0)
    capacity = CardsCapacity(cards=cards, host_available_bytes=None)
    plan = place(facts_of(model, "fp32", "nf4"), capacity, request, ParallelRequest(cards=2))
    rows = (replace(r, weights="disk") if r.kind == "block" else r for r in plan.groups)
    plan = replace(plan, groups=tuple(rows))
    how: dict[str, Any] = {"states": "fp32", "frozen": "nf4", "cards": range(2)}
    wrap_placed(model, "cpu", plan, keeping=partial(keeping, tmp_path / "b"), **how)
    assert trained(model) == wanted
    assert all(card.device.disk_read_bytes for card in engine_of(model).cards)


def test_weights_move_between_disk_device_and_host_and_back(tmp_path: Path) -> None:
    wanted = trained(wrapped(tmp_path / "a", "nf4", 0), steps=4)
    model = wrapped(tmp_path / "b", "nf4", 2)
    group, parameters = on_disk(engine_of(model))[0], model.parameters()
    tiers: Any = {"device": "device", "host": "host", "disk": "host"}
    rows = {t: replace(group.placement, weights=t, state=s, gradients=s) for t, s in tiers.items()}
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)
    random, losses = torch.Generator().manual_seed(5), []
    torch.manual_seed(9)
    for tier in ("disk", "host", "disk", "device"):
        engine_of(model).flush()
        prepare_move(group, rows[tier], pin=False)()
        assert group.is_on(tier)
        ids = torch.randint(0, 128, (4, 24), generator=random)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses == wanted


@pytest.mark.parametrize("storage", ["nf4", "plain"])
def test_unwrap_gives_what_memory_would_and_before_it_values_are_refused(
    tmp_path: Path, storage: StorageFormat
) -> None:
    model, other = wrapped(tmp_path, storage, 4), wrapped(tmp_path / "o", storage, 0)
    weight = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    with pytest.raises(MisusedModel, match="on disk"):
        weight.sum()
    whole = fluxtrain.unwrap(model).state_dict()
    expected = fluxtrain.unwrap(other).state_dict()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)


def test_dora_takes_its_magnitudes_from_the_file(tmp_path: Path) -> None:
    adapter: Any = {"adapter": {"use_dora": True, "init_lora_weights": True}}
    base = wrapped(tmp_path / "a", "nf4", 0, **adapter)
    assert same(bits(wrapped(tmp_path / "b", "nf4", 4, **adapter)), bits(base))


def test_a_file_damaged_while_it_trains_ends_the_run_and_is_made_anew(tmp_path: Path) -> None:
    model = wrapped(tmp_path, "nf4-double", 4)
    wanted = trained(model, steps=1)
    damaged(tmp_path / KEY)
    with pytest.raises(ReadFailed, match="not the bytes that were written"):
        trained(model, steps=2)
    assert trained(wrapped(tmp_path, "nf4-double", 4), steps=1) == wanted


def test_a_folder_that_takes_no_file_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(error: int) -> Any:
        def write(*_: Any) -> None:
            raise OSError(error, os.strerror(error))

        return write

    monkeypatch.setattr(PackedCache, "_write_to", refuse(28))
    with pytest.raises(NoSpace, match=r"No space left.*XDG_CACHE_HOME"):
        wrapped(tmp_path, "nf4", 2)
    monkeypatch.setattr(PackedCache, "_write_to", refuse(30))
    with pytest.raises(BadInput, match=r"Read-only.*XDG_CACHE_HOME"):
        wrapped(tmp_path, "plain", 2)
    model = adapted(llama())
    plan = placed(model, "nf4", 2)
    with pytest.raises(BadInput, match=r"model\.packed_cache"):
        wrap_placed(model, "cpu", plan, states="fp32", frozen="nf4")
