"""Load the inputs of a run: the model with its tokenizer, and the packed rows of its data.

What the plan found free on a GPU may be taken by another program while the weights are loaded. Then
all is loaded once more, from the files, and planned for what is free: the first weights may be half
on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.checkpoint.randomness import seed_everything
from fluxtrain.client.machine import Machine
from fluxtrain.config.schema import RunConfig
from fluxtrain.data.demo import PROMPT
from fluxtrain.data.prepare import DataSource, ModelLimits, PreparedData, prepare
from fluxtrain.data.reading.corpus import Corpus, Reading
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.rendering.named import use_template
from fluxtrain.data.shapes.keys import TITLES
from fluxtrain.methods.method import method_of
from fluxtrain.models.copies import Copied
from fluxtrain.models.generation import stop_at
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model
from fluxtrain.models.precision import Capability
from fluxtrain.plan import states
from fluxtrain.plan.guard import DiskCapacity
from fluxtrain.planning.placing import RanOutLoading, card_capability
from fluxtrain.planning.preflight import refuse_before_loading
from fluxtrain.reporting.failures import first_line
from fluxtrain.telemetry.events import ChoiceMade
from fluxtrain.train.session import Session

Opened = TypeVar("Opened")
Tell = Callable[[str], None] | None
DEMO = "demo"
PROMPT_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is read from files before training starts."""

    loaded: LoadedModel
    data: PreparedData
    prompt: str  # the sample at the end continues it
    talks: bool = False  # the first row of the data is a conversation
    choices: tuple[ChoiceMade, ...] = ()  # what was chosen for the data


def load_inputs(
    config: RunConfig,
    fits: Callable[[PreTrainedModel, Copied], None] | None = None,
    capability: Capability | None = None,
    tell: Callable[[str], None] | None = None,
    waits: Callable[[Callable[[], PreparedData]], PreparedData] = lambda prepare: prepare(),
) -> Inputs:
    """Read model and data.

    `fits` is called before the weights are read. `capability` is the compute capability of the
    card, None without one; `tell` is called with the progress of the data. `waits`
    prepares the data once more where the disk of its cache was full.

    Raises:
        DoesNotFit: from `fits`.
        BadInput: the files need a repair, which the message names.
    """
    frozen = method_of(config).frozen_storage(config.method)
    loaded = load_model(
        ModelSource(
            path=config.model.path,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
            dtype=config.model.dtype,
            capability=capability,
            seed=config.train.seed,
        ),
        fits,
        packed_elements=None if frozen == "plain" else states.LEAST_PACKED,
    )
    use_template(loaded.tokenizer, config.data.chat_template)
    data = waits(
        lambda: prepared_data(config, loaded, loaded.tokenizer, config.data.row_tokens, tell)
    )
    prompt, talks = _prompt(config.data.path, data)
    return Inputs(loaded=loaded, data=data, prompt=prompt, talks=talks)


def prepared_data(
    config: RunConfig,
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    row_tokens: int,
    tell: Tell,
) -> PreparedData:
    """Read the data that `config` names into rows of `row_tokens` tokens for a loaded model."""
    return prepare(
        DataSource(
            request=read_request(config.data.model_dump()),
            sequence_length=row_tokens,
            held_out=config.data.held_out,
            seed=config.data.seed,
            token_cache=config.data.token_cache,
        ),
        tokenizer,
        ModelLimits(
            embedding_rows=loaded.embedding_rows,
            max_positions=loaded.max_positions,
            pad_id=loaded.pad_id,
            packs=loaded.packs,
        ),
        tell,
    )


def told_of(inputs: Inputs, whole: bool) -> list[str]:
    """Return what a person should know of the data before it is trained on, a sentence each.

    Makes generation stop at the ends that are learnt. `whole`: the model itself is saved at the
    end, not an adapter.
    """
    data, loaded = inputs.data, inputs.loaded
    ends = [end for end, _ in data.notes.ends.most_common()]
    told = [*data.told, *data.notes.sentences(), *data.trained.fit.sentences()]
    stopping = stop_at(loaded.model, loaded.tokenizer, ends, whole)
    return [*told, stopping] if stopping else told


def read_as(corpus: Corpus) -> ChoiceMade:
    """Say what the data is read as, and why."""
    shapes = dict.fromkeys(part.shape for part in corpus.parts)
    first = corpus.parts[0]
    more = f"; and {len(corpus.parts) - 1} more files" if len(corpus.parts) > 1 else ""
    unknown = f"; {corpus.endless}" if corpus.endless else ""
    because = f"{TITLES[first.shape]}: {first.because}{more}{unknown}"
    return ChoiceMade(name="data.format", value=", ".join(shapes), because=because)


def _prompt(path: object, data: PreparedData) -> tuple[str, bool]:
    """Return the first words of the data, which the model should know how to continue, and whether
    they are a user's in a conversation."""
    if path == DEMO:
        return PROMPT, False
    first = next(iter(Reading(data.corpus)))
    if first.messages:
        words = next((m["content"] for m in first.messages if m["role"] == "user"), "")
        return str(words), True
    words = first.text.strip()[:PROMPT_CHARACTERS]
    return words.rpartition(" ")[0] or words, False


def ready_inputs(
    config: RunConfig,
    session: Session,
    disk: DiskCapacity,
    machine: Machine,
    device: ChoiceMade,
    chosen: tuple[ChoiceMade, ...],
) -> Inputs:
    """Load the inputs of a run, told and prepared for its method."""
    seed_everything(config.train.seed)
    fits = partial(refuse_before_loading, config, machine, device.value, disk)
    tell, waits = partial(session.announcer.phase, "loading"), session.disk.until_written
    inputs = load_inputs(config, fits, card_capability(device.value), tell, waits)
    for line in told_of(inputs, whole=config.method.name == "full"):
        session.announcer.warn(line)
    method_of(config).try_saving(inputs.loaded, session.run_dir.path)
    method_of(config).prepare(inputs.loaded.model, config)
    return replace(inputs, choices=chosen)


def opened_once_more(opens: Callable[[], Opened], warn: Callable[[str], None]) -> Opened:
    """Return what `opens` loads a model for; once more, and say so, when device memory ran out
    while the weights were loaded.

    Raises RanOutLoading when that happens the second time too.
    """
    try:
        return opens()
    except RanOutLoading as error:
        first = first_line(error)
        error.with_traceback(None)  # its frames hold the model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warn(
        f"device memory ran out while the model was loaded ({first}): it is loaded again, planned "
        "for what is free now"
    )
    return opens()
