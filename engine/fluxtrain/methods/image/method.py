"""The methods full, lora and qlora over pairs of images, for FLUX.1 Kontext."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fluxtrain.config.schema import MethodSettings, RunConfig
from fluxtrain.data.images.pairs import Pairs, read_pairs
from fluxtrain.errors import BadInput
from fluxtrain.events.events import ChoiceMade
from fluxtrain.methods.image.encoding import Encodings, encode, encodings_of
from fluxtrain.methods.image.flow import FlowMatching
from fluxtrain.methods.image.sampling import PairSamples
from fluxtrain.methods.image.task import ImageTask, is_uneven, row_tokens, split_pairs
from fluxtrain.methods.trained_on import TrainedOn
from fluxtrain.models.copies import Copied
from fluxtrain.models.demo_pipeline import demo_folder
from fluxtrain.models.loading import EmptyModel, LoadedModel, ModelSource
from fluxtrain.models.model_files import IMAGE_DEMO, base_key
from fluxtrain.models.pipeline import (
    load_transformer,
    open_pipeline,
    open_transformer,
    save_transformer,
)
from fluxtrain.models.pipeline_files import PipelineFolder
from fluxtrain.models.precision import Capability
from fluxtrain.plan import states
from fluxtrain.plan.facts import ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.states import StorageFormat

Tell = Callable[[str], None]
_TEXT_ONLY = ("format", "columns", "roles", "ignore", "chat_template", "token_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPipeline(LoadedModel):
    """A transformer with the encoded pairs that it will learn."""

    pipeline: PipelineFolder
    encodings: Encodings
    pairs: Pairs
    held_out: Pairs | None


class _ImageMethod:
    """The common code of methods over pairs of images."""

    def frozen_storage(self, settings: MethodSettings) -> StorageFormat:
        """Keep frozen weights in their dtype."""
        return "plain"

    def load(
        self,
        config: RunConfig,
        fits: Callable[[Any, Copied], None] | None = None,
        capability: Capability | None = None,
        tell: Tell | None = None,
        waits: Callable[[Callable[[], None]], None] | None = None,
    ) -> LoadedPipeline:
        """Check the pairs, encode what is new of them, and then load the transformer."""
        pipeline = open_pipeline(config.model.path)
        empty = self.open_empty(config, capability)
        dtype, image = empty.precision.dtype, config.image
        encodings = encodings_of(pipeline, dtype, image.caption_tokens, image.cache)
        pairs, apart = read_data(config, encodings)
        device = torch.device("cpu" if capability is None else "cuda")
        everything = [*pairs.pairs, *(apart.pairs if apart else ())]

        def encoded() -> None:
            encode(encodings, everything, device, tell or (lambda _: None))

        if waits is None:
            encoded()
        else:
            waits(encoded)
        if fits is not None:
            fits(empty.model, empty.copied)
        frozen = self.frozen_storage(config.method)
        packed = None if frozen == "plain" else states.LEAST_PACKED
        model = load_transformer(pipeline, empty, packed_elements=packed)
        return LoadedPipeline(
            model=model,
            tokenizer=None,  # type: ignore[arg-type] # prompts are encoded already
            name=pipeline.folder.name,
            config=model.config,
            precision=empty.precision,
            packs=False,
            embedding_rows=0,
            max_positions=None,
            pad_id=0,
            weight_files=pipeline.weights,
            base_key=base_key(pipeline.weights),
            pipeline=pipeline,
            encodings=encodings,
            pairs=pairs,
            held_out=apart,
        )

    def open_empty(
        self, config: RunConfig, capability: Capability | None, *, weightless: bool = False
    ) -> EmptyModel:
        """Make the transformer without its weights, whose headers are read."""
        source = ModelSource.of(config.model, capability)
        return open_transformer(open_pipeline(config.model.path), source)

    def task(self, config: RunConfig, loaded: LoadedPipeline, *_: object) -> ImageTask:
        """Make the task of predicting the flow from noise to the targets."""
        pairs = loaded.pairs
        if loaded.held_out is None:
            trained, apart = split_pairs(pairs.pairs, config.data.held_out, config.data.seed)
        else:
            trained, apart = pairs.pairs, loaded.held_out.pairs
        words, pooled = loaded.encodings.prompt("")
        return ImageTask(
            objective=FlowMatching(
                timesteps=config.image.timesteps,
                dropout=config.image.caption_dropout,
                guidance=config.image.guidance,
                has_guidance=bool(loaded.model.config.guidance_embeds),
                dtype=getattr(torch, loaded.precision.dtype),
                empty=(words, pooled),
            ),
            source=str(config.data.path),
            choices=data_choices(pairs),
            uneven=is_uneven(trained),
            ends=(),
            prompt=None,
            trained=trained,
            held_out=apart,
            encodings=loaded.encodings,
            accumulation=config.train.accumulation,
            seed=config.data.seed,
            told=pairs.notes,
            sampler=partial(PairSamples, config, apart, loaded.encodings),
        )

    def row_facts(self, config: RunConfig, model: Any) -> RowFacts:
        """Describe the largest pair as a row of tokens; there is no vocabulary."""
        hidden = model.inner_dim
        tokens = config.data.row_tokens
        dtype_bytes = next(model.parameters()).element_size()
        return RowFacts(
            hidden=hidden,
            vocabulary=0,
            sequence_length=tokens,
            dtype_bytes=dtype_bytes,
            activation_bytes=activation_estimate(hidden, 4 * hidden, tokens, dtype_bytes),
        )

    def try_saving(self, loaded: LoadedPipeline, beside: Path) -> None:
        """Nothing but weights is saved."""


class LoraOnImages(_ImageMethod):
    """Trains low-rank adapters, and saves them as diffusers names them."""

    usual_rate = 1e-4

    def prepare(self, model: Any, config: RunConfig) -> tuple[ChoiceMade, ...]:
        """Add adapters to the linear layers of the blocks, and freeze everything else."""
        from fluxtrain.methods.image.adapter import attach

        layers = attach(model, config.method)
        because = "as set" if config.method.targets != "auto" else "attention and MLP of all blocks"
        return (
            ChoiceMade(name="method.targets", value=f"{len(layers):,} layers", because=because),
        )

    def saved_bytes(self, facts: ModelFacts) -> int:
        """Count the trained weights."""
        return facts.trained_bytes

    def save(self, loaded: LoadedPipeline, settings: MethodSettings, folder: Path) -> None:
        """Write the adapter with its scale folded in."""
        from fluxtrain.methods.image.adapter import save_adapter

        base = TrainedOn(
            dtype=loaded.precision.dtype,
            storage=self.frozen_storage(settings),
            key=loaded.base_key,
        )
        save_adapter(loaded.model, base, folder)


class FullOnImages(_ImageMethod):
    """Trains every weight of the transformer, and saves it as a `transformer/` folder."""

    usual_rate = 1e-5

    def prepare(self, model: Any, config: RunConfig) -> tuple[ChoiceMade, ...]:
        """Leave the model as it was loaded: every parameter is trained."""
        return ()

    def saved_bytes(self, facts: ModelFacts) -> int:
        """Count all weights."""
        return facts.weight_bytes

    def save(self, loaded: LoadedPipeline, settings: MethodSettings, folder: Path) -> None:
        """Write the transformer's folder, in files like those that it came in."""
        save_transformer(loaded.model, loaded.pipeline, folder)


class QLoraOnImages(LoraOnImages):
    """The same on weights packed in 4 or 8 bits."""

    def frozen_storage(self, settings: MethodSettings) -> StorageFormat:
        """Pack frozen weights as the settings say."""
        return settings.base


IMAGE_METHODS: dict[str, Any] = {
    "full": FullOnImages(),
    "lora": LoraOnImages(),
    "qlora": QLoraOnImages(),
}


def read_data(config: RunConfig, encodings: Encodings | None = None) -> tuple[Pairs, Pairs | None]:
    """Check all pairs, to train on and held out; their pixels only where `encodings` are given,
    which do not hold them yet.

    Raises BadInput for bad pairs, and for settings that text alone has.
    """
    data, usual = config.data, type(config.data)()
    text = [name for name in _TEXT_ONLY if getattr(data, name) != getattr(usual, name)]
    if text:
        raise BadInput(
            f"data.{', data.'.join(text)} are of text, and the data are images: leave them out"
        )
    if config.samples.prompts:
        raise BadInput(
            "samples.prompts are of text: images are made for image.samples held-out pairs"
        )
    read = [
        None if path is None else _read(path, config, encodings)
        for path in (data.path, data.held_out_path)
    ]
    assert read[0] is not None
    return read[0], read[1]


def _read(path: Any, config: RunConfig, encodings: Encodings | None) -> Pairs:
    if not isinstance(path, str):
        raise BadInput("data.path of images is one file or folder: name one")
    place = demo_folder() / "data" if path == IMAGE_DEMO else Path(path).expanduser()
    found = read_pairs(
        place, config.image.size, most_bad=config.data.max_bad_rows,
        is_known=encodings.is_known if encodings else lambda *_: True,
    )  # fmt: skip
    most = config.image.caption_tokens
    long = sum(len(pair.prompt.split()) > most for pair in found.pairs)
    cut = f"{long:,} prompts have more than {most} words: what follows is not read"
    return replace(found, notes=(*found.notes, cut)) if long else found


def data_choices(pairs: Pairs) -> tuple[ChoiceMade, ...]:
    """Say how the data is read, and at which sizes."""
    sizes = list(dict.fromkeys(pair.bucket for pair in pairs.pairs))
    shown = ", ".join(f"{width}x{height}" for width, height in sizes[:4])
    return (
        ChoiceMade(name="data.format", value="pairs of images", because=pairs.layout),
        ChoiceMade(
            name="image sizes",
            value=shown + ", ..." * (len(sizes) > 4),
            because=f"{len(sizes)} of FLUX.1 Kontext's shapes are nearest to the images'",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class PlannedPairs:
    """What a plan knows of the pairs before any is encoded."""

    rows: int  # trained in an epoch
    choices: tuple[ChoiceMade, ...]
    notes: tuple[str, ...]


def planned_pairs(config: RunConfig) -> PlannedPairs:
    """Count the pairs of an epoch. Raises BadInput as a run does."""
    pairs, apart = read_data(config)
    held = 0.0 if apart is not None else config.data.held_out
    trained, _ = split_pairs(pairs.pairs, held, config.data.seed)
    return PlannedPairs(rows=len(trained), choices=data_choices(pairs), notes=pairs.notes)


def with_pair_length(config: RunConfig) -> tuple[RunConfig, tuple[ChoiceMade, ...]]:
    """Return the configuration with the tokens of the largest pair. Raises BadInput as a run
    does for its pairs."""
    open_pipeline(config.model.path)
    pairs, apart = read_data(config)
    everything = [*pairs.pairs, *(apart.pairs if apart else ())]
    tokens = row_tokens(everything, config.image.caption_tokens)
    data = config.data.model_copy(update={"sequence_length": tokens})
    chosen = ChoiceMade(
        name="data.sequence_length",
        value=str(tokens),
        because=f"{config.image.caption_tokens} of the prompt, and those of the largest images",
    )
    return config.model_copy(update={"data": data}), (chosen,)
