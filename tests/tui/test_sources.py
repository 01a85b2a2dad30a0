"""Where events come from: nothing there, garbage, a flood, a pipe, a restart, a recording."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from fluxtrain.events import events as ev
from fluxtrain.events.reader import PipeReader
from fluxtui.sources.followed_run import News, follow
from fluxtui.sources.journal import JournalSource
from fluxtui.sources.machine import MachineSampler
from fluxtui.sources.replay import ReplaySource
from fluxtui.sources.source import EventBatch
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link


def frame(event: ev.Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path, made: ModuleType) -> None:
    source = JournalSource(tmp_path / "run")
    assert list(source.poll().events) == []
    made.write(tmp_path / "run" / "events.ndjson", made.training(2))
    assert len(source.poll().events) == len(made.training(2))


def test_a_journal_is_followed_as_it_grows_and_a_torn_line_waits(
    tmp_path: Path, made: ModuleType
) -> None:
    events = made.training(3)
    journal = made.write(tmp_path / "events.ndjson", events[:5])
    source = JournalSource(tmp_path)
    assert len(source.poll().events) == 5
    whole = frame(events[5])
    with journal.open("ab") as file:
        file.write(whole[:20])
        file.flush()
        assert list(source.poll().events) == []
        file.write(whole[20:])
        file.flush()
        assert list(source.poll().events) == [events[5]]


def test_corrupt_lines_are_counted_and_skipped(tmp_path: Path, made: ModuleType) -> None:
    events = made.training(2)
    journal = tmp_path / "events.ndjson"
    garbage = b'\x00\xff not json\n{"event": "step"}\n' + b"x" * 9000 + b"\n"
    journal.write_bytes(frame(events[0]) + garbage + frame(events[1]))
    batch = JournalSource(tmp_path).poll()
    assert list(batch.events) == events[:2]
    assert batch.link.corrupt_lines == 3


def test_another_major_version_is_a_problem_and_no_exception(
    tmp_path: Path, made: ModuleType
) -> None:
    made.write(tmp_path / "events.ndjson", [made.hello(schema="2.0")])
    batch = JournalSource(tmp_path).poll()
    assert batch.link.problem is not None and "2.0" in batch.link.problem


def test_a_journal_that_starts_again_is_folded_from_the_start(
    tmp_path: Path, made: ModuleType
) -> None:
    journal = made.write(tmp_path / "events.ndjson", made.training(5))
    source = JournalSource(tmp_path)
    assert not source.poll().restarted
    made.write(journal, made.training(1))
    batch = source.poll()
    assert batch.restarted and len(batch.events) == len(made.training(1))


def test_samples_come_from_the_pipe_and_facts_from_the_journal(
    tmp_path: Path, made: ModuleType
) -> None:
    made.write(tmp_path / "events.ndjson", [made.hello(), made.memory(), made.step(1)])
    read_end, write_end = os.pipe()
    source = JournalSource(tmp_path, PipeReader(read_end))
    os.write(write_end, frame(made.step(1)) + frame(made.traffic(1)))
    batch = source.poll()
    kinds = [type(event).__name__ for event in batch.events]
    assert kinds == ["Hello", "StepFinished", "TrafficSampled"]
    assert batch.link.live
    os.close(write_end)
    source.poll()
    with (tmp_path / "events.ndjson").open("ab") as file:
        file.write(frame(made.memory()))
    batch = source.poll()
    assert [type(event).__name__ for event in batch.events] == ["MemorySampled"]
    assert not batch.link.live
    source.close()


def test_a_long_journal_is_read_in_bounded_pieces(tmp_path: Path, made: ModuleType) -> None:
    events = [made.traffic(i) for i in range(12_000)]
    made.write(tmp_path / "events.ndjson", events)
    source = JournalSource(tmp_path)
    sizes = []
    while True:
        batch = source.poll()
        sizes.append(len(batch.events))
        if not batch.more:
            break
    while left := source.poll().events:
        sizes.append(len(left))
    assert sum(sizes) == 12_000 and max(sizes) < 12_000


def test_the_last_words_of_a_run_that_never_began_are_found(tmp_path: Path) -> None:
    (tmp_path / "pid").write_bytes(
        msgspec.json.encode({"pid": 2**22 + 1, "start_s": 1.0, "host": os.uname().nodename})
    )
    (tmp_path / "events.ndjson").write_bytes(b"")
    (tmp_path / "engine.log").write_text("loading\nKilled by the kernel\n\n")
    link = JournalSource(tmp_path).poll().link
    assert link.process == "dead" and link.last_words == "Killed by the kernel"
    (tmp_path / "engine.log").write_text("step 98/400  loss 6.9219  lr 2.66e-3  2m 03s left\n")
    assert JournalSource(tmp_path).poll().link.last_words == ""  # progress is no cause of an end
    (tmp_path / "error.json").write_text('{"message": "the model folder is empty"}')
    assert JournalSource(tmp_path).poll().link.last_words == "the model folder is empty"


# --- replay ---------------------------------------------------------------------------------------


def test_a_replay_keeps_the_pace_of_the_run(tmp_path: Path, made: ModuleType) -> None:
    now = [0.0]
    events = made.training(10)  # a tenth of a second apart
    journal = made.write(tmp_path / "events.ndjson", events)
    source = ReplaySource(journal, speed=2.0, clock=lambda: now[0])
    assert len(source.poll().events) == 1
    now[0] = 1.0
    assert len(source.poll().events) == 20
    now[0] = 1e6
    rest = source.poll()
    assert source.over and len(rest.events) == len(events) - 21
    assert rest.link.replay and not source.controllable


def test_a_replay_can_be_shown_all_at_once_and_up_to_a_moment(
    tmp_path: Path, made: ModuleType
) -> None:
    journal = made.write(tmp_path / "events.ndjson", made.training(10))
    assert len(ReplaySource(journal, None).poll().events) == len(made.training(10))
    early = ReplaySource(journal, None, until_share=0.5).poll().events
    assert len(early) == pytest.approx(len(made.training(10)) / 2, abs=1)
    late = ReplaySource(journal, from_s=3.05, clock=lambda: 0.0).poll().events
    assert len(late) == 31


# --- the loop -------------------------------------------------------------------------------------


class Flood:
    """10,000 events a second and more, for as long as it is asked."""

    run_dir = None
    controllable = False

    def __init__(self, made: ModuleType) -> None:
        self._events = made.training(160)[:1000]
        self.polls = 0
        self.closed = False

    def poll(self) -> EventBatch:
        self.polls += 1
        return EventBatch(self._events, Link(process="alive"), more=self.polls % 10 != 0)

    def close(self) -> None:
        self.closed = True


def test_the_loop_folds_anew_when_the_journal_starts_again(made: ModuleType) -> None:
    stop = threading.Event()
    batches = [
        EventBatch(made.training(5), Link()),
        EventBatch(made.training(1), Link(), restarted=True),
    ]

    class Twice(Flood):
        def poll(self) -> EventBatch:
            return batches.pop(0) if batches else EventBatch((), Link())

    news: list[News] = []

    def say(one: News) -> None:
        news.append(one)
        if not batches:
            stop.set()

    follow(Twice(made), say, stop, lambda: 0.0)
    assert [one.state.step.step for one in news if one.state.step][:2] == [5, 1]
    assert isinstance(news[-1].state, FoldedRun)


# --- the machine ----------------------------------------------------------------------------------


def test_the_sampler_measures_this_machine_and_this_process() -> None:
    sampler = MachineSampler()
    sampler.sample(os.getpid())
    sample = sampler.sample(os.getpid())
    assert sample.cores >= 1 and sample.cpu is not None and 0 <= sample.cpu <= 1
    assert sample.memory_total_bytes and sample.memory_used_bytes
    assert sample.memory_used_bytes < sample.memory_total_bytes
    assert sample.trainer_rss_bytes and sample.trainer_rss_bytes > 1 << 20


def test_a_trainer_that_is_gone_has_no_numbers() -> None:
    sample = MachineSampler().sample(2**22 + 1)
    assert sample.trainer_rss_bytes is None and sample.trainer_cpu is None
