"""Optimizer states on disk: the bits of a training are those of one that has them in memory."""

from __future__ import annotations

import copy
import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.device import disk, spill
from fluxtrain.core.device.arena import HostArena
from fluxtrain.core.memory.states_on_disk import OnDisk, PieceFile
from fluxtrain.core.optimizer import optimizer_state
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.core.wrap.wrap import wrap_placed
from fluxtrain.errors import BadInput, DoesNotFit, MisusedModel, NoSpace, ReadFailed, ScratchLost
from fluxtrain.plan import states as state_formats
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.choose import place
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.group_placement import Kind, Tier
from fluxtrain.plan.request import ParallelRequest, RunRequest
from fluxtrain.plan.states import StateFormat
from fluxtrain.train.checkpoint.checkpoint import read_checkpoint, write_checkpoint
from fluxtrain.train.live.apply_placement import apply_placement
from tests.packed_models import adapted, llama
from tests.placements import placement_of, planned_reads

RECORD_BYTES = 64 << 10  # a matrix of the model takes more than one
LEAST = 100
ALSO: list[tuple[Kind, ...]] = [(), ("weights",), ("gradients", "weights")]
FORMATS = pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "RECORD_BYTES", RECORD_BYTES)
    for module in (spill, disk):
        monkeypatch.setattr(module, "BLOCK_BYTES", 8 << 10)
    monkeypatch.setattr(state_formats, "LEAST_LOW_BIT", LEAST)


def placed(
    model: nn.Module,
    states: StateFormat,
    folder: Path,
    away: int,
    also: Sequence[Kind] = (),
    **counts: Any,
) -> Any:
    """Return a placement with the states of `away` groups on disk; -1: of all. also: what else of
    the blocks among them."""
    facts = facts_of(model, states)
    layout = Layout(**{"offload": "weights", "chunk_rows": 2, **counts})
    made = placement_of(facts, layout, footprint(facts, layout, has_gpu=False))
    rows = [r if r.is_on("device") else replace(r, state="disk") for r in made.groups]
    stay = len(rows) if away < 0 else away
    rows = [*rows[:stay], *made.groups[stay:]]
    more: dict[str, Any] = dict.fromkeys(also, "disk")
    rows = [replace(r, **more) if r.state == "disk" and r.kind == "block" else r for r in rows]
    return replace(made, groups=tuple(rows), spill_folder=str(folder))


def wrapped(
    folder: Path,
    states: StateFormat = "fp32",
    away: int = -1,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: str = "cpu",
    **counts: Any,
) -> nn.Module:
    model: nn.Module = llama(64)
    model.to(dtype)
    return wrap_placed(
        model, device, placed(model, states, folder, away, **counts), states=states, frozen="plain"
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    kinds = [[p for p in model.parameters() if (p.dim() > 1) == big] for big in (True, False)]
    groups = [{"params": k, "weight_decay": d} for k, d in zip(kinds, (0.1, 0.0), strict=True)]
    return torch.optim.AdamW(groups, lr=2e-3)


def train(
    model: nn.Module, optimizer: Any, steps: range, passes: int = 1, norm: float | None = 0.3
) -> list[float]:
    losses = []
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for _ in range(passes):
            ids = torch.randint(0, 100, (4, 24), generator=random)
            ids = ids.to(engine_of(model).device.torch_device)
            loss = model(input_ids=ids, labels=ids).loss / passes
            if norm is None:
                engine_of(model).begin_step_in_backward(optimizer, loss)
            loss.backward()
            losses.append(float(loss.detach()))
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def shards(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole training state."""
    found = {}
    for name, tensors in engine_of(model).state_shards():
        for key, tensor in tensors.items():
            there = tensor.load() if isinstance(tensor, OnDisk) else tensor
            found[f"{name}/{key}"] = there.clone()
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def on_disk(model: nn.Module) -> Engine:
    engine = engine_of(model)
    assert any(group.is_on("disk", "state") for group in engine.groups)
    return engine


@FORMATS
@pytest.mark.parametrize("also", ALSO, ids=len)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.thinned(3)
def test_every_format_has_the_bits_of_memory(
    tmp_path: Path, states: StateFormat, dtype: torch.dtype, also: Sequence[Kind]
) -> None:
    models = [wrapped(tmp_path, states, away, dtype, also=also) for away in (0, -1)]
    losses = [train(model, adamw(model), range(3)) for model in models]
    assert losses[0] == losses[1]
    assert_same(*map(shards, models))
    engine = on_disk(models[1])
    taken = [r for g in engine.groups for s in g.trained if s.on_disk for r in s.on_disk.pieces]
    assert len(taken) > len(engine.groups)  # several pieces of a group
    assert engine.spill.written_bytes > 0 and engine.spill.read_bytes > 0
    assert not any(tmp_path.iterdir())  # the file has no name
    assert all(s.m is None and s.lo is None for g in engine.groups for s in g.trained)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"passes": 3}, marks=pytest.mark.slow),
        pytest.param({"norm": None}, marks=pytest.mark.slow),
        {"norm": None, "also": ALSO[1]},
        {"passes": 3, "also": ALSO[1]},
        pytest.param({"away": 3, "also": ALSO[2]}, marks=pytest.mark.slow),
        {"device_groups": 2, "also": ALSO[2]},
        pytest.param({"resident_blocks": 1, "also": ALSO[2]}, marks=pytest.mark.slow),
        {"deferred_moments": True, "also": ALSO[2]},
    ],
    ids=str,
)
def test_every_way_to_step_has_the_bits_of_memory(tmp_path: Path, how: dict[str, Any]) -> None:
    stepping = {key: how.pop(key) for key in ("passes", "norm") if key in how}
    away = how.pop("away", -1)
    models = [wrapped(tmp_path, "fp32", number, **how) for number in (0, away)]
    losses = [train(model, adamw(model), range(3), **stepping) for model in models]
    assert losses[0] == losses[1]
    assert_same(*map(shards, models))
    on_disk(models[1])


def test_two_cards_share_one_scratch_file(tmp_path: Path) -> None:
    model = llama(64)
    cards = tuple(CardCapacity(index=at, free_bytes=1 << 30) for at in range(2))
    capacity = CardsCapacity(cards=cards, host_available_bytes=None)
    request = RunRequest(offload="weights", chunk_rows=2, resident_blocks=0, device_groups=0)
    plan = place(facts_of(model, "fp32"), capacity, request, ParallelRequest(cards=2))
    models = []
    for away in (False, True):
        rows = [replace(r, state="disk") if away else r for r in plan.groups]
        made = replace(plan, groups=tuple(rows), spill_folder=str(tmp_path))
        one = wrap_placed(llama(64), "cpu", made, cards=range(2), states="fp32", frozen="plain")
        models.append(one)
    losses = [train(one, adamw(one), range(3)) for one in models]
    assert losses[0] == losses[1]
    assert_same(*map(shards, models))
    assert {group.placement.card for group in on_disk(models[1]).groups} == {0, 1}


def test_adapters_are_trained_with_their_states_on_disk(tmp_path: Path) -> None:
    models = []
    for away in (0, -1):
        model = adapted(llama(64))
        plan = placed(model, "fp32", tmp_path, away)
        models.append(wrap_placed(model, "cpu", plan, states="fp32", frozen="plain"))
    losses = [train(model, adamw(model), range(3)) for model in models]
    assert losses[0] == losses[1]
    assert_same(*map(shards, models))


@pytest.mark.parametrize("passes", [1, 3])
def test_trained_weights_are_read_as_often_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    read_block, read = PieceFile.read, list[int]()

    def counted(file: PieceFile, number: int, into: Tensor) -> None:
        read.append(min(disk.BLOCK_BYTES, file.size_bytes - number * disk.BLOCK_BYTES))
        read_block(file, number, into)

    monkeypatch.setattr(PieceFile, "read", counted)
    model = wrapped(tmp_path, also=("weights",), slots=3)
    optimizer, engine = adamw(model), on_disk(model)
    for step in range(4):
        read.clear()
        train(model, optimizer, range(step, step + 1), passes)
        engine.flush()
    engine.cards[0].window.drain()
    assert sum(read) == planned_reads(engine.plan, facts_of(llama(64), "fp32"), passes) > 0


@pytest.mark.parametrize(
    ("states", "first", "then"), [("fp32", 0, -1), ("bf16", -1, 0), ("8bit", -1, 2)]
)
@pytest.mark.thinned(2)
def test_shards_go_from_each_tier_to_each(
    tmp_path: Path, states: StateFormat, first: int, then: int
) -> None:
    wanted, half = (wrapped(tmp_path, states, first) for _ in range(2))
    losses = train(wanted, adamw(wanted), range(3))
    begun = train(half, adamw(half), range(2))
    written = write_checkpoint(tmp_path / "at", 2, engine_of(half).state_shards(), {})
    resumed = wrapped(tmp_path, states, then)
    for name, tensors in read_checkpoint(written.path).load_shards():
        engine_of(resumed).load_state_shard(name, tensors)
    assert begun + train(resumed, adamw(resumed), range(2, 3)) == losses
    assert_same(shards(resumed), shards(wanted))


@FORMATS
@pytest.mark.thinned(1)
def test_state_dicts_hold_what_is_on_disk(tmp_path: Path, states: StateFormat) -> None:
    models = [wrapped(tmp_path, states, away) for away in (0, -1)]
    optimizers = [adamw(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
    kept = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    held = [one["state"]["fluxtrain"] for one in kept]
    assert held[0].keys() == held[1].keys()
    for index, entry in held[0].items():
        for name, value in entry.items():
            assert not isinstance(held[1][index][name], OnDisk)
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(held[1][index][name]))
    losses = [train(*both, range(2, 4)) for both in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1]
    for model, optimizer, given in zip(models, optimizers, reversed(kept), strict=True):
        optimizer.load_state_dict(given)  # that of the other
        train(model, optimizer, range(4, 6))
    assert_same(*map(shards, models))
    for model in models:
        fluxtrain.unwrap(model)
    for model, optimizer in zip(models, optimizers, strict=True):
        ids = torch.arange(48).view(2, 24)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_what_does_not_fit_memory_is_refused_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    monkeypatch.setattr(optimizer_state, "memory_left", lambda: (1 << 30, 1 << 10))
    with pytest.raises(DoesNotFit, match="live on disk, and 1.00 KiB of host memory are left"):
        optimizer.state_dict()
    with pytest.raises(DoesNotFit, match="state_shards"):
        fluxtrain.unwrap(model)
    train(model, optimizer, range(1, 2))


def test_weights_written_by_others_begin_their_masters_anew(tmp_path: Path) -> None:
    models = [wrapped(tmp_path, "fp32", away) for away in (0, -1)]
    for model in models:
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        train(model, optimizer, range(2, 3))
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        del optimizer
        train(model, adamw(model), range(3, 4))  # its moments begin at zero
    assert_same(*map(shards, models))


def test_states_move_between_disk_host_and_device_and_back(tmp_path: Path) -> None:
    wanted, model = (wrapped(tmp_path, "8bit", away) for away in (0, -1))
    losses = train(wanted, adamw(wanted), range(5))
    optimizer, found, engine = adamw(model), list[float](), on_disk(model)
    size = None
    tiers: tuple[Tier, ...] = ("disk", "host", "disk", "device", "disk")
    for step, tier in enumerate(tiers):
        beside: Tier = "device" if tier == "device" else "host"
        rows = tuple(
            replace(g.placement, weights=beside, state=tier, gradients=beside)
            for g in engine.groups
        )
        apply_placement(engine, replace(engine.plan, groups=rows))
        found += train(model, optimizer, range(step, step + 1))
        size = size or engine.spill._room_bytes
        assert engine.spill._room_bytes == size  # room is used again
    assert found == losses
    assert_same(shards(model), shards(wanted))


def test_a_move_that_the_disk_has_no_room_for_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = (wrapped(tmp_path, away=0) for _ in range(2))
    optimizer, engine = adamw(model), engine_of(model)
    losses = train(model, optimizer, range(1))
    real, most = os.posix_fallocate, [400 << 10]  # a part of them

    def allocate(file: int, start: int, size_bytes: int) -> None:
        if start + size_bytes > most[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, start, size_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    rows = tuple(replace(g.placement, state="disk") for g in engine.groups)
    there = replace(engine.plan, groups=rows)
    with pytest.raises(DoesNotFit, match="of optimizer states are to live in"):
        apply_placement(engine, there)
    assert os.fstat(engine.spill._fd).st_size <= 4096, "one page tells of direct I/O"
    losses += train(model, optimizer, range(1, 2))
    most[0] = 1 << 30
    apply_placement(engine, there)
    losses += train(model, optimizer, range(2, 3))
    assert losses == train(wanted, adamw(wanted), range(3))


def test_weights_and_gradients_on_disk_are_values_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [wrapped(tmp_path, "8bit", away, also=ALSO[2]) for away in (0, -1)]
    for model in models:
        train(model, adamw(model), range(2))
    held, there = (model.state_dict() for model in models)
    assert all(torch.equal(value, there[name]) for name, value in held.items())
    assert not any(tmp_path.iterdir())
    ids = torch.arange(48).view(2, 24)
    norms = []
    for model in models:
        model(input_ids=ids, labels=ids).loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
    assert norms[0] == norms[1]
    weight = models[1].get_submodule("model.layers.0.mlp.up_proj").weight
    again = models[1](input_ids=ids, labels=ids).loss
    with pytest.raises(MisusedModel, match="live on disk, which takes one backward pass"):
        again.backward()
    with pytest.raises(MisusedModel, match="lives on disk"):
        weight.grad.sum()
    with pytest.raises(MisusedModel, match="or on disk"), torch.no_grad():
        weight.mul_(2.0)
    models[1].zero_grad()
    with monkeypatch.context() as patched:
        patched.setattr(optimizer_state, "memory_left", lambda: (1 << 30, 1 << 10))
        with pytest.raises(DoesNotFit, match="of weights live on disk"):
            fluxtrain.unwrap(models[1])
    plain = [dict(fluxtrain.unwrap(model).named_parameters()) for model in models]
    for name, parameter in plain[0].items():
        assert torch.equal(parameter, plain[1][name])


def test_an_error_while_gradients_are_stored_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(tmp_path, also=ALSO[2])
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    shards(model)  # nothing is written any more

    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", fails)
    with pytest.raises(NoSpace):
        train(model, optimizer, range(1, 2))
        engine_of(model).flush()


def test_a_flipped_bit_is_read_again_and_then_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = wrapped(tmp_path), wrapped(tmp_path, away=0)
    optimizer = adamw(model)
    losses = train(model, optimizer, range(2))
    real, wrong = spill.Spill._try_read, [1]

    def once(self: spill.Spill, at: int, into: Tensor, wanted: int) -> str:
        return real(self, at, into, wanted ^ (wrong.pop() if wrong else 0))

    engine = on_disk(model)
    shards(model)  # nothing is written any more
    monkeypatch.setattr(spill.Spill, "_try_read", once)
    losses += train(model, optimizer, range(2, 3))
    engine.flush()
    assert engine.spill.mended == 1
    assert losses == train(other, adamw(other), range(3))
    shards(model)
    page = HostArena(4096, pin=False).tensor(torch.uint8, 4096, 0)
    os.pwritev(engine.spill._fd, [page.numpy().data], 8192)
    with pytest.raises(ReadFailed, match="not the bytes that were written, also when"):
        train(model, optimizer, range(3, 4))
        engine.flush()
    with pytest.raises(ReadFailed):  # nobody takes a mixture of two steps for a state
        shards(model)


@pytest.mark.parametrize(
    ("way", "code", "kind"),
    [
        ("preadv", errno.EIO, ReadFailed),
        ("pwritev", errno.EIO, ReadFailed),
        ("pwritev", errno.ENOSPC, ScratchLost),  # where each write takes new room
    ],
)
def test_errors_of_the_disk_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, code: int, kind: type[Exception]
) -> None:
    model = wrapped(tmp_path)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    shards(model)  # nothing is written any more

    def fails(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, way, fails)
    with pytest.raises(kind, match=rf"{os.strerror(code)}.*--resume auto"):
        train(model, optimizer, range(1, 3))
        engine_of(model).flush()
    monkeypatch.undo()
    with pytest.raises(kind):
        shards(model)


def test_folders_that_cannot_hold_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file.*placement.disk_path"):
        wrapped(tmp_path / "away")
    with pytest.raises(BadInput, match="in memory itself"):
        wrapped(Path("/dev/shm"))
    with pytest.raises(DoesNotFit, match="are to live in .* is free there"):
        spill.Spill(tmp_path).make_room(1 << 50)
    model = llama(64)
    for kind in ("gradients", "weights"):
        rows = placed(model, "fp32", tmp_path, 0)
        rows = replace(rows, groups=tuple(replace(r, **{kind: "disk"}) for r in rows.groups))
        with pytest.raises(BadInput, match=f"{kind} cannot live on disk"):
            wrap_placed(model, "cpu", rows, states="fp32", frozen="plain")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[int], tuple[Path, Path]]]:
    """`mounted(size_bytes)`: a file system of its own, and the file that it lives in."""
    image, place = tmp_path / "image", tmp_path / "mounted"
    place.mkdir()

    def make(size_bytes: int) -> tuple[Path, Path]:
        image.touch()
        os.truncate(image, size_bytes)
        commands = (
            ["mkfs.ext4", "-q", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(place)],
        )
        for command in commands:
            if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("no file system can be mounted here")
        return place, image

    yield make
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_refused_before_the_first_step(
    mounted: Callable[[int], tuple[Path, Path]],
) -> None:
    place, _ = mounted(1 << 20)
    free = os.statvfs(place).f_bfree
    with pytest.raises(
        DoesNotFit, match=r"MiB of optimizer states are to live in .* is free there"
    ):
        wrapped(place)
    assert os.statvfs(place).f_bfree == free
    model = wrapped(place, away=2)  # what fits is trained there
    wanted = wrapped(place.parent, away=0)
    losses = [train(one, adamw(one), range(2)) for one in (model, wanted)]
    assert losses[0] == losses[1]


def test_a_disk_that_loses_what_it_holds_ends_the_training(
    mounted: Callable[[int], tuple[Path, Path]],
) -> None:
    place, image = mounted(16 << 20)
    model = wrapped(place)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    shards(model)
    os.truncate(image, 256 << 10)
    with pytest.raises(ReadFailed, match=r"optimizer states in .*--resume auto"):
        train(model, optimizer, range(1, 3))
        engine_of(model).flush()
