"""The header, the notice below it, and the one line of a terminal that is too small."""

from __future__ import annotations

from fluxtrain.events.events import Hello
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.units import count_text, loss_text
from fluxtui.panels.panel import key_of, whole_text
from fluxtui.panels.progress import fitting_eta
from fluxtui.panels.trials import why_not
from fluxtui.state.status import Status
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, Span, cut, dropped_to_fit, joined, spread, width_of, wrapped
from fluxtui.words import counted

NOTICE_ROWS = 3
WIDE = 110  # columns in which a line about adapters has room
COMMAND_ROWS = 6  # a cut command cannot be typed
WAITS_FOR_ROOM = "NO SPACE"  # a running run whose disk is full
STATUS_MARKS: dict[str, Span] = {
    "waiting": ("◌", "dim"),
    "running": ("●", "good"),
    "paused": ("‖", "warn"),
    "stalled": ("!", "warn"),
    "dead": ("✗", "bad"),
    "cut": ("■", "warn"),
    "failed": ("✗", "bad"),
    "stopped": ("■", "warn"),
    "finished": ("✓", "good"),
    "unreadable": ("?", "bad"),
}


def badge(status: Status) -> Line:
    """Return mark and word of the status."""
    mark, role = STATUS_MARKS["stalled" if status.word == WAITS_FOR_ROOM else status.kind]
    return ((f"{mark} ", role), (status.word, role))


def header_line(view: View, width: int) -> Line:
    """Return the header: the run, its model, its machine and its status."""
    hello, status = view.state.hello, view.status
    name: Line = ((" FluxTrain", "accent"),)
    right: Line = (*badge(status), (" ", "text"))
    if view.link.replay:
        right = (("REPLAY  ", "warn"), *right)
    if view.read_only:
        right = (("READ-ONLY  ", "warn"), *right)
    parts: list[Line] = [name]
    if hello is not None:
        parts += [
            ((hello.run_id, "strong"),),
            ((hello.model, "text"), *_size(hello.parameters)),
            ((method_text(hello, whole=width >= WIDE), "dim"),),
            ((f"on {view.devices}", "dim"),),
        ]
    elif view.link.run_dir is not None:
        parts.append(((view.link.run_dir.name, "strong"),))
    else:
        parts.append((("no run attached", "dim"),))
    notes = link_notes(view)
    room = width - width_of(right) - 2
    left = dropped_to_fit(parts, room)
    extra = dropped_to_fit(notes, room - width_of(left) - 3)
    return spread(left, joined([extra, right]), width)


def method_text(hello: Hello, *, whole: bool) -> str:
    """Say what is trained: `full bfloat16`, or `qlora nf4-double`, and if there is room for the
    `whole` text also `, rank 16, 207 M of 70.8 B trained`."""
    stored = hello.dtype if hello.storage == "plain" else hello.storage
    if hello.rank is None or not whole:
        return f"{hello.method} {stored}"
    words = [f"{hello.method} {stored}", f"rank {hello.rank}"]
    if hello.trained_parameters:
        trained, every = map(count_text, (hello.trained_parameters, hello.parameters))
        words.append(f"{trained} of {every} trained")
    return ", ".join(words)


def _size(parameters: int) -> Line:
    """Write the model's number of parameters, once the trainer has reported it."""
    return ((f" {count_text(parameters)}", "dim"),) if parameters else ()


def link_notes(view: View) -> list[Line]:
    """Return notes about how the events arrive."""
    notes: list[Line] = []
    if view.link.corrupt_lines:
        notes.append(((counted(view.link.corrupt_lines, "corrupt line"), "warn"),))
    if view.state.dropped:
        notes.append(((f"{counted(view.state.dropped, 'event')} not drawn", "dim"),))
    started = view.state.started_wall_s
    if started is not None and not view.status.ended:
        notes.append(((f"up {whole_text(max(0.0, view.now_s - started))}", "dim"),))
    return notes


def status_line(view: View, width: int) -> Line:
    """Draw the one line of a terminal that is too small for panels, with `quit` where it fits."""
    step = view.state.step
    parts: list[Line] = [badge(view.status)]
    if step is not None:
        parts.append(((f"{step.step}/{step.total_steps}", "strong"),))
        parts.append((("loss ", "dim"), (loss_text(step.loss), "strong")))
        left = fitting_eta(view, width - width_of(joined(parts)) - 2)
        parts.append(left)
    parts.append(((key_of(view, "detach"), "strong"), (" leaves", "dim")))
    return dropped_to_fit(parts, width)


def uses_of_model(view: View, adapter: bool = True) -> str:
    """Name the keys that use a run's model."""
    chat, evaluate, export = (key_of(view, name) for name in ("chat", "evaluate", "export_model"))
    merges = f", {export} exports or merges it" if adapter else ""
    return f"{chat} chats with it, {evaluate} evaluates it{merges}"


def left_behind(view: View) -> str:
    """Say where a finished run's model is, and what can be done with it."""
    done, hello = view.state.done, view.state.hello
    if done is None or not done.model_path:
        return ""
    adapter = hello is not None and hello.rank is not None
    place, folder = done.model_path, view.link.run_dir
    what = "" if view.link.replay else f"; {uses_of_model(view, adapter)}"
    if view.state.makes_images and folder is not None:
        what = f"; fluxtrain sample {folder} --prompt WORDS makes images with it"
    if folder is not None and place.startswith("/"):
        place = str(RunDir(folder).model)  # where the run is now, and not where it was made
    return f"the {'adapter' if adapter else 'model'} is in {place}{what}"


def notice_lines(view: View, width: int) -> list[Line]:
    """Explain a status that needs a sentence; nothing when all is well."""
    status = view.status
    told = status.detail
    if status.kind == "paused" and not told and not why_not(view):
        told = f"{key_of(view, 'pause')} resumes"
    if status.kind == "finished":
        told = left_behind(view)
    if not told or (status.kind == "running" and view.state.step is not None):
        return []
    mark, role = STATUS_MARKS[status.kind]
    rows = COMMAND_ROWS if status.kind == "stopped" else NOTICE_ROWS
    parts = wrapped(told, width - 4)
    if len(parts) > rows:
        parts = [*parts[: rows - 1], cut(f"{parts[rows - 1]} …", width - 4)]
    return [((f" {mark if i == 0 else ' '} ", role), (part, role)) for i, part in enumerate(parts)]
