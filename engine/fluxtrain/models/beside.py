"""Keeps the files of a model's folder beside its weights, and writes them with the trained ones.

They are carried over as they are: a model that was served from its folder is served from the new
one. Changed are the dtype, the tokens that end answers, the chat template where another was chosen,
and names that transformers 5 has changed, which stand beside the old ones. The files are read with
the model, as their folder may be gone when the training ends.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.models.model_files import TOKENIZER_FILES
from fluxtrain.models.quiet import quiet_transformers
from fluxtrain.models.spelling import model_in_both, tokenizer_in_both

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
TEMPLATES = "additional_chat_templates"  # a folder: further templates of a tokenizer by their names
LARGEST_BYTES = 128 << 20  # of a file that is carried; tokenizers have some ten million
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".py")
_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_LEFT_OUT = (".index.json", "adapter_config.json", "trainer_state.json")
OF_TOKENIZERS = (
    "tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges",
    "spiece", "sentencepiece", "tekken", TEMPLATES,
)  # fmt: skip
_SETTINGS = ("eos_token_id", "pad_token_id")  # that training may set


@dataclass(frozen=True, slots=True)
class Beside:
    """The files and tensors of a model's folder other than the text model's weights, by name."""

    files: Mapping[str, bytes] = field(default_factory=dict)  # none of a fresh model
    template: Any = None  # the tokenizer's, as it was loaded
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # carried; mapped from their files
    untied: bool = False  # config.json says embedding and head are one, and the files hold two

    def json(self, name: str) -> dict[str, Any] | None:
        """Read a file; None where it is missing or no JSON object."""
        try:
            value = json.loads(self.files[name])
        except (KeyError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the tokenizer's own files are among them."""
        return any(name in self.files for name in TOKENIZER_FILES)


def read_beside(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Beside:
    """Read the files to carry over from a model's folder, whose tokenizer was just loaded."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in files_beside(folder)
        if _is_carried(path)
    }
    return Beside(files, getattr(tokenizer, "chat_template", None))


def files_beside(folder: Path) -> list[Path]:
    """List the files of a model's folder, with the templates in their own folder."""
    found = [*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]
    return sorted(path for path in found if path.is_file())


def copy_beside(path: Path, folder: Path, to: Path) -> None:
    """Copy a file of `folder` to the same place in `to`."""
    made = to / path.relative_to(folder)
    made.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, made)


def write_model_files(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, beside: Beside
) -> None:
    """Write configuration, generation settings and tokenizer of a whole model."""
    for name, content in beside.files.items():
        if not name.startswith(OF_TOKENIZERS) and name not in (CONFIG, GENERATION):
            (folder / name).write_bytes(content)
    _write_json(folder / CONFIG, _config_of(model, beside))
    write_adapter_files(folder, model, tokenizer, beside)


def write_adapter_files(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, beside: Beside
) -> None:
    """Write generation settings and tokenizer."""
    settings = generation_settings(model, beside)
    if settings is not None:
        _write_json(folder / GENERATION, settings)
    if tokenizer is not None:
        _write_tokenizer(folder, tokenizer, beside)


def generation_settings(model: PreTrainedModel, beside: Beside) -> dict[str, Any] | None:
    """Return the folder's own generation settings with training's changes; None for a model
    without any.

    transformers itself refuses to write settings that it finds doubtful.
    """
    known: GenerationConfig | None = getattr(model, "generation_config", None)
    if known is None:
        return None
    source = beside.json(GENERATION)
    if source is None:
        made: dict[str, Any] = json.loads(known.to_json_string(use_diff=True))
        return made
    changed = {n: v for n, v in set_of_training(model).items() if v != source.get(n)}
    return {**source, **changed}


def set_of_training(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of generation that training may have set."""
    known = getattr(model, "generation_config", None)
    found = {name: getattr(known, name, None) for name in _SETTINGS}
    return {name: value for name, value in found.items() if _are_tokens(value)}


def _are_tokens(value: object) -> bool:
    """Return whether this is a token, or a list of them; other people's settings hold other things
    too."""
    return all(type(one) is int for one in (value if isinstance(value, list) else [value]))


def _config_of(model: PreTrainedModel, beside: Beside) -> dict[str, Any]:
    """Return the folder's own configuration; that of the model where it is the text model of a
    larger one whose other weights are not carried."""
    known: dict[str, Any] = model.config.to_dict()
    kind = known.get("model_type")
    with quiet_transformers():
        own: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    source = beside.json(CONFIG)
    if source is None or (source.get("model_type") != kind and not beside.tensors):
        source = own
    is_whole = source.get("model_type") == kind
    if not is_whole:
        parts = {key: part for key, part in source.items() if isinstance(part, Mapping)}
        known = {key: known for key, part in parts.items() if part.get("model_type") == kind}
    made = model_in_both(source, known, str(model.dtype).removeprefix("torch."))
    if is_whole and "auto_map" not in source:
        made["architectures"] = [type(model).__name__]
    return untied(made) if beside.untied else made


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that says embedding and head are two matrices, in all of its parts."""
    key = "tie_word_embeddings"
    parts = {name: part for name, part in config.items() if isinstance(part, Mapping)}
    tied = {name: {**part, key: False} for name, part in parts.items() if part.get(key)}
    return {**config, **tied, key: False}


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, beside: Beside) -> None:
    if beside.has_tokenizer:
        for name, content in beside.files.items():
            if name.startswith(OF_TOKENIZERS):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)
    else:
        tokenizer.save_pretrained(folder)
    template: Any = getattr(tokenizer, "chat_template", None)
    chosen = template if template != beside.template and isinstance(template, str) else None
    spell_tokenizer(folder, chosen)
    if chosen is not None:
        (folder / TEMPLATE).write_text(chosen, encoding="utf-8")
        (folder / OLD_TEMPLATE).unlink(missing_ok=True)
        shutil.rmtree(folder / TEMPLATES, ignore_errors=True)


def spell_tokenizer(folder: Path, template: str | None = None) -> None:
    """Write a folder's tokenizer_config.json in both spellings, with another template where one is
    in it and another was chosen; leave the file where nothing changes."""
    settings = _read_json(folder / TOKENIZER)
    if settings is None:
        return
    made = tokenizer_in_both(settings)
    if template is not None and "chat_template" in made:
        made["chat_template"] = template
    if made != settings:
        _write_json(folder / TOKENIZER, made)


def _is_carried(path: Path) -> bool:
    name = path.name
    if name.startswith(".") or name.endswith(_LEFT_OUT) or path.stat().st_size > LARGEST_BYTES:
        return False
    return name.endswith(_SUFFIXES) or name.startswith(_NAMES)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
