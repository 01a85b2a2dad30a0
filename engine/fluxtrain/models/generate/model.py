"""What decoding needs of a model, whether it was opened for use or is being trained."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.models.loading import LoadedModel


class DecodedModel(Protocol):
    """A model in evaluation mode whose updates were waited for, and its tokenizer."""

    @property
    def model(self) -> PreTrainedModel:
        """Return the model, wrapped or not."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return its tokenizer, with the chat template to use."""

    @property
    def loaded(self) -> LoadedModel:
        """Return how many positions it knows, among other facts."""

    @property
    def device(self) -> torch.device:
        """Return the device that it computes on."""

    @property
    def name(self) -> str:
        """Return its name, for messages."""
