"""The parts of the trainer that decide, without torch: cadence, estimates, requests, lines."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.config.cadence import Cadence
from fluxtrain.errors import BadInput, DoesNotFit, Interrupted, NoSpace
from fluxtrain.events import events as ev
from fluxtrain.events.console import PlainConsole, line
from fluxtrain.files.opening import _too_large
from fluxtrain.machine.failures import as_told
from fluxtrain.train.observe.step_clock import RecentSteps
from fluxtrain.train.requests import Requests, Signals


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# --- cadence --------------------------------------------------------------------------------------


@given(every=st.integers(1, 50), total=st.integers(1, 200))
def test_a_fixed_cadence_is_due_at_its_multiples_and_at_the_end(every: int, total: int) -> None:
    cadence = Cadence(every=every, total_steps=total, share=0.1)
    due = [step for step in range(1, total + 1) if cadence.is_due(step)]
    assert due == sorted({*range(every, total + 1, every), total})


@pytest.mark.parametrize("cost_s", [0.0, 0.5, 5.0, 60.0])
def test_an_automatic_cadence_never_takes_more_than_its_share(cost_s: float) -> None:
    clock, spent_s, times = Clock(), 0.0, 0
    cadence = Cadence(every="auto", total_steps=1000, share=0.05, clock=clock)
    for step in range(1, 1000):
        clock.now_s += 1.0
        if cadence.is_due(step):
            clock.now_s += cost_s
            cadence.done(step, cost_s)
            spent_s, times = spent_s + cost_s, times + 1
    # the first time nothing is known of its cost
    assert spent_s - cost_s <= 0.05 * (clock.now_s - 100.0)
    if cost_s <= 5.0:
        assert times == 9


# --- the time that is left ------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=80), st.integers(1, 10_000))
def test_the_estimate_is_the_mean_of_recent_steps(times_s: list[float], remaining: int) -> None:
    progress = RecentSteps(recent_steps=50)
    for seconds in [1.0, *times_s]:
        progress.step_took(seconds)
    eta_s, spread_s = progress.eta(remaining)
    recent = times_s[-50:]
    assert eta_s == pytest.approx(remaining * sum(recent) / len(recent))
    assert spread_s is not None
    assert 0 <= spread_s <= remaining * (max(recent) - min(recent)) + 1e-6


# --- requests and signals -------------------------------------------------------------------------


def test_commands_are_answered_and_noted() -> None:
    requests = Requests()
    assert requests.handle("pause", {}) == (True, "pauses after this step")
    assert requests.paused
    assert requests.handle("pause", {}) == (True, "paused already")
    assert requests.handle("checkpoint", {})[0]
    assert requests.take_checkpoint()
    assert not requests.take_checkpoint()
    assert requests.handle("resume", {}) == (True, "resumes")
    assert not requests.paused
    ok, message = requests.handle("explode", {})
    assert not ok
    assert "pause, resume, checkpoint, stop" in message


def test_a_stop_wins_over_a_pause_and_refuses_what_comes_after() -> None:
    requests = Requests()
    requests.handle("pause", {})
    assert requests.handle("stop", {})[0]
    assert requests.stop_code == 143
    assert not requests.paused
    assert requests.handle("resume", {}) == (False, "the run is stopping already")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_between_steps_is_noted_and_outside_raises(
    number: signal.Signals, code: int
) -> None:
    before = signal.getsignal(number)
    requests, ended = Requests(), list[int]()
    with Signals(requests, str, exit_now=ended.append) as signals:
        signals.deferred = True
        signal.raise_signal(number)
        assert requests.stop_code == code
        signal.raise_signal(signal.SIGTERM)
        assert ended == []
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]
    assert signal.getsignal(number) is before
    with Signals(Requests(), str), pytest.raises(Interrupted) as caught:
        signal.raise_signal(number)
    assert caught.value.exit_code == code


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_of_a_scheduler_asks_for_a_checkpoint_and_ends_nothing(
    number: signal.Signals,
) -> None:
    with Signals(requests := Requests(), str):
        signal.raise_signal(number)
        assert requests.take_checkpoint() and not requests.take_checkpoint()
        assert requests.stop_code is None


def test_a_run_that_was_started_to_ignore_the_end_of_its_terminal_ignores_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(requests := Requests(), str):
            signal.raise_signal(signal.SIGHUP)
            assert requests.stop_code is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# --- what is printed ------------------------------------------------------------------------------


def step(number: int, total: int = 100) -> ev.StepFinished:
    return ev.StepFinished(
        step=number, total_steps=total, epoch=0.5, loss=1.25, learning_rate=1e-3, grad_norm=None,
        tokens=64, total_tokens=64, step_s=0.5, tokens_per_s=128.0, phases_s={}, stalls_s={},
        eta_s=61.0,
    )  # fmt: skip


def test_fast_steps_share_a_line_and_the_first_and_last_always_have_one() -> None:
    clock, lines = Clock(), list[str]()
    console = PlainConsole(lines.append, period_s=2.0, clock=clock)
    for number in range(1, 101):
        clock.now_s += 0.5
        console(step(number))
    shown = [int(text.split()[1].partition("/")[0]) for text in lines]
    assert shown[0] == 1
    assert shown[-1] == 100
    assert all(b - a >= 4 for a, b in pairwise(shown[:-1]))


def test_a_sample_tells_prompt_and_answer_apart() -> None:
    sample = ev.SampleGenerated(step=1, prompt='a | "b"\nQ: x ->', text=" c|d\n\n")
    assert line(sample) == r'''sample: "a | \"b\"\nQ: x ->" -> " c|d\n\n"'''


@pytest.mark.parametrize(
    "event",
    [
        ev.SampleGenerated(step=1, prompt="Return", text="\x1b]0;title\x07red \x1b[31m"),
        ev.LogWritten(level="warning", text="a file named \x1b[2J"),
        ev.CheckpointWritten(step=1, path="/runs/\x1b[31mred", bytes=1, seconds=1.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_no_line_steers_the_terminal(event: ev.Event) -> None:
    said = line(event)
    assert said is not None and "\x1b" not in said and "\N{REPLACEMENT CHARACTER}" in said


# --- failures and advice --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(28, "No space left on device"), NoSpace),
        (OSError(122, "Disk quota exceeded"), NoSpace),
        (MemoryError("Unable to allocate 3 GiB"), DoesNotFit),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), DoesNotFit),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), DoesNotFit),
        (RuntimeError("can't start new thread"), DoesNotFit),
        (RuntimeError("shape mismatch"), type(None)),
        (OSError(2, "No such file"), type(None)),
        (Exception("File too large (os error 27)"), NoSpace),
        (_too_large(Path("config.json"), 5), BadInput),
        (OSError(24, "Too many open files", "x"), DoesNotFit),
        (OSError(23, "Too many open files in system"), DoesNotFit),
        (RuntimeError("unable to open shared memory: Too many open files (24)"), DoesNotFit),
        (Exception("No such file or directory (os error 2)"), type(None)),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), BadInput),
        (KeyError("x"), type(None)),
    ],
)
def test_what_libraries_say_becomes_a_documented_exit_or_a_bug(
    error: Exception, kind: type
) -> None:
    assert type(as_told(error)) is kind
