"""What `plan` says is what `train` does; gauges and clocks tell what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fluxtrain.commands.preview import preview, table
from fluxtrain.config.schema import demo_config, load_config, settings
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.events import events as ev
from fluxtrain.events.answers.machine import Rate
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.journal import read_events
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.observe.gauges import GaugeThread, bus_ceilings
from fluxtrain.train.run import train

MakeConfig = Callable[..., Path]


# --- the plan -------------------------------------------------------------------------------------


def test_the_plan_names_every_setting_and_gives_every_choice_a_reason() -> None:
    config = demo_config()
    plan = preview(config)
    assert [s.key for s in plan.settings] == [s.key for s in settings(config)]
    names = {choice.name for choice in plan.choices}
    assert {"placement.offload", "train.batch_rows", "placement.chunk_rows"} <= names
    assert names <= {setting.key for setting in settings(config)}, "what a user can write"
    assert all(choice.because for choice in plan.choices)
    assert plan.steps == 400
    short = table(plan)
    assert len(short.splitlines()) < 20 and "--all" in short and "train.seed" not in short
    text = table(plan, whole=True)
    for setting in settings(config):
        assert setting.key in text
        assert setting.description in text
    assert "* train.steps" in text
    assert "  train.seed" in text


def test_cards_of_a_machine_without_a_gpu_are_told_to_be_none() -> None:
    two = table(preview(demo_config(["parallel.cards=2", "placement.device=cpu"])))
    assert "card 1: " in two and "there is no GPU: these cards are parts of the CPU" in two


def test_the_plan_of_a_run_is_what_was_shown_before(run_config: MakeConfig, tmp_path: Path) -> None:
    path = run_config(train__batch_rows="auto", train__steps=2)
    config = load_config(path)
    shown = preview(config)
    train(config, locate(None, tmp_path / "run", config))
    planned = next(e for e in read_events(tmp_path / "run" / "events.ndjson")
                   if isinstance(e, ev.Planned))  # fmt: skip
    for name in ("offload", "resident_blocks", "device_groups"):
        assert getattr(planned, name) == getattr(shown.layout, name)
    assert planned.sequence_length == shown.sequence_length
    assert planned.accumulation == shown.accumulation
    # the data was only glanced at, so the batch may differ by a power of two
    assert planned.batch_rows / shown.layout.batch_rows in (0.5, 1, 2)
    hello = [e for e in read_events(tmp_path / "run" / "events.ndjson")
             if isinstance(e, ev.Hello)][-1]  # fmt: skip
    assert hello.parameters == shown.model.parameters
    assert hello.blocks == shown.model.blocks
    assert hello.dtype == shown.model.dtype


def short_texts(path: Path, count: int) -> Path:
    """Texts of which two do not fit into a row of 32 tokens, or just so."""
    texts = [
        {"text": f"{number}: " + "a line of words " * (1 + number % 3)} for number in range(count)
    ]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("apart", [False, True], ids=["held_out", "held_out_path"])
def test_the_plan_counts_rows_and_steps_by_the_packing_of_the_run(
    run_config: MakeConfig, tmp_path: Path, apart: bool
) -> None:
    data = {"data__path": str(short_texts(tmp_path / "short.jsonl", 100))}
    data |= {"data__held_out_path": str(short_texts(tmp_path / "held.jsonl", 9))} if apart else {}
    settings = {"data__sequence_length": 32, "data__held_out": 0.1, "train__epochs": 2} | data
    shown = preview(
        config := load_config(run_config(train__batch_rows=20, train__steps=None, **settings))
    )
    train(config, locate(None, tmp_path / "run", config))
    events = read_events(tmp_path / "run" / "events.ndjson")
    hello = [e for e in events if isinstance(e, ev.Hello)][-1]
    assert not shown.rows_estimated
    assert shown.steps == hello.total_steps
    text = load_config(run_config(train__batch_rows=shown.estimated_rows + 1, **settings))
    with pytest.raises(BadInput) as planned:
        preview(text)
    with pytest.raises(BadInput) as run:
        train(text, locate(None, tmp_path / "refused", text))
    assert str(planned.value) == str(run.value)


def test_predicted_times_follow_a_run_that_took_far_longer(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load_config(run_config(train__batch_rows=2, train__steps=2))
    assert preview(config).timing == "assumed"
    assert " to " in table(preview(config)).split(" a step")[0].rsplit("; ", 1)[1]
    monkeypatch.setattr("fluxtrain.train.run.steady_step_s", lambda steps: 100.0)
    train(config, locate(None, tmp_path / "slow", config))
    slow = preview(config)
    assert slow.timing == "measured"
    assert slow.predicted is not None
    assert slow.predicted.step_s == pytest.approx(100.0, rel=0.5)
    assert "follow the last run" in slow.predicted_because
    train(config, locate(None, tmp_path / "slow2", config))
    again = preview(config).predicted
    assert again is not None
    assert again.step_s == pytest.approx(100.0, rel=0.5), "a run as predicted corrects nothing"
    monkeypatch.setattr("fluxtrain.train.run.steady_step_s", lambda steps: 0.5)
    train(config, locate(None, tmp_path / "fast", config))
    fast = preview(config).predicted
    assert fast is not None
    assert fast.step_s == pytest.approx(0.5, rel=0.5)


def test_the_plan_reads_no_weights(run_config: MakeConfig, tmp_path: Path) -> None:
    path = run_config()
    weights = tmp_path / "llama-float32" / "model.safetensors"
    header_bytes = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    kept = weights.read_bytes()
    weights.write_bytes(kept[:header_bytes] + b"\xff" * (len(kept) - header_bytes))  # all NaN
    assert preview(load_config(path)).model.parameters > 10_000


def test_the_plan_refuses_as_the_run_would(run_config: MakeConfig) -> None:
    with pytest.raises(DoesNotFit):
        preview(load_config(run_config(placement__budget_gib=1e-5)))
    with pytest.raises(BadInput, match="batch_rows"):
        preview(load_config(run_config(train__batch_rows=100_000)))
    with pytest.raises(BadInput, match="knows 512 positions"):
        preview(demo_config(["data.sequence_length=1024"]))
    with pytest.raises(BadInput, match="does not exist"):
        preview(load_config(run_config(data__path="/nowhere.txt")))
    for path in ("/nowhere", "./nowhere", "~/nowhere"):
        with pytest.raises(BadInput, match="nowhere does not exist: check model.path"):
            preview(load_config(run_config(model__path=path)))


# --- gauges ---------------------------------------------------------------------------------------


class Kept:
    """An emitter that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)


class FakeEngine:
    """Counters as an engine has them."""

    h2d_bytes, card_count = 0, 1
    device = SimpleNamespace(torch_device=torch.device("cuda"))

    def traffic(self) -> Any:
        return SimpleNamespace(
            h2d_bytes=self.h2d_bytes, d2h_bytes=5, h2d_frozen_bytes=40, h2d_packed_bytes=30,
            disk_read_bytes=0, disk_written_bytes=0, cards=((self.h2d_bytes, 5, 2), (0, 0, 7)),
        )  # fmt: skip

    def fails(self, *_: object) -> Any:
        raise RuntimeError("it is gone")

    memory = residency = take_moves = fails


def test_traffic_has_rates_and_ceilings_whatever_other_gauges_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bus_ceilings() == (None, None)
    rates = {"h2d_pinned": Rate(5e10, "256 MiB"), "d2h_pinned": Rate(None, "no GPU")}
    monkeypatch.setattr("fluxtrain.train.observe.gauges.known_rates", lambda _: rates)
    kept: Any = Kept()
    thread = GaugeThread(Announcer(kept, lambda _: None), live=True, host_limit_bytes=1 << 30)
    thread.sample()
    assert [type(event) for event in kept.events] == [ev.Heartbeat, ev.MemorySampled]
    assert kept.events[1].device_used_bytes is None and kept.events[1].host_rss_bytes > 1 << 20
    engine: Any = FakeEngine()
    thread.watch(engine, SimpleNamespace(read_bytes=0, written_bytes=70))
    for engine.h2d_bytes, more in ((1000, 1000), (1500, 500)):
        thread.sample()
        traffic = [event for event in kept.events if isinstance(event, ev.TrafficSampled)][-1]
        assert (traffic.h2d_bytes, traffic.disk_written_bytes) == (engine.h2d_bytes, 70)
        assert traffic.h2d_bytes_per_s == pytest.approx(more / traffic.window_s)
        assert [card.landed_bytes for card in traffic.cards] == [2, 7]
    left_out = [event.text for event in kept.events if isinstance(event, ev.LogWritten)]
    assert len(left_out) == 3, "gauges that fail are told once, and cost no other one"
    assert traffic.disk_written_bytes_per_s == 0
    assert traffic.h2d_ceiling_bytes_per_s == 5e10 and traffic.d2h_ceiling_bytes_per_s is None
