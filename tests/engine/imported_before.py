"""What forked processes have imported, as quickly as the commands do it."""

from __future__ import annotations

from importlib import import_module

from fluxtrain.commands.importing import Importing

with Importing():
    for name in (
        "fluxtrain.commands.doctor.self_test",
        "fluxtrain.train.run",
        "pytest",
        "peft",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
    ):
        import_module(name)
