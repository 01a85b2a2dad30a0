"""The methods full, lora and qlora over pairs of images, for FLUX.1 Kontext."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fluxtrain.config.schema import MethodSettings, RunConfig
from fluxtrain.data.images.pairs import IsKnown, Pairs, read_pairs
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


@dataclass(frozen=True, kw_only=True)
class ImageMethod:
    """A method over pairs of images: every weight is trained, or low-rank adapters on frozen ones
    that may be packed in 4 or 8 bits."""

    adapts: bool
    packs: bool
    usual_rate: float

    def frozen_storage(self, settings: MethodSettings) -> StorageFormat:
        """Keep frozen weights in their dtype, or pack them as the settings say."""
        return settings.base if self.packs else "plain"

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
        pairs = read_data(config, encodings.is_known)
        device = torch.device("cpu" if capability is None else "cuda")

        def encoded() -> None:
            encode(encodings, pairs.all, device, tell or (lambda _: None))

        encoded() if waits is None else waits(encoded)
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
        return ImageTask(
            objective=FlowMatching(
                image=config.image,
                has_guidance=bool(loaded.model.config.guidance_embeds),
                dtype=getattr(torch, loaded.precision.dtype),
                empty=loaded.encodings.prompt(""),
            ),
            source=str(config.data.path),
            choices=data_choices(pairs),
            uneven=is_uneven(pairs.trained),
            ends=(),
            prompt=None,
            pairs=pairs,
            encodings=loaded.encodings,
            accumulation=config.train.accumulation,
            seed=config.data.seed,
            sampler=partial(PairSamples, config, pairs.held_out, loaded.encodings),
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

    def prepare(self, model: Any, config: RunConfig) -> tuple[ChoiceMade, ...]:
        """Add adapters to the linear layers of the blocks, and freeze everything else; or leave the
        model as it was loaded, whose every parameter is trained."""
        if not self.adapts:
            return ()
        from fluxtrain.methods.image.adapter import attach

        count = f"{len(attach(model, config.method)):,} layers"
        because = "as set" if config.method.targets != "auto" else "attention and MLP of all blocks"
        return (ChoiceMade(name="method.targets", value=count, because=because),)

    def saved_bytes(self, facts: ModelFacts) -> int:
        """Count the weights of the adapters, or all."""
        return facts.trained_bytes if self.adapts else facts.weight_bytes

    def save(self, loaded: LoadedPipeline, settings: MethodSettings, folder: Path) -> None:
        """Write the adapter with its scale folded in, or the transformer's folder in files of the
        same sizes as the original's."""
        if not self.adapts:
            save_transformer(loaded.model, loaded.pipeline, folder)
            return
        from fluxtrain.methods.image.adapter import save_adapter

        dtype, storage = loaded.precision.dtype, self.frozen_storage(settings)
        base = TrainedOn(dtype=dtype, storage=storage, key=loaded.base_key)
        save_adapter(loaded.model, base, folder)


IMAGE_METHODS: dict[str, Any] = {
    "full": ImageMethod(adapts=False, packs=False, usual_rate=1e-5),
    "lora": ImageMethod(adapts=True, packs=False, usual_rate=1e-4),
    "qlora": ImageMethod(adapts=True, packs=True, usual_rate=1e-4),
}


def read_data(config: RunConfig, is_known: IsKnown = lambda *_: True) -> Pairs:
    """Check all pairs, and hold some out; pixels are checked of pictures that are not known.

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
    found = _read(data.path, config, is_known)
    if data.held_out_path is not None:
        return replace(found, held_out=_read(data.held_out_path, config, is_known).trained)
    trained, apart = split_pairs(found.trained, data.held_out, data.seed)
    return replace(found, trained=trained, held_out=apart)


def _read(path: Any, config: RunConfig, is_known: IsKnown) -> Pairs:
    if not isinstance(path, str):
        raise BadInput("data.path of images is one file or folder: name one")
    place = demo_folder() / "data" if path == IMAGE_DEMO else Path(path).expanduser()
    found = read_pairs(
        place, config.image.size, most_bad=config.data.max_bad_rows, is_known=is_known
    )
    most = config.image.caption_tokens
    long = sum(len(pair.prompt.split()) > most for pair in found.trained)
    cut = f"{long:,} prompts have more than {most} words: what follows is not read"
    return replace(found, notes=(*found.notes, cut)) if long else found


def data_choices(pairs: Pairs) -> tuple[ChoiceMade, ...]:
    """Say how the data is read, and at which sizes."""
    sizes = [f"{width}x{height}" for width, height in dict.fromkeys(p.bucket for p in pairs.all)]
    value = ", ".join(sizes[:4]) + ", ..." * (len(sizes) > 4)
    because = f"{len(sizes)} of FLUX.1 Kontext's shapes are nearest to the images'"
    return (
        ChoiceMade(name="data.format", value="pairs of images", because=pairs.layout),
        ChoiceMade(name="image sizes", value=value, because=because),
    )


def with_pair_length(config: RunConfig) -> tuple[RunConfig, tuple[ChoiceMade, ...]]:
    """Return the configuration with the tokens of the largest pair. Raises BadInput as a run
    does for its pairs."""
    open_pipeline(config.model.path)
    words = config.image.caption_tokens
    tokens = row_tokens(read_data(config).all, words)
    data = config.data.model_copy(update={"sequence_length": tokens})
    because = f"{words} of the prompt, and those of the largest images"
    chosen = ChoiceMade(name="data.sequence_length", value=str(tokens), because=because)
    return config.model_copy(update={"data": data}), (chosen,)
