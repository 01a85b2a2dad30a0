"""Methods: which weights of a model are trained, on what, and what is saved.

`method.name` of a configuration is looked up here and nowhere else. To add a method, write a class
with the members of `Method`, list it in `METHODS`, and name it in `MethodSettings`. What only one
method needs, such as peft, is imported when it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedModel

from fluxtrain.config.schema import MethodSettings, RunConfig
from fluxtrain.data.rendering.named import use_template
from fluxtrain.events.events import ChoiceMade
from fluxtrain.methods.objective import Task
from fluxtrain.methods.text_task import Tell, Waits, text_task
from fluxtrain.models.beside import write_adapter_files
from fluxtrain.models.copies import Copied
from fluxtrain.models.export import save_model, try_saving, try_saving_model
from fluxtrain.models.loading import (
    EmptyModel,
    LoadedModel,
    ModelSource,
    load_model,
    open_empty,
)
from fluxtrain.models.model_files import is_pipeline
from fluxtrain.models.precision import Capability
from fluxtrain.plan import states
from fluxtrain.plan.facts import ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.states import StorageFormat

DEMO = "demo"
Fits = Callable[[PreTrainedModel, Copied], None]
FRESH_RATE = 3e-3


class Method(Protocol):
    """A run's interface to its method."""

    usual_rate: float  # peak learning rate for a model with trained weights

    def prepare(self, model: PreTrainedModel, config: RunConfig) -> tuple[ChoiceMade, ...]:
        """Add the modules of the method to `model`, and set `requires_grad` of every parameter.

        Returns what was chosen.
        Called before `model` is measured, planned and wrapped. For a plan it is called with a model
        on the meta device, so it must not read weights; the plan counts its facts afterwards.
        """

    def frozen_storage(self, settings: MethodSettings) -> StorageFormat:
        """Say how large frozen weights of blocks are stored."""

    def load(
        self,
        config: RunConfig,
        fits: Fits | None = None,
        capability: Capability | None = None,
        tell: Tell | None = None,
        waits: Waits | None = None,
    ) -> LoadedModel:
        """Load the model that the task learns with.

        `fits` is called before the weights are read. `capability` is the compute capability of the
        card, None without one; `tell` and `waits` are as for `task`. Raises DoesNotFit from `fits`,
        and BadInput where files need a repair.
        """

    def open_empty(
        self, config: RunConfig, capability: Capability | None, *, weightless: bool = False
    ) -> EmptyModel:
        """Make the model that `load` returns on the meta device.

        weightless: a folder without weights will do. Raises BadInput where a file is missing.
        """

    def row_facts(self, config: RunConfig, model: Any) -> RowFacts:
        """Describe one row of the data for the plan, whose tokens are chosen."""

    def saved_bytes(self, facts: ModelFacts) -> int:
        """Count the bytes that `save` will write, for the check of the disk."""

    def task(
        self,
        config: RunConfig,
        loaded: LoadedModel,
        tell: Tell | None = None,
        waits: Waits | None = None,
    ) -> Task[Any]:
        """Make what the run learns: the objective with its configuration, and all batches.

        `tell` is called with the progress of the data; `waits` makes the data once more where the
        disk of its cache was full. Raises BadInput where the data needs a repair.
        """

    def try_saving(self, loaded: LoadedModel, beside: Path) -> None:
        """Write the files saved with the weights to a temporary folder, or where that is full to
        one in the folder `beside`, and read them again.

        Called before anything is trained. Raises BadInput where that fails.
        """

    def save(self, loaded: LoadedModel, settings: MethodSettings, folder: Path) -> None:
        """Write the trained model to `folder`, so that other programs load it.

        Raises NoSpace when the disk fills up.
        """


class _TextMethod:
    """The common code of methods over rows of text."""

    def frozen_storage(self, settings: MethodSettings) -> StorageFormat:
        """Keep frozen weights in their dtype."""
        return "plain"

    def load(
        self,
        config: RunConfig,
        fits: Fits | None = None,
        capability: Capability | None = None,
        tell: Tell | None = None,
        waits: Waits | None = None,
    ) -> LoadedModel:
        """Load a causal language model, with the chat template that was chosen."""
        frozen = self.frozen_storage(config.method)
        loaded = load_model(
            ModelSource.of(config.model, capability, config.train.seed),
            fits,
            packed_elements=None if frozen == "plain" else states.LEAST_PACKED,
        )
        use_template(loaded.tokenizer, config.data.chat_template)
        return loaded

    def open_empty(
        self, config: RunConfig, capability: Capability | None, *, weightless: bool = False
    ) -> EmptyModel:
        """Make a language model without its weights."""
        return open_empty(ModelSource.of(config.model, capability), weightless=weightless)

    def row_facts(self, config: RunConfig, model: Any) -> RowFacts:
        """Describe a packed row of tokens."""
        return text_row(model, model.config, config.data.row_tokens)

    def task(
        self,
        config: RunConfig,
        loaded: LoadedModel,
        tell: Tell | None = None,
        waits: Waits | None = None,
    ) -> Task[Any]:
        """Make the task of predicting the next token of the data's rows."""
        return text_task(config, loaded, tell, waits)


def text_row(model: nn.Module, config: Any, sequence_length: int) -> RowFacts:
    """Describe a row of a causal language model, also of one on the meta device.

    `config` is its Hugging Face configuration.
    """
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    intermediate = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    dtype_bytes = _usual_dtype_bytes(model)
    return RowFacts(
        hidden=hidden,
        vocabulary=int(text.vocab_size),
        sequence_length=sequence_length,
        dtype_bytes=dtype_bytes,
        activation_bytes=activation_estimate(hidden, intermediate, sequence_length, dtype_bytes),
    )


def _usual_dtype_bytes(model: nn.Module) -> int:
    """Return the bytes of the dtype of most weights: adapters in fp32 leave activations in bf16."""
    elements: Counter[int] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.element_size()] += parameter.numel()
    return elements.most_common(1)[0][0]


class FullFineTuning(_TextMethod):
    """Every weight is trained, and the whole model saved."""

    usual_rate = 2e-5

    def prepare(self, model: PreTrainedModel, config: RunConfig) -> tuple[ChoiceMade, ...]:
        """Leave the model as it was loaded: every parameter is trained."""
        return ()

    def saved_bytes(self, facts: ModelFacts) -> int:
        """Count all weights."""
        return facts.weight_bytes

    def try_saving(self, loaded: LoadedModel, beside: Path) -> None:
        """Try configuration, generation settings and tokenizer."""
        model, tokenizer = loaded.model, loaded.tokenizer
        try_saving(loaded, lambda to: try_saving_model(model, tokenizer, to, loaded.beside), beside)

    def save(self, loaded: LoadedModel, settings: MethodSettings, folder: Path) -> None:
        """Write the whole model in Hugging Face format."""
        save_model(loaded.model, loaded.tokenizer, folder, loaded.beside)


class LoraFineTuning(_TextMethod):
    """Trains low-rank adapters on frozen weights, and saves the adapters alone."""

    usual_rate = 2e-4

    def prepare(self, model: PreTrainedModel, config: RunConfig) -> tuple[ChoiceMade, ...]:
        """Add adapters to the linear layers, and freeze everything else."""
        from fluxtrain.methods.adapters import attach_adapters

        targets = attach_adapters(model, config.method, config.model)
        count = f"{len(targets.layers):,} layers"
        return (ChoiceMade(name="method.targets", value=count, because=targets.because),)

    def saved_bytes(self, facts: ModelFacts) -> int:
        """Count the trained weights."""
        return facts.trained_bytes

    def try_saving(self, loaded: LoadedModel, beside: Path) -> None:
        """Try generation settings and tokenizer."""
        made_of = (loaded.model, loaded.tokenizer, loaded.beside)
        try_saving(loaded, lambda to: write_adapter_files(to, *made_of), beside)

    def save(self, loaded: LoadedModel, settings: MethodSettings, folder: Path) -> None:
        """Write the adapter in peft's format."""
        from fluxtrain.methods.adapters import save_adapter

        save_adapter(loaded, self.frozen_storage(settings), folder)


class QLoraFineTuning(LoraFineTuning):
    """Trains low-rank adapters on weights packed in 4 or 8 bits
    (https://arxiv.org/abs/2305.14314)."""

    def frozen_storage(self, settings: MethodSettings) -> StorageFormat:
        """Pack frozen weights as the settings say."""
        return settings.base


METHODS: dict[str, Method] = {
    "full": FullFineTuning(),
    "lora": LoraFineTuning(),
    "qlora": QLoraFineTuning(),
}


def usual_rate(config: RunConfig) -> tuple[float, str]:
    """Return the usual peak learning rate of a run, with the reason."""
    if config.model.path == DEMO:
        return FRESH_RATE, "the weights start random"
    if config.method.name == "full":
        return method_of(config).usual_rate, "the weights are trained already"
    return method_of(
        config
    ).usual_rate, "adapters start at zero, so they take larger steps than trained weights"


def method_of(config: RunConfig) -> Method:
    """Return the method that `config` names, for images where its model is an image pipeline; its
    schema has refused every unknown name."""
    if is_pipeline(config.model.path):
        from fluxtrain.methods.image.method import IMAGE_METHODS

        found: Method = IMAGE_METHODS[config.method.name]
        return found
    return METHODS[config.method.name]
