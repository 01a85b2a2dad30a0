"""What a model folder holds, read from config.json and the headers of its safetensors files.

No torch and no weights are read: a header lists every tensor's type, shape and place, so the
number of parameters is exact and a truncated file shows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput
from fluxtrain.units import bytes_text, count_text

_HEADER_LIMIT_BYTES = 100_000_000  # the safetensors format's own limit
_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64", "F8_E4M3": "fp8"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model as its folder describes it. `None` means that the folder does not say."""

    name: str
    architecture: str
    dtype: str
    parameters: int
    blocks: int | None
    hidden: int | None
    vocabulary: int | None
    context: int | None
    weights_bytes: int
    licence: str | None
    warnings: tuple[str, ...] = ()

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Name and value of every fact that the folder tells."""
        rows = (
            ("architecture", self.architecture),
            ("parameters", count_text(self.parameters)),
            ("blocks", f"{self.blocks} of width {self.hidden}" if self.blocks else ""),
            ("weights", f"{self.dtype}, {bytes_text(self.weights_bytes)}"),
            ("context", f"{self.context:,} tokens" if self.context else ""),
            ("licence", self.licence or ""),
        )
        return tuple((name, value) for name, value in rows if value)


@dataclasses.dataclass(frozen=True)
class _Weights:
    parameters: int
    dtype: str
    bytes: int


def read_model_folder(folder: str) -> ModelFacts:
    """Describe a folder in the Hugging Face format.

    Raises:
        BadInput: it is not a folder, config.json is missing or broken, weights are missing,
            truncated, quantised or pickled only, or the model asks to run its own code.
    """
    path = Path(folder).expanduser()
    if not folder.strip():
        raise BadInput("type the path of a folder that holds config.json and *.safetensors")
    if not path.is_dir():
        what = "a file, not a folder" if path.exists() else "not there"
        raise BadInput(f"{path} is {what}")
    config = _read_config(path)
    _refuse_untrainable(path, config)
    weights = _read_weights(path)
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    return ModelFacts(
        name=path.resolve().name,
        architecture=str(architectures[0]),
        dtype=weights.dtype,
        parameters=weights.parameters,
        blocks=_first_int(config, "num_hidden_layers", "n_layer", "num_layers"),
        hidden=_first_int(config, "hidden_size", "n_embd", "d_model"),
        vocabulary=_first_int(config, "vocab_size"),
        context=_first_int(config, "max_position_embeddings", "n_positions", "n_ctx"),
        weights_bytes=weights.bytes,
        licence=_licence(path),
        warnings=_warnings(path),
    )


def cached_hub_folder(hub_id: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The newest snapshot of a hub model that is already on this machine, if there is one."""
    home = environment.get("HF_HOME") or str(
        Path(environment.get("HOME", "~")) / ".cache/huggingface"
    )
    cache = Path(environment.get("HF_HUB_CACHE") or str(Path(home) / "hub")).expanduser()
    snapshots = cache / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    folders = [path for path in snapshots.glob("*") if (path / "config.json").exists()]
    return max(folders, key=lambda path: path.stat().st_mtime, default=None)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{folder} has no config.json: is it a Hugging Face model?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path} must hold a JSON object")
    text = config.get("text_config")  # vision-language models keep the language part there
    return {**text, **config} if isinstance(text, dict) else config


def _refuse_untrainable(folder: Path, config: Mapping[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        kind = (
            quantisation.get("quant_method", "quantised") if isinstance(quantisation, dict) else ""
        )
        raise BadInput(f"{folder.name} is quantised ({kind}): full training needs the full weights")
    if config.get("auto_map"):
        raise BadInput(
            f"{folder.name} asks to run Python code of its own: read that code, then start with a "
            "configuration that says model.trust_remote_code: true"
        )


def _read_weights(folder: Path) -> _Weights:
    shards = _shards(folder)
    if not shards:
        pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
        if pickled:
            raise BadInput(
                f"{folder.name} has only pickled weights ({pickled[0].name}), which can run code "
                "when they are loaded: save them as safetensors first"
            )
        raise BadInput(f"{folder.name} has no weights: no *.safetensors in it")
    bytes_by_dtype: Counter[str] = Counter()
    parameters = 0
    for shard in shards:
        for tensor in _read_header(shard).values():
            count = math.prod(tensor["shape"])
            start, end = tensor["data_offsets"]
            parameters += count
            bytes_by_dtype[tensor["dtype"]] += end - start
    dominant = bytes_by_dtype.most_common(1)
    dtype = _DTYPES.get(dominant[0][0], dominant[0][0].lower()) if dominant else "no tensors"
    return _Weights(parameters, dtype, sum(bytes_by_dtype.values()))


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{index.name} is broken ({error}): download it again") from None
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise BadInput(
            f"{len(missing)} of {len(names)} weight files are missing, first {missing[0]}: "
            "download the model again"
        )
    return [folder / name for name in names]


def _read_header(shard: Path) -> dict[str, dict[str, Any]]:
    """The tensors of one safetensors file; the file must be as long as its header says."""
    broken = BadInput(f"{shard.name} is not a safetensors file: download it again")
    try:
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _HEADER_LIMIT_BYTES:
                raise broken
            header = json.loads(file.read(length))
        actual_bytes = shard.stat().st_size
        header.pop("__metadata__", None)
        ends = [int(tensor["data_offsets"][1]) for tensor in header.values()]
    except OSError as error:
        raise BadInput(f"{shard.name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise broken from None
    expected_bytes = 8 + length + max(ends, default=0)
    if actual_bytes < expected_bytes:
        raise BadInput(
            f"{shard.name} is truncated: {bytes_text(actual_bytes)} of "
            f"{bytes_text(expected_bytes)}: download it again"
        )
    return dict(header)


def _first_int(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _licence(folder: Path) -> str | None:
    """The licence named in the front matter of the model card."""
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as card:
            head = card.read(4096)
    except OSError:
        return None
    for line in head.splitlines():
        if line.startswith("license:"):
            return line.partition(":")[2].strip().strip("'\"") or None
    return None


def _warnings(folder: Path) -> tuple[str, ...]:
    if any((folder / name).exists() for name in _TOKENIZER_FILES):
        return ()
    return ("no tokenizer in this folder: text cannot be turned into tokens",)
