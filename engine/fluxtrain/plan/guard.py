"""Refuses a run before anything is loaded when host memory or the disk of the run cannot hold it.

The placement rule looks at the step; a run also loads, evaluates, keeps checkpoints and saves a
model. Evaluation needs nothing that a step does not (its loss is computed in the same chunks), and
a checkpoint brings a GPU's tensors to the host in small pieces.

Each phase's host memory is judged by itself. While weights are loaded, no arena exists yet: pages
of
the model's files can be given back to the system, all other weights are copies, which then move to
their arenas group by group. While the model is saved, all that trains is there, and weights of the
GPU come on top, one file at a time.

Pure functions: sizes in, `DoesNotFit` out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Layout, weights_on_host_bytes
from fluxtrain.units import MIB, bytes_text, count_text

JOURNAL_BYTES = 8 * MIB  # about two hours of samples, once a second
STEP_BYTES = 1024  # of a step's event
EVERY_CHECKPOINT = 1 << 30  # a run that writes as many as it wants


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """The files of a run at their peak: all kept checkpoints, and one being written."""

    checkpoint_bytes: int
    kept: int
    written: int = EVERY_CHECKPOINT  # checkpoints in the whole run, at most
    model_bytes: int = 0
    journal_bytes: int = JOURNAL_BYTES
    spill_bytes: int = 0  # optimizer states that live on the same disk
    parameters: int = 0

    @property
    def copies(self) -> int:
        """Count the checkpoints on the disk at once."""
        return max(1, min(self.kept + 1, self.written))

    @property
    def total_bytes(self) -> int:
        """Count the bytes of all files."""
        beside = self.model_bytes + self.journal_bytes + self.spill_bytes
        return self.copies * self.checkpoint_bytes + beside


@dataclass(frozen=True, kw_only=True)
class DiskCapacity:
    """The file system of the run directory."""

    path: str
    free_bytes: int | None  # None: unknown, taken as enough
    held_bytes: int = 0  # this run's own checkpoints and model, which new ones replace
    in_memory: bool = False  # what is written takes host memory
    kind: str | None = None


UNKNOWN_DISK = DiskCapacity(path="", free_bytes=None)


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Host memory that the system cannot reclaim, in the two largest phases of a run."""

    lasting_bytes: int  # arenas and block inputs
    loading_bytes: int = 0  # copies of weights before they are on the host
    saving_bytes: int = 0  # copies of weights besides those on the host
    parameters: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the larger phase."""
        return max(self.loading_bytes, self.lasting_bytes + self.saving_bytes)


def loading_bytes(
    facts: ModelFacts, layout: Layout, *, copied_bytes: int, sources_bytes: int = 0
) -> int:
    """Count the host memory that loading takes until all weights are in their arenas.

    `copied_bytes`: weights that are copies instead of pages of files, made from `sources_bytes`;
    arenas for the others come later. One group's weights exist twice while they move to its arena.
    """
    if not copied_bytes:
        return 0  # arenas alone, which are counted with what trains
    every = sum(group.weight_bytes for group in facts.groups)
    arenas = min(weights_on_host_bytes(facts, layout), max(0, every - copied_bytes))
    largest = max((group.weight_bytes for group in facts.groups), default=0)
    return copied_bytes + max(sources_bytes, arenas) + largest


def disk_need(
    facts: ModelFacts, *, model_bytes: int, kept: int, written: int, steps: int
) -> DiskNeed:
    """Compute the sizes of a run's files; the saved model takes `model_bytes`."""
    states = sum(group.state_bytes for group in facts.groups)
    return DiskNeed(
        checkpoint_bytes=facts.trained_bytes + states,
        kept=kept,
        written=written,
        model_bytes=model_bytes,
        journal_bytes=JOURNAL_BYTES + STEP_BYTES * steps,
        parameters=parameters_of(facts),
    )


def refuse_spill(spill_bytes: int, folder: str, free_bytes: int | None) -> None:
    """Raise `DoesNotFit` when the disk of optimizer states, another than the run's, is too
    small."""
    if free_bytes is not None and spill_bytes > free_bytes:
        raise DoesNotFit(
            f"{bytes_text(spill_bytes)} of optimizer states are to live in {folder}, and "
            f"{bytes_text(free_bytes)} is free there: free some, or set placement.disk_path to a "
            "folder of a larger disk"
        )


def parameters_of(facts: ModelFacts) -> int:
    """Count the trained parameters, to which sizes of files are proportional."""
    return sum(group.trained for group in facts.groups)


def refuse_disk(need: DiskNeed, room: DiskCapacity) -> None:
    """Raise `DoesNotFit` when the run's files do not fit, with settings that would."""
    if room.free_bytes is None:
        return
    may_take = room.free_bytes + room.held_bytes
    if need.total_bytes <= may_take:
        return
    count = f"{need.copies} checkpoint{'s' * (need.copies > 1)}"
    being = f" ({need.kept} kept, one being written)" if need.copies == need.kept + 1 else ""
    held = f" beside {bytes_text(room.held_bytes)} of this run" if room.held_bytes else ""
    spill = ""
    if need.spill_bytes:
        spill = f"optimizer states of {bytes_text(need.spill_bytes)} that live there, "
    raise DoesNotFit(
        f"the run does not fit its disk: {spill}{count} of {bytes_text(need.checkpoint_bytes)}"
        f"{being}, the model of {bytes_text(need.model_bytes)} and a journal of "
        f"{bytes_text(need.journal_bytes)} need {bytes_text(need.total_bytes)}, and "
        f"{bytes_text(room.free_bytes)} is free in {_place(room)}{held}: "
        + "; or ".join(_disk_cures(need, may_take))
    )


def refuse_host(
    need: HostNeed, available_bytes: int | None, disk: DiskNeed, room: DiskCapacity
) -> None:
    """Raise `DoesNotFit` when host memory cannot hold the run, with its files where they are on a
    RAM disk."""
    if available_bytes is None:
        return
    files = max(0, disk.total_bytes - room.held_bytes) if room.in_memory else 0
    lasting = need.lasting_bytes + need.saving_bytes + files
    total = max(need.loading_bytes, lasting)
    if total <= available_bytes:
        return
    if need.loading_bytes > lasting:
        parts = ["weights that loading copies (converted, merged or pickled)"]
    else:
        parts = [f"weights, states, gradients and activations {bytes_text(need.lasting_bytes)}"]
        if need.saving_bytes:
            parts.append(f"weights while they are saved {bytes_text(need.saving_bytes)}")
        if files:
            parts.append(f"files in {_place(room)} {bytes_text(files)}")
    cures = [f"free {bytes_text(total - available_bytes)}"]
    if lasting <= available_bytes:
        cures.insert(0, "store them as safetensors in the dtype of the training first, which fits")
    elif need.total_bytes <= available_bytes:
        cures.insert(0, "choose a --run-dir on a disk, which fits")
    if need.parameters:
        cures.append(_smaller(need.parameters, available_bytes / total))
    raise DoesNotFit(
        f"the run does not fit host memory: {', '.join(parts)} need {bytes_text(total)}, and "
        f"{bytes_text(available_bytes)} is available: {'; or '.join(cures)}"
    )


def _disk_cures(need: DiskNeed, may_take_bytes: int) -> Iterator[str]:
    kept = _kept_that_fit(need, may_take_bytes)
    if kept > 0:
        fewer = replace(need, kept=kept)
        yield f"train.keep_checkpoints={kept} fits with {bytes_text(fewer.total_bytes)}"
    else:
        last = replace(need, written=1)
        if last.total_bytes <= may_take_bytes:
            yield f"train.checkpoint_every=end fits with {bytes_text(last.total_bytes)}"
    yield f"free {bytes_text(need.total_bytes - may_take_bytes)}"
    yield "choose another disk with --run-dir"
    if need.spill_bytes:
        yield "with placement.disk_path for the optimizer states"
    left = may_take_bytes - need.journal_bytes
    if need.parameters and left > 0:
        yield _smaller(need.parameters, left / (need.total_bytes - need.journal_bytes))


def _kept_that_fit(need: DiskNeed, may_take_bytes: int) -> int:
    """Return the largest number of kept checkpoints that fits; 0 if none does."""
    left = may_take_bytes - need.model_bytes - need.journal_bytes - need.spill_bytes
    return max(0, left // max(1, need.checkpoint_bytes) - 1)  # one more is being written


def _smaller(parameters: int, share: float) -> str:
    return f"choose a model of about {count_text(int(parameters * share))} parameters"


def _place(room: DiskCapacity) -> str:
    kind = "" if room.kind is None else f" ({room.kind})"
    return f"{room.path}{kind}"
