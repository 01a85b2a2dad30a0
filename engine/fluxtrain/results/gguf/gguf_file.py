"""Writes a model folder as one GGUF file, a tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.errors import BadInput
from fluxtrain.results.export.base_files import BaseFiles
from fluxtrain.results.gguf.families import Family, Settings, extra_tensors, family_of, stored
from fluxtrain.results.gguf.vocabulary import Vocabulary, vocabulary_of

# By their names on the command line: the type of matrices in the file, and that of embedding and
# head, which count more. What has one dimension stays in fp32.
WRITTEN = {
    "f32": ("F32", "F32"),
    "f16": ("F16", "F16"),
    "bf16": ("BF16", "BF16"),
    "q8_0": ("Q8_0", "Q8_0"),
    "q4_0": ("Q4_0", "Q8_0"),
}
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}  # of llama.cpp
_EDGES = ("token_embd.weight", "output.weight")


def gguf_package() -> Any:
    """Return the package that writes the format; raise BadInput where it is not installed."""
    try:
        return import_module("gguf")
    except ImportError as error:
        raise BadInput(
            "--gguf needs the package gguf: install it with `pip install 'fluxtrain[gguf]'`"
        ) from error


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """A model folder, and how its parts are named in a file."""

    family: Family
    config: Any
    vocabulary: Vocabulary
    base: BaseFiles
    names: Mapping[str, str]  # a parameter's name in the file, by its name in the model

    @classmethod
    def of(
        cls, base: BaseFiles, empty: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> GgufModel:
        """Find the name in the file for each tensor.

        empty: the model on the meta device. Raises BadInput for a model, a tokenizer or a setting
        that llama.cpp would compute in another way.
        """
        config = empty.config
        family = family_of(config, base.files.folder)
        gguf = gguf_package()
        arch = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
        known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        names: dict[str, str] = {}
        for parameter, _ in empty.named_parameters():  # of tied ones the embedding alone
            name = known.get_name(parameter, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise BadInput(
                    f"{base.files.folder}: llama.cpp has no place for {parameter} in a "
                    f"{family.architecture} model"
                )
            names[parameter] = name
        embedding: Any = empty.get_input_embeddings()
        rows = int(embedding.weight.shape[0])
        return cls(
            family=family, config=config, vocabulary=vocabulary_of(tokenizer, rows),
            base=base, names=names,
        )  # fmt: skip

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
        """Yield each name in the file with its shape and what reads its weights."""
        for parameter, name in self.names.items():
            stored_name = self.base.stored_name(parameter)
            assert stored_name is not None, parameter
            read = partial(self._read, stored_name, name)
            yield name, tuple(self.base.stored[stored_name].shape), read
        for name, tensor in extra_tensors(self.config):
            yield name, tuple(tensor.shape), partial(Tensor.clone, tensor)

    def _read(self, stored_name: str, name: str) -> Tensor:
        return stored(self.family, self.config, name, self.base.tensor(stored_name))


def size_bytes(model: GgufModel, kind: str) -> int:
    """Count about the bytes of a file, for the disk."""
    bits = {"f32": 32, "f16": 16, "bf16": 16}.get(kind, 9)
    texts = sum(len(text) + 24 for text in model.vocabulary.tokens)
    elements = sum(math.prod(tensor.shape) for tensor in model.base.stored.values())
    return elements * bits // 8 + 4 * texts + (16 << 20)


def write_gguf(
    path: Path,
    model: GgufModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    *,
    name: str,
    ends: tuple[int, ...],
    tell: Callable[[int, int], None],
) -> None:
    """Write the file.

    kind: of WRITTEN; name: the model's, that programs show; ends: tokens that end an answer;
    tell: called with how many tensors are written, and of how many.
    """
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, model.family.architecture)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write_settings(writer, model.family.architecture, model.family.settings(model.config))
    _write_vocabulary(writer, model.vocabulary, tokenizer, ends)
    tensors = [(_type_of(gguf, *one[:2], kind), *one) for one in model.tensors()]
    for type_, stored_as, shape, _ in tensors:
        block, size = gguf.GGML_QUANT_SIZES[type_]
        count = math.prod(shape) // block * size
        writer.add_tensor_info(stored_as, shape, np.dtype(np.float32), count, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, (type_, _, _, read) in enumerate(tensors):
        tell(done, len(tensors))
        writer.write_tensor_data(gguf.quantize(read().float().contiguous().numpy(), type_))
    writer.close()


def _type_of(gguf: Any, name: str, shape: tuple[int, ...], kind: str) -> Any:
    types = gguf.GGMLQuantizationType
    matrix, edge = WRITTEN[kind]
    wanted = types[edge if name in _EDGES else matrix] if len(shape) > 1 else types.F32
    is_whole = shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
    return wanted if is_whole else types.F16  # as llama.cpp does where a row ends within a block


def _write_settings(writer: Any, architecture: str, settings: Settings) -> None:
    for key, value in settings.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)


def _write_vocabulary(
    writer: Any, vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]
) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pattern)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.model == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_before)
    else:
        writer.add_token_merges(vocabulary.merges)
    begun = tokenizer("a").input_ids
    bos = tokenizer.bos_token_id
    writer.add_add_bos_token(bos is not None and begun[:1] == [bos])
    writer.add_add_eos_token(False)
    given = {
        "bos": bos, "eos": ends[0] if ends else tokenizer.eos_token_id,
        "eot": ends[1] if len(ends) > 1 else None,
        "unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id,
    }  # fmt: skip
    for name, number in given.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    if isinstance(template := tokenizer.chat_template, str):
        writer.add_chat_template(template)
