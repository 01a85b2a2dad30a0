"""Checks a model folder in Hugging Face format by its files, before anything is loaded.

Standard library only: sizes, dtypes and damage are read from config.json and from the headers of
the safetensors shards (https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON
header with each tensor's offsets, then the data).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.files.opening import read_plain, refuse_foreign
from fluxtrain.units import bytes_text

HEADER_LIMIT_BYTES = 100_000_000  # the safetensors library refuses longer ones too
IMAGE_DEMO = "demo-image-edit"  # a pipeline and pairs that are made when they are first used
PIPELINE_INDEX = "model_index.json"  # of diffusers
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip
SAMPLES = 64  # of each weight file, for its key
SAMPLE_BYTES = 1 << 16
MOST_LAYERS = 4096  # four times as many as the deepest models have
_LAYER_KEY = re.compile(r"(^|_)(layers?|depth)$")  # num_hidden_layers, decoder_layers, n_layer
_DEEPEST_PART = 4  # of a configuration within others
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx")
_KERNEL_KEYS = ("attn_implementation", "_attn_implementation")  # may name a hub repository
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FLOATS = frozenset(_DTYPE_NAMES.values())  # dtypes that a model is trained from


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    dtype: str  # torch's name, or the file's for a dtype that no model is trained in
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The facts in the files of a model folder."""

    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]  # shards, safetensors or pickled
    pickled: bool
    parameters: int | None  # None for pickled weights: only loading tells
    weight_bytes: int
    dtype: str | None  # what most parameters are stored in, as torch names it
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)  # none of pickled weights


def is_local(path: str) -> bool:
    """Return whether a model's path can only be one of this machine, and no name on a hub.

    It is where it looks like a path or a file of weights, or begins in a folder that is here.
    """
    if path.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(path):
        return True
    first, slash, _ = path.partition("/")
    return path.lower().endswith(_WEIGHT_SUFFIXES) or (bool(slash) and Path(first).is_dir())


def is_pipeline(path: str) -> bool:
    """Return whether a model's path is a folder of an image pipeline, or of a part of one."""
    if path == IMAGE_DEMO:
        return True
    folder = Path(os.path.expanduser(path))  # which leaves the home of nobody as it is
    parts = (PIPELINE_INDEX, "transformer/config.json")
    return not (folder / "config.json").exists() and any((folder / p).is_file() for p in parts)


def read_ahead(path: str) -> None:
    """Let the system read the weights of a local model folder into its memory while packages are
    imported: weights are mapped, and pages that are read only when they are needed come slowly.

    Nothing is read where they take more than half of the available memory, which the run needs.
    """

    def read() -> None:
        import psutil

        try:
            files = _weight_files(Path(path).expanduser())[0]
            size = sum(file.stat().st_size for file in files)
            for file in files if size < psutil.virtual_memory().available // 2 else ():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except (OSError, FluxTrainError):
            return  # loading the model tells what is wrong with its files

    threading.Thread(target=read, name="read-ahead", daemon=True).start()


def check_model_folder(folder: Path, trust_remote_code: bool = False) -> ModelFiles:
    """Read and check a model folder.

    Raises BadInput naming the file and the cure: no config.json, no tokenizer, code of its own,
    quantised weights, a missing, truncated or damaged shard.
    """
    config = model_config(folder)
    _refuse_remote_code(folder, config, trust_remote_code)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise BadInput(
            f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): "
            "copy the tokenizer's files of the original model into it"
        )
    weights, pickled = _weight_files(folder)
    if pickled:
        size_bytes = sum(path.stat().st_size for path in weights)
        stated = config.get("dtype") or config.get("torch_dtype")
        return ModelFiles(
            folder=folder, config=config, weights=weights, pickled=True, parameters=None,
            weight_bytes=size_bytes, dtype=stated,
        )  # fmt: skip
    headers = {path: safetensors_header(path) for path in weights}
    _check_index(folder, headers)
    counts: Counter[str] = Counter()
    for header in headers.values():
        for tensor in header.values():
            counts[tensor["dtype"]] += prod(tensor["shape"])
    return ModelFiles(
        folder=folder,
        config=config,
        weights=weights,
        pickled=False,
        parameters=counts.total(),
        weight_bytes=sum(_data_bytes(header) for header in headers.values()),
        dtype=_common_dtype(folder, counts),
        tensors={
            name: StoredTensor(_DTYPE_NAMES.get(t["dtype"], t["dtype"]), tuple(t["shape"]))
            for header in headers.values()
            for name, t in header.items()
        },
    )


def safetensors_header(path: Path) -> dict[str, Any]:
    """Read a safetensors file's tensors: name -> {dtype, shape, data_offsets}, without metadata.

    Raises BadInput if the file is no safetensors file, or not as long as its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise BadInput(
                f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder"
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or (length <= HEADER_LIMIT_BYTES and 8 + length > size):
            raise BadInput(
                f"{path} is cut off: it has {size:,} bytes and its header alone needs "
                f"{8 + length:,}; copy or download it again"
            )
        header = _parsed_header(path, file.read(length) if length <= HEADER_LIMIT_BYTES else b"")
    header.pop("__metadata__", None)
    needed = 8 + length + _data_bytes(header)
    if needed != size:
        state = "cut off" if size < needed else "longer than its header says"
        raise BadInput(
            f"{path} is {state}: it has {size:,} bytes ({bytes_text(size)}) and its header "
            f"describes {needed:,} ({bytes_text(needed)}); copy or download it again"
        )
    return header


def _parsed_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
        for name, tensor in header.items():
            if name != "__metadata__":
                dtype, shape, (first, last) = (
                    tensor["dtype"], tensor["shape"], tensor["data_offsets"],
                )  # fmt: skip
                # whole numbers as the library reads them: it takes neither 0.0 nor false
                sizes_known = all(_is_size(size) for size in (*shape, first, last))
                sound = isinstance(dtype, str) and sizes_known and first <= last
                if not sound or (dtype in _BYTES and last - first != _BYTES[dtype] * prod(shape)):
                    raise ValueError(f"{name}: {dtype} {shape} at {first}..{last}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"{path} is not a safetensors file or its header is damaged: download it again"
        ) from error
    return dict(header)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _data_bytes(header: dict[str, Any]) -> int:
    return max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)


def model_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder.

    Raises BadInput if it is missing or damaged, of quantised weights or of impossible sizes.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is a file: name the folder that holds config.json")
    refuse_foreign(folder)
    path = folder / "config.json"
    if not path.exists():
        if (folder / "adapter_config.json").exists():
            raise BadInput(f"{folder} holds an adapter, not a model: name its base model")
        if any(folder.glob("*.gguf")):
            raise BadInput(
                f"{folder} holds GGUF files, which are for inference: name the original model "
                "in Hugging Face format"
            )
        raise BadInput(f"{folder} has no config.json: it is not a model in Hugging Face format")
    _refuse_adapter_beside(folder)
    config = _json_object(path)
    if "model_type" not in config:
        raise BadInput(f"{path} has no `model_type`: it is not a model's configuration")
    refuse_impossible_sizes(config, str(path))
    refuse_quantised(config, str(folder))
    return config


def _refuse_adapter_beside(folder: Path) -> None:
    """Raise BadInput for an adapter in a model's folder: transformers silently loads it with the
    model, whose weights may not be its base."""
    beside = folder / "adapter_config.json"
    if not beside.exists():
        return
    base = _json_object(beside).get("base_model_name_or_path")
    raise BadInput(
        f"{folder} holds a model and an adapter of {base} ({beside.name}), which would be loaded "
        f"on it unasked: move {beside.name} away to take the model alone, or name the adapter's "
        "base as the model"
    )


class QuantisedWeights(BadInput):
    """A model whose weights are quantised."""


def refuse_quantised(config: Mapping[str, Any], where: str) -> None:
    """Raise QuantisedWeights, naming `where`, for a configuration of quantised weights."""
    if (quantised := config.get("quantization_config")) is None:
        return
    named = isinstance(quantised, Mapping)
    method = quantised.get("quant_method", "unknown") if named else "unknown"
    raise QuantisedWeights(
        f"{where} is quantised ({method}), and training needs bf16 or fp32 weights: "
        "name the original, unquantised model"
    )


def refuse_impossible_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raise BadInput, naming `where`, for a configuration without vocabulary or width, or with more
    than `MOST_LAYERS` layers by whatever word (also in a part, such as its text model): every layer
    is made before anything else is known of the model."""
    for key in ("vocab_size", "hidden_size"):
        told = config.get(key)
        if isinstance(told, int) and told < 1:
            raise BadInput(f"{where} says {key} = {told}: copy or download it again")
    for part in _parts(config):
        for key, told in part.items():
            counted = len(told) if key == "layer_types" and isinstance(told, list) else told
            is_count = key == "layer_types" or _LAYER_KEY.search(str(key)) is not None
            if is_count and isinstance(counted, int | float) and counted > MOST_LAYERS:
                raise BadInput(
                    f"{where} says {key} = {counted:,}, and models of up to {MOST_LAYERS:,} layers "
                    "can be trained: copy or download it again"
                )


def _parts(config: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    yield config
    if depth < _DEEPEST_PART:
        for part in config.values():
            if isinstance(part, Mapping):
                yield from _parts(part, depth + 1)


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadInput(f"{path} is not a file: copy or download it again")
    try:
        value = json.loads(read_plain(path, follow=True))  # links that leave were refused
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON ({error}): copy or download it again") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} is not a JSON object: copy or download it again")
    return value


def _refuse_remote_code(folder: Path, config: dict[str, Any], trusted: bool) -> None:
    if trusted:
        return
    asking = ["config.json"] if "auto_map" in config else []
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.exists() and "auto_map" in _json_object(tokenizer):
        asking.append(tokenizer.name)
    if kernel := _kernel_of_the_hub(config):
        raise BadInput(
            f"{folder} wants to run an attention kernel from the hub ({kernel} in config.json): "
            "remove that line, or set model.trust_remote_code to true"
        )
    if asking:
        raise BadInput(
            f"{folder} wants to run Python code of its own (`auto_map` in {', '.join(asking)}): "
            "read that code, then set model.trust_remote_code to true; or remove `auto_map` if "
            f"transformers has its own {config['model_type']!r}"
        )


def _kernel_of_the_hub(config: dict[str, Any]) -> str:
    """Return the setting that names a repository of kernels, also of a part such as the text model;
    "" for none."""
    left: list[Any] = [config]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            named = [key for key in _KERNEL_KEYS if "/" in str(part.get(key, ""))]
            if named:
                return f"{named[0]} = {part[named[0]]!r:.200}"
            left += part.values()
        elif isinstance(part, list):
            left += part
    return ""


def _weight_files(folder: Path) -> tuple[tuple[Path, ...], bool]:
    """Return the shards to load, and whether they are pickles."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{suffix}.index.json"
        if index.exists():
            names = sorted(set(_weight_map(index).values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise BadInput(
                    f"{folder} lacks {len(missing)} of {len(names)} shards that {index.name} "
                    f"names, first {missing[0]}: copy or download the folder again"
                )
            return tuple(folder / name for name in names), suffix == "bin"
        if (folder / f"{stem}.{suffix}").is_file():
            return (folder / f"{stem}.{suffix}",), suffix == "bin"
    raise BadInput(
        f"{folder} has no weights (model.safetensors or its index, or pytorch_model.bin)"
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index} has no `weight_map`: copy or download it again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise BadInput(f"{index} names the shard {name!r}, which is not a file of this folder")
    return weight_map


def _check_index(folder: Path, headers: dict[Path, dict[str, Any]]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    for tensor, name in _weight_map(index).items():
        if tensor not in headers[folder / name]:
            raise BadInput(
                f"{folder / name} lacks the tensor {tensor} that the index places there: "
                "the shards are of different models; copy or download the folder again"
            )


def _common_dtype(folder: Path, counts: Counter[str]) -> str:
    if not counts:
        raise BadInput(f"{folder} has weight files without any tensor in them")
    stored, _ = counts.most_common(1)[0]
    if stored not in _DTYPE_NAMES:
        raise BadInput(
            f"{folder} stores its weights as {stored}, and full training needs bf16 or fp32: "
            "name the original, unquantised model"
        )
    return _DTYPE_NAMES[stored]


def base_key(files: Iterable[Path]) -> str:
    """Return a key (16 hexadecimal digits) of weight files, whatever their names and folder.

    A checkpoint of adapters holds no frozen weights, so it must not go on beside others. Reading
    all of 141 GB would take a minute: the key is of the files' sizes, their headers (names, shapes,
    dtypes) and samples of their bytes. Raises OSError when a file cannot be read.
    """
    digests = sorted(_digest(path) for path in files)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(str(size).encode())
    step = max(SAMPLE_BYTES, size // SAMPLES)
    with path.open("rb") as file:
        for start in (*range(0, size, step), max(0, size - SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
