"""Puts advice and changes into words: the predicted gain, the request, the measured gain."""

from __future__ import annotations

from fluxtrain.events.events import AdviceGiven
from fluxtrain.units import duration_text, speed_text
from fluxtui.panels.panel import gain_text, key_of
from fluxtui.state.changes import TriedChange, ranked
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, Span, fitted

SHOWN_FOR_STEPS = 20  # a verdict on the dashboard


def why_not(view: View) -> str:
    """Say why this run cannot be changed from here; "" if it can."""
    if view.read_only:
        return "this view is read-only"
    if view.link.replay:
        return "this is a recording"
    if view.status.ended:
        return f"the run has ended ({view.status.word.lower()})"
    return ""


def no_advice(view: View) -> str:
    """Say why no advice is shown, in a word or two."""
    if view.state.advised:
        return "none at the end" if view.status.ended else "none now"
    return "none was given" if view.status.ended else "none so far"


def promise(view: View, given: AdviceGiven) -> Line:
    """Return the predicted gain and the change, and say whether it can be made now."""
    gain = given.gain if given.gain_share is None else gain_text(given.gain_share)
    when: Span = (f"{key_of(view, 'apply_advice')} applies it", "key")
    if not given.apply:
        when = ("for the next run", "dim")
    elif why_not(view):
        when = ("while it trains", "dim")
    spans = ((gain, "good"), (given.how, "strong"), when)
    return tuple(part for text, role in spans if text for part in ((text, role), ("  ", "text")))


def trial_line(trial: TriedChange) -> Line:
    """Return a change and its outcome."""
    change = trial.change
    where = "" if change.card is None else f" on card {change.card}"
    head: Line = ((f"{change.name} {change.before} → {change.after}{where}  ", "strong"),)
    return (*head, _outcome(trial))


def _outcome(trial: TriedChange) -> Span:
    change, found, undone = trial.change, trial.measured, trial.undone
    if change.why == "memory":
        return f"device memory ran out after step {change.step}", "warn"
    if change.why == "host":
        return f"host memory was short after step {change.step}", "warn"
    if change.why == "room":
        return f"the memory was there again after step {change.step}", "good"
    gain = None if found is None else found.measured_gain
    told = "" if gain is None else speed_text(gain)
    if gain is not None and change.predicted_gain is not None:
        told += f", {gain_text(change.predicted_gain)} predicted"
    if undone is not None:
        wrong = "wrong: " if undone.why == "wrong" else ""
        return f"{wrong}{told or 'not measured'}, undone after step {undone.step}", "warn"
    if found is None:
        counting = f", measuring {trial.counted}/{trial.wanted}" if trial.wanted else ""
        return f"made after step {change.step}{counting}", "accent"
    if gain is None:
        return "too few steady steps to tell what it gave", "dim"
    times = f" ({duration_text(found.before_s)} → {duration_text(found.after_s)} a step)"
    return told + times, "good" if gain > 0 and found.verdict != "wrong" else "bad"


def asked_line(view: View) -> Line:
    """Return the change that waits for the end of the step or could not be made; else nothing."""
    changes = view.state.changes
    if changes.asked is not None:
        return (("asked: ", "dim"), (changes.asked.message, "accent"))
    if changes.refused is not None:
        refused = changes.refused
        return ((f"{refused.name}={refused.value} not made: {refused.because}", "warn"),)
    return ()


def headline(view: View, width: int) -> Line:
    """Return a line for the dashboard: the change under way, its verdict, or the best advice."""
    if view.status.kind not in ("running", "paused"):
        return ()
    found = asked_line(view) or _newest_trial(view) or _best(view)
    return fitted(((" ▲ ", "accent"), *found), width) if found else ()


def _newest_trial(view: View) -> Line:
    trial, step = view.state.changes.newest, view.state.step
    if trial is None or step is None:
        return ()
    ends = [one.step for one in (trial.measured, trial.undone, trial.change) if one is not None]
    counting = trial.measured is None and trial.undone is None and trial.change.why not in (
        "memory", "room", "host",
    )  # fmt: skip
    return trial_line(trial) if counting or step.step - max(ends) < SHOWN_FOR_STEPS else ()


def _best(view: View) -> Line:
    live = [given for given in ranked(view.state.advice) if given.apply]
    if not live:
        return ()
    return (*promise(view, live[0]), (live[0].text, "dim"))
