"""The event schema: past-tense facts, one JSON object a line, at most 4096 bytes a frame.

A minor version only adds events and fields, so readers ignore what they do not know; a reader
refuses another major version. Lengths are bytes, times are seconds, rates are bytes per second.
`None` means "not measured", and a screen shows "-" for it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 1
SCHEMA = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"
FRAME_LIMIT_BYTES = 4096  # PIPE_BUF on Linux: a larger write to a pipe can tear

RunPhase = Literal[
    "starting",
    "loading",
    "training",
    "paused",
    "evaluating",
    "saving",
    "stopping",
    "no space",
    "finished",
    "failed",
]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Has the fields of every frame; the emitter fills these four."""

    seq: int = 0
    t_s: float = 0.0  # time.monotonic() of the trainer
    wall_s: float = 0.0  # Unix time
    dropped: int = 0  # live frames dropped so far because the reader was slow


class Gauge(Event, frozen=True, kw_only=True):
    """A sample: the latest wins, and it may be dropped (and counted) when the reader is slow."""


class CardMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One card's share of `MemorySampled`."""

    number: int
    total_bytes: int | None
    used_bytes: int
    peak_bytes: int
    budget_bytes: int | None
    by: dict[str, int]


class CardTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One card's share of `TrafficSampled`; `landed` came from other cards."""

    number: int
    h2d_bytes: int
    d2h_bytes: int
    landed_bytes: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    landed_bytes_per_s: float


class CardPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tells the share of one of several cards in a plan."""

    number: int  # as gauges and lanes count the cards that compute
    index: int  # torch's
    name: str
    blocks: int
    device_bytes: int  # predicted peak
    budget_bytes: int | None
    edges: bool = False  # embedding and head are on it
    gpu: int | None = None  # nvidia-smi's number of it; None: not known


class CardLeftOut(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A card of the machine that does not compute, and why."""

    index: int  # torch's
    name: str
    because: str


class Hello(Event, frozen=True, kw_only=True, tag="hello"):
    """The first frame of every process that writes to the run's journal."""

    schema: str = SCHEMA
    run_id: str
    run_dir: str
    pid: int
    pid_start_s: float  # the process's start time, because pids are reused
    version: str
    model: str
    method: str
    dtype: str
    device: str  # "NVIDIA H200", "cpu"
    machine: str  # one line: cores, memory, GPU
    blocks: int
    parameters: int
    trained_parameters: int
    total_steps: int
    first_step: int = 0  # > 0 after a resume: steps already done
    phase_names: tuple[str, ...] = ()
    rank: int | None = None  # of adapters; None: there are none
    storage: str = "plain"  # of frozen weights: plain, or how they are packed
    boot: str = ""  # the id of the machine's boot, from which t_s counts; "": not known


class ChoiceMade(msgspec.Struct, frozen=True, kw_only=True):
    """One automatic choice and its reason in words with numbers."""

    name: str
    value: str
    because: str


class PlacedAlike(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Groups of parameters with equal rows in the placement table, and their row."""

    groups: str  # their numbers in forward order, as 0,2-5
    weights: str  # the tier where these live: device, host, disk
    state: str
    gradients: str
    storage: str  # format of the weights
    card: int
    activations: str  # kept, inputs_on_device, inputs_on_host
    transfers: tuple[str, ...]  # whole, rows, vocabulary_chunks
    resident: bool  # the device's copy of the weights stays there


class SampleFit(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples (texts, or answers with their context) fit into rows."""

    samples: int
    longer: int  # than a row
    cut: int  # of these: conversations of which only the beginning is trained on
    divided: int  # of these: texts that are in several rows
    left_out: int  # nothing to learn is within a row


class Planned(Event, frozen=True, kw_only=True, tag="planned"):
    """The plan that this run follows; the whole of it is in plan.json."""

    offload: str
    batch_rows: int
    chunk_rows: int
    accumulation: int
    sequence_length: int
    resident_blocks: int
    slots: int
    device_bytes: int | None  # predicted peak
    device_budget_bytes: int | None
    host_bytes: int | None  # predicted peak
    choices: tuple[ChoiceMade, ...] = ()
    blocks_without_recompute: int = 0  # they keep their activations
    device_groups: int = 0  # parts of the model that live on the device with their states
    device_first: str = "embedding"  # which are placed first: embedding (forward order), blocks
    step_s: float | None = None  # predicted, as the next three; None where rates are not known
    tokens_per_s: float | None = None
    eta_s: float | None = None  # all steps, without evaluations and checkpoints
    disk_bytes: int | None = None
    placement: tuple[PlacedAlike, ...] = ()  # the whole table, equal rows together
    binds: str = ""  # the resource that takes the most of a step, in words
    constants: str = ""  # source of the rates that the time is computed from
    timing: str = "measured"  # or disturbed, assumed: the digits that times deserve (`units`)
    samples: SampleFit | None = None  # of all the data that is trained on
    cards: tuple[CardPlan, ...] = ()  # where several compute; the other numbers are of all together
    left_out: tuple[CardLeftOut, ...] = ()  # cards of the machine that do not compute


class PhaseChanged(Event, frozen=True, kw_only=True, tag="phase"):
    """The run entered another phase of its life."""

    phase: RunPhase
    detail: str = ""


class RankStep(msgspec.Struct, frozen=True, kw_only=True):
    """The last step of one of several processes that train together, on cards of its own."""

    machine: str
    card: int  # the first of its cards on the machine, in the order of ranks
    tokens_per_s: float  # of its own rows
    busy_s: float  # of the step, without the wait for the others
    waited_s: float  # for the gradients of others
    used_bytes: int  # of its cards together
    limit_bytes: int | None
    cards: int = 1


class StepFinished(Event, frozen=True, kw_only=True, tag="step"):
    """One optimizer step. `phases_s` partitions `step_s`; `stalls_s` is the part spent waiting."""

    step: int  # 1 for the first
    total_steps: int
    epoch: float
    loss: float  # mean over the units of the objective; nats, where these are tokens
    learning_rate: float
    grad_norm: float | None
    tokens: int  # trained tokens of this step; 0 for an objective without tokens
    total_tokens: int
    step_s: float
    tokens_per_s: float
    phases_s: dict[str, float]  # data, forward, backward, optimizer, other
    stalls_s: dict[str, float]  # by cause: weights, disk, update, gradients
    eta_s: float | None = None
    eta_spread_s: float | None = None  # plus or minus, from the spread of recent steps
    loss_scale: float | None = None  # of fp16: what the loss was multiplied by
    left_out: bool = False  # its gradients are not finite: no weight was changed
    ranks: tuple[RankStep, ...] = ()  # of several processes, in the step before


class MemorySampled(Gauge, frozen=True, kw_only=True, tag="memory"):
    """Where every byte is. `device_by` partitions `device_used_bytes`.

    Keys of `device_by`: weights (trained), frozen, packed, unpacked (one block's packed weights
    while it computes), gradients, optimizer, activations, workspace, cache.
    """

    device_total_bytes: int | None
    device_used_bytes: int | None
    device_peak_bytes: int | None
    device_budget_bytes: int | None
    device_by: dict[str, int]
    host_rss_bytes: int | None
    host_peak_bytes: int | None
    host_arena_bytes: int
    host_pinned_bytes: int
    host_limit_bytes: int | None
    cards: tuple[CardMemory, ...] = ()  # where several compute; the totals are of all
    disk_bytes: int = 0  # of frozen weights that live in files


class TrafficSampled(Gauge, frozen=True, kw_only=True, tag="traffic"):
    """Bytes that the engine itself moved: totals since the start and rates over `window_s`."""

    h2d_bytes: int
    d2h_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    window_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_written_bytes_per_s: float
    h2d_ceiling_bytes_per_s: float | None = None
    d2h_ceiling_bytes_per_s: float | None = None
    h2d_frozen_bytes: int = 0  # of `h2d_bytes`: frozen weights in the model's dtype
    h2d_packed_bytes: int = 0  # of `h2d_bytes`: packed ones
    cards: tuple[CardTraffic, ...] = ()  # where several compute; the totals are of all


class BlockRun(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`count` blocks in a row, each of these bytes; `{}` in the name is `first` and so on.

    `weights_bytes` are trained, frozen and packed ones together.
    """

    name: str
    first: int
    count: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    frozen_bytes: int = 0  # in the model's dtype
    packed_bytes: int = 0  # frozen, too


class ResidencySampled(Gauge, frozen=True, kw_only=True, tag="residency"):
    """One letter a block: G device, C host, N disk, > to the device, < to the host, . absent."""

    weights: str
    gradients: str
    optimizer: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    blocks: tuple[BlockRun, ...] = ()  # the blocks behind the letters, in their order
    frozen_bytes: int = 0  # of the weights, in the model's dtype
    packed_bytes: int = 0  # of the weights, too
    cards: str = ""  # the card of each block, a digit each (then letters); "" with one card


class Move(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One transfer that really happened."""

    step: int
    block: str
    what: str  # weights, gradients, state, activations
    bytes: int
    direction: str  # of G device, C host, N disk: C>G, G>C, N>G, C>N, ...
    duration_s: float | None
    cause: str  # prefetch, demand, gradient, refresh, evict, placement


class MovesMade(Gauge, frozen=True, kw_only=True, tag="moves"):
    """The latest moves, oldest first, and the number of all moves."""

    moves: tuple[Move, ...]
    total: int


class Heartbeat(Gauge, frozen=True, kw_only=True, tag="heartbeat"):
    """The process is alive, whether or not steps end."""

    phase: RunPhase
    step: int


class EvaluationFinished(Event, frozen=True, kw_only=True, tag="evaluation"):
    """The objective on held-out data after a step: means over `count` units."""

    step: int
    loss: float  # nats, where the unit is tokens
    count: int
    seconds: float
    unit: str = "tokens"  # of the objective: tokens, pairs, elements
    metrics: dict[str, float] = msgspec.field(default_factory=dict)  # means by name, `loss` too
    best_step: int | None = None  # of the lowest loss so far, this one with it
    best_loss: float | None = None
    stale: int = 0  # evaluations since the last that counted as an improvement
    patience: int | None = None  # training ends when `stale` reaches it


class StoppedEarly(Event, frozen=True, kw_only=True, tag="stopped_early"):
    """Training ended before its last step because evaluations no longer improved."""

    step: int
    total_steps: int
    stale: int  # evaluations in a row without an improvement
    threshold: float  # the smallest improvement that counts
    best_step: int | None
    best_loss: float | None


class CheckpointWritten(Event, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint is whole on disk."""

    step: int
    path: str
    bytes: int
    seconds: float
    held_s: float | None = None  # of these training stood still; None: all of them


class SampleGenerated(Event, frozen=True, kw_only=True, tag="sample"):
    """The model's answer to a prompt, or its continuation of it; engine.log has long ones whole."""

    step: int
    prompt: str
    text: str
    number: int = 1  # of `count` prompts that were answered after this step
    count: int = 1
    tokens: int | None = None  # of the answer
    ended: str = ""  # why the answer ended: end, length, context
    seconds: float | None = None  # for all `count`
    path: str = ""  # of a picture, within the run's folder (since schema 1.1)


class AdviceGiven(Event, frozen=True, kw_only=True, tag="advice"):
    """A setting that would make this run better."""

    text: str  # with the measured cause
    gain: str = ""  # predicted, with unit
    how: str = ""  # the setting to change
    id: str = ""  # its subject; newer advice with the same id replaces it
    # arguments of the `apply` command; empty: for the next run
    apply: dict[str, int] = msgspec.field(default_factory=dict)
    gain_share: float | None = None  # predicted, of the step's time


class AdviceWithdrawn(Event, frozen=True, kw_only=True, tag="advice_withdrawn"):
    """The cause of earlier advice no longer holds."""

    id: str


class ChangeApplied(Event, frozen=True, kw_only=True, tag="change"):
    """The running training was changed between two steps."""

    step: int  # the last one before the change
    name: str  # prefetch, resident_blocks, device_groups, chunk_rows
    before: int
    after: int
    # wrong: its gain was too small; memory, room: the device's got short, and is there again;
    # host: the host's got short
    why: Literal["asked", "advice", "undo", "wrong", "memory", "room", "host"]
    advice: str = ""  # the id, of advice
    card: int | None = None  # of several, the one that changed alone; None: all
    predicted_gain: float | None = None  # share of the step's time
    same_bits: bool = True  # losses go on bit for bit as without the change
    device_bytes: int | None = None  # predicted peak of the run, of its layouts so far
    host_bytes: int | None = None  # the same
    step_s: float | None = None  # predicted as it is now, as the next two
    tokens_per_s: float | None = None
    binds: str = ""


class ChangeRefused(Event, frozen=True, kw_only=True, tag="change_refused"):
    """A change that was asked for could not be made; nothing changed."""

    step: int
    name: str
    value: int
    because: str
    advice: str = ""


class MeasuringChange(Gauge, frozen=True, kw_only=True, tag="measuring"):
    """The progress of the measurement of the newest change."""

    name: str
    counted: int  # steady steps since the change
    wanted: int


class ChangeMeasured(Event, frozen=True, kw_only=True, tag="change_measured"):
    """The measured gain of a change: medians of steady steps before and after it.

    wrong: advice that gave less than half of the promised gain, and is undone. unknown: too few
    steady steps on one side.
    """

    step: int
    name: str
    before: int
    after: int
    verdict: Literal["kept", "wrong", "measured", "unknown"]
    measured_gain: float | None  # share of the step's time; below 0 it cost
    predicted_gain: float | None = None
    advice: str = ""
    before_s: float | None = None  # median step
    after_s: float | None = None
    steps_before: int = 0
    steps_after: int = 0


class LogWritten(Event, frozen=True, kw_only=True, tag="log"):
    """A line for the log panel."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


class CommandAnswered(Event, frozen=True, kw_only=True, tag="command"):
    """A command came over the control socket and got an answer."""

    command: str
    ok: bool
    message: str
    arguments: dict[str, int | str] = msgspec.field(default_factory=dict)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of the plan: device_peak_bytes, host_peak_bytes or step_s."""

    quantity: str
    predicted: float | None
    measured: float | None
    error: float | None  # (predicted - measured) / measured


class PlanChecked(Event, frozen=True, kw_only=True, tag="plan_checked"):
    """The plan compared with the run's measurements, after its last step."""

    rows: tuple[Compared, ...]


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """The run ends with an error."""

    exit_code: int
    kind: str  # the error's class
    message: str  # with the numbers and the cure
    refused: bool = False  # before a first step: an input that cannot be used, or does not fit


class Done(Event, frozen=True, kw_only=True, tag="done"):
    """The last frame of a process that ended in order; interrupted runs end with it too."""

    exit_code: int
    step: int
    seconds: float
    loss: float | None
    evaluation_loss: float | None
    model_path: str | None
    resume_with: str | None = None  # the command that goes on
    model_step: int | None = None  # the step whose weights the saved model has
    best_step: int | None = None  # of the lowest evaluation loss
    best_loss: float | None = None


AnyEvent = (
    Hello | Planned | PhaseChanged | StepFinished | MemorySampled | TrafficSampled
    | ResidencySampled | MovesMade | Heartbeat | EvaluationFinished | CheckpointWritten
    | SampleGenerated | AdviceGiven | AdviceWithdrawn | ChangeApplied | ChangeRefused
    | MeasuringChange | ChangeMeasured | LogWritten | CommandAnswered | PlanChecked | Failed | Done
    | StoppedEarly
)  # fmt: skip

_SETTINGS = {  # the names that a configuration has for what a plan chooses
    "device": "placement.device",
    "offload": "placement.offload",
    "device_groups": "placement.device_groups",
    "device_first": "placement.device_first",
    "resident_blocks": "placement.resident_blocks",
    "blocks_without_recompute": "placement.blocks_without_recompute",
    "activations": "placement.activations",
    "chunk_rows": "placement.chunk_rows",
    "prefetch": "placement.prefetch",
    "embedding": "placement.embedding",
    "head": "placement.head",
    "aggressiveness": "placement.aggressiveness",
    "batch_rows": "train.batch_rows",
    "moments": "train.moments",
    "kernels": "model.kernels",
    "page_locks": "page-locked memory",  # no setting
}


def setting_name(choice: str) -> str:
    """Return the setting that `choice` names: a field of a layout, or an older version's name
    without its group. Other names stay."""
    return _SETTINGS.get(choice, choice)
