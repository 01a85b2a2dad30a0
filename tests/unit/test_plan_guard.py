"""The guard: what a run writes and holds beyond its steps, refused with what would fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from fluxtrain.errors import EXIT_DOES_NOT_FIT, BadInput, DoesNotFit
from fluxtrain.plan.facts import GroupFacts, ModelFacts
from fluxtrain.plan.footprint import Layout, saving_bytes
from fluxtrain.plan.guard import (
    JOURNAL_BYTES,
    STEP_BYTES,
    UNKNOWN_DISK,
    DiskCapacity,
    DiskNeed,
    HostNeed,
    disk_need,
    loading_bytes,
    refuse_disk,
    refuse_host,
)
from fluxtrain.plan.machine_file import read_machine_file
from fluxtrain.units import GIB, MIB

NEED = DiskNeed(checkpoint_bytes=6 * GIB, kept=3, model_bytes=GIB, parameters=1_000_000_000)
NO_FILES = DiskNeed(checkpoint_bytes=0, kept=1, journal_bytes=0)


def room(free_bytes: int | None, **fields: object) -> DiskCapacity:
    return replace(DiskCapacity(path="/runs", free_bytes=free_bytes), **fields)  # type: ignore[arg-type]


def refusal(need: DiskNeed, free: DiskCapacity) -> str:
    with pytest.raises(DoesNotFit) as raised:
        refuse_disk(need, free)
    assert raised.value.exit_code == EXIT_DOES_NOT_FIT
    return str(raised.value)


# --- the disk -------------------------------------------------------------------------------------


def test_a_checkpoint_is_weights_and_states_and_one_is_written_beside_the_kept_ones() -> None:
    group = GroupFacts(name="b", kind="block", weight_bytes=2 * 1000, trained_bf16=1000)
    facts = ModelFacts(groups=(group, group), loose_bytes=500)
    need = disk_need(facts, model_bytes=facts.weight_bytes, kept=2, written=100, steps=50)
    assert need.checkpoint_bytes == 2 * 12 * 1000 + 500
    assert need.model_bytes == 2 * 2 * 1000 + 500
    assert need.journal_bytes == JOURNAL_BYTES + 50 * STEP_BYTES
    assert need.total_bytes == 3 * need.checkpoint_bytes + need.model_bytes + need.journal_bytes


def test_a_run_that_writes_few_checkpoints_needs_no_room_for_more() -> None:
    assert replace(NEED, written=1).copies == 1
    assert replace(NEED, written=3).copies == 3
    assert replace(NEED, written=30).copies == 4


def test_room_to_the_byte_is_enough_and_one_less_is_not() -> None:
    refuse_disk(NEED, room(NEED.total_bytes))
    refuse_disk(NEED, room(None))
    refuse_disk(NEED, UNKNOWN_DISK)
    refusal(NEED, room(NEED.total_bytes - 1))


def test_what_the_run_has_there_already_is_replaced_and_counts_as_room() -> None:
    refuse_disk(NEED, room(NEED.total_bytes - 12 * GIB, held_bytes=12 * GIB))
    assert "beside 12.0 GiB of this run" in refusal(
        NEED, room(NEED.total_bytes - 13 * GIB, held_bytes=12 * GIB)
    )


def test_the_refusal_has_the_numbers_and_the_most_checkpoints_that_would_fit() -> None:
    text = refusal(NEED, room(20 * GIB, kind="ext4"))
    assert text == (
        "the run does not fit its disk: 4 checkpoints of 6.00 GiB (3 kept, one being written), the "
        "model of 1.00 GiB and a journal of 8.00 MiB need 25.0 GiB, and 20.0 GiB is free in /runs "
        "(ext4): train.keep_checkpoints=2 fits with 19.0 GiB; or free 5.01 GiB; or choose another "
        "disk with --run-dir; or choose a model of about 800 M parameters"
    )


@pytest.mark.parametrize("free_gib", [7.5, 12.9])
def test_where_no_second_checkpoint_fits_the_last_one_alone_is_offered(free_gib: float) -> None:
    text = refusal(NEED, room(int(free_gib * GIB)))
    assert "train.checkpoint_every=end fits with 7.01 GiB" in text
    assert "keep_checkpoints" not in text


def test_every_setting_that_is_offered_fits() -> None:
    for free in range(0, 25 * GIB, GIB // 2):
        text = refusal(NEED, room(free))
        if "train.keep_checkpoints=" in text:
            kept = int(text.partition("train.keep_checkpoints=")[2].partition(" ")[0])
            refuse_disk(replace(NEED, kept=kept), room(free))
            if kept + 1 < NEED.kept:
                refusal(replace(NEED, kept=kept + 1), room(free))
        if "train.checkpoint_every=end" in text:
            refuse_disk(replace(NEED, written=1), room(free))
            refusal(replace(NEED, kept=1), room(free))


@pytest.mark.timeout(10)
def test_a_wish_for_endless_checkpoints_is_answered_with_how_many_fit() -> None:
    text = refusal(replace(NEED, kept=9 * 10**18), room(100 * GIB))
    assert "train.keep_checkpoints=15 fits with 97.0 GiB" in text
    without = refusal(replace(NEED, kept=9 * 10**18, checkpoint_bytes=0), room(GIB // 2))
    assert "keep_checkpoints" not in without


# --- host memory ----------------------------------------------------------------------------------


def test_weights_that_are_saved_count_beside_what_is_at_home() -> None:
    need = HostNeed(lasting_bytes=10 * GIB, saving_bytes=4 * GIB, parameters=1_000_000_000)
    refuse_host(need, 14 * GIB, NO_FILES, UNKNOWN_DISK)
    refuse_host(need, None, NO_FILES, UNKNOWN_DISK)
    with pytest.raises(DoesNotFit) as raised:
        refuse_host(need, 12 * GIB, NO_FILES, UNKNOWN_DISK)
    assert str(raised.value) == (
        "the run does not fit host memory: weights, states, gradients and activations 10.0 GiB, "
        "weights while they are saved 4.00 GiB need 14.0 GiB, and 12.0 GiB is "
        "available: free 2.00 GiB; or choose a model of about 857 M parameters"
    )


def test_copies_of_loading_are_gone_before_states_come_and_do_not_add_to_them() -> None:
    need = HostNeed(lasting_bytes=10 * GIB, loading_bytes=11 * GIB, saving_bytes=2 * GIB)
    assert need.total_bytes == 12 * GIB
    refuse_host(need, 12 * GIB, NO_FILES, UNKNOWN_DISK)
    with pytest.raises(DoesNotFit, match="are saved 2.00 GiB need 12.0 GiB"):
        refuse_host(need, 12 * GIB - 1, NO_FILES, UNKNOWN_DISK)


def test_copies_of_loading_alone_can_be_too_much_and_files_that_need_none_are_the_cure() -> None:
    need = HostNeed(lasting_bytes=GIB, loading_bytes=16 * GIB, parameters=8_000_000_000)
    with pytest.raises(DoesNotFit) as raised:
        refuse_host(need, 8 * GIB, NO_FILES, UNKNOWN_DISK)
    assert raised.value.exit_code == EXIT_DOES_NOT_FIT
    assert str(raised.value) == (
        "the run does not fit host memory: weights that loading copies (converted, merged or "
        "pickled) need 16.0 GiB, and 8.00 GiB is available: store them as safetensors in the dtype "
        "of the training first, which fits; or free 8.00 GiB; or choose a model of about 4.00 B "
        "parameters"
    )
    with pytest.raises(DoesNotFit) as raised:
        refuse_host(replace(need, lasting_bytes=9 * GIB), 8 * GIB, NO_FILES, UNKNOWN_DISK)
    assert "store them" not in str(raised.value), "what trains does not fit either"


def test_loading_counts_copies_their_sources_or_arenas_and_one_group_twice() -> None:
    def group(name: str, elements: int) -> GroupFacts:
        kind: Literal["block", "edge"] = "edge" if name == "embedding" else "block"
        return GroupFacts(name=name, kind=kind, weight_bytes=2 * elements, trained_bf16=elements)

    facts = ModelFacts(groups=(group("embedding", 500), group("a", 100), group("b", 100)))
    on_device, at_home = (Layout(offload=offload) for offload in ("none", "weights"))
    for layout in (on_device, at_home):
        assert loading_bytes(facts, layout, copied_bytes=0) == 0, "pages of files take none"
        assert loading_bytes(facts, layout, copied_bytes=1400) == 1400 + 1000
        sources = loading_bytes(facts, layout, copied_bytes=1400, sources_bytes=300)
        assert sources == 1400 + 300 + 1000
    assert loading_bytes(facts, on_device, copied_bytes=400) == 400 + 1000
    assert loading_bytes(facts, at_home, copied_bytes=400) == 400 + 1000 + 1000


def test_a_model_on_the_device_comes_to_the_host_weight_by_weight() -> None:
    def model(count: int, gigabytes: float) -> ModelFacts:
        size = int(gigabytes * 1e9)
        block = GroupFacts(name="b", kind="block", weight_bytes=size, trained_bf16=size // 2)
        return ModelFacts(groups=(block,) * count, loose_bytes=1000)

    on_device = Layout(offload="none")
    assert saving_bytes(model(1, 0.5), on_device) == 500_001_000
    assert saving_bytes(model(30, 0.5), on_device) == 1_000_000_000
    at_home = Layout(offload="weights", device_groups=0)
    assert saving_bytes(model(30, 0.5), at_home) == 1000, "what is on the host is there already"


def test_files_on_a_ram_disk_take_host_memory() -> None:
    need = HostNeed(lasting_bytes=10 * GIB)
    ram = room(64 * GIB, in_memory=True, kind="tmpfs")
    refuse_host(need, 30 * GIB, NEED, room(64 * GIB))
    refuse_host(need, 36 * GIB, NEED, ram)
    with pytest.raises(DoesNotFit, match=r"files in /runs \(tmpfs\) 25.0 GiB.*--run-dir on a disk"):
        refuse_host(need, 30 * GIB, NEED, ram)
    refuse_host(need, 30 * GIB, NEED, replace(ram, held_bytes=6 * GIB))


# --- another machine's disk -----------------------------------------------------------------------


def test_a_machine_file_may_tell_its_disk(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    machine = {"machine": {"memory_total_bytes": 64 * GIB, "gpus": []}}
    path.write_text(json.dumps(machine))
    assert read_machine_file(path).disk == UNKNOWN_DISK
    path.write_text(json.dumps({**machine, "disk": {"free_bytes": 2 * MIB, "in_memory": True}}))
    disk = read_machine_file(path).disk
    assert (disk.free_bytes, disk.in_memory) == (2 * MIB, True)
    assert "other.json" in disk.path
    path.write_text(json.dumps({**machine, "disk": {"free_bytes": "much"}}))
    with pytest.raises(BadInput, match="'much'"):
        read_machine_file(path)


@pytest.mark.parametrize("size", [0, -1, 2**62, float("nan"), "64 GB"])
def test_a_machine_file_with_an_impossible_size_is_refused_by_its_key(
    size: object, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    sizes = {"memory_available_bytes": size, "memory_total_bytes": 64 * GIB}
    path.write_text(json.dumps({"machine": {**sizes, "gpus": []}}))
    with pytest.raises(BadInput, match=f"memory_available_bytes is {size!r}: write its bytes"):
        read_machine_file(path)
