"""Methods: which weights of a model are trained, and what is saved.

`method.name` of a configuration is looked up here and nowhere else. To add a method, write a class
with the members of `Method`, list it in `METHODS`, and name it in `MethodSettings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.config.schema import MethodSettings, RunConfig
from fluxtrain.data.batches import Batch
from fluxtrain.methods.causal_lm import CausalLM
from fluxtrain.methods.objective import Objective
from fluxtrain.models.export import save_model
from fluxtrain.plan.facts import ModelFacts


class Method(Protocol):
    """What a run calls of its method."""

    def prepare(self, model: PreTrainedModel, settings: MethodSettings) -> None:
        """Add the modules of the method to `model`, and set `requires_grad` of every parameter.

        Called before `model` is measured, planned and wrapped. For a plan it is called with a model
        on the meta device, so it must not read weights; the plan counts its facts afterwards.
        """

    def saved_bytes(self, facts: ModelFacts) -> int:
        """Count the bytes that `save` will write, for the check of the disk."""

    def objective(self) -> Objective[Batch]:
        """Return the objective that the method trains for."""

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> None:
        """Write the trained model to `folder`, so that other programs load it.

        Raises NoSpace when the disk fills up.
        """


class FullFineTuning:
    """Every weight is trained, and the whole model saved."""

    def prepare(self, model: PreTrainedModel, settings: MethodSettings) -> None:
        """Leave the model as it was loaded: every parameter is trained."""

    def saved_bytes(self, facts: ModelFacts) -> int:
        """Count all weights."""
        return facts.weight_bytes

    def objective(self) -> Objective[Batch]:
        """Return causal language modelling."""
        return CausalLM()

    def save(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> None:
        """Write the whole model in Hugging Face format."""
        save_model(model, tokenizer, folder)


METHODS: dict[str, Method] = {"full": FullFineTuning()}


def method_of(config: RunConfig) -> Method:
    """Return the method that `config` names; its schema has refused every unknown name."""
    return METHODS[config.method.name]
