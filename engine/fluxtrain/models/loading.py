"""Loads a causal language model with its tokenizer: a local folder, a hub id, or the demo.

safetensors maps the weights straight into the parameters, so loading takes no memory besides the
pages of the files. Converted weights (another dtype, merged experts) are copies, but loading never
holds a second copy of the whole model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fluxtrain.data.reading.hub import network_errors, not_kept
from fluxtrain.errors import BadInput, FluxTrainError, panics_refused
from fluxtrain.files.opening import refuse_foreign
from fluxtrain.models.beside import TEMPLATES, Beside, read_beside
from fluxtrain.models.carried import tensors_beside
from fluxtrain.models.copies import Copied, copied_by_loading
from fluxtrain.models.isolation import keeps_documents_apart
from fluxtrain.models.model_files import (
    ModelFiles,
    base_key,
    check_model_folder,
    is_local,
    is_pipeline,
    model_config,
)
from fluxtrain.models.precision import (
    DTYPES,
    Capability,
    Precision,
    choose_dtype,
    demo_dtype,
    with_odd_tensors,
)
from fluxtrain.models.quiet import quiet_transformers

DEMO = "demo"
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Which model to load; the `model` section of a configuration."""

    path: str = DEMO
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    capability: Capability | None = None  # of the GPU that computes; None: a CPU
    seed: int = 0  # for the demo's fresh weights

    @staticmethod
    def of(settings: Any, capability: Capability | None = None, seed: int = 0) -> ModelSource:
        """Return the source that the section `model` of a configuration names."""
        return ModelSource(
            path=settings.path,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=settings.dtype,
            capability=capability,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on the CPU in training mode, and its properties that the data depends on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    config: PretrainedConfig
    precision: Precision
    packs: bool  # whether it can keep packed documents apart
    embedding_rows: int
    max_positions: int | None
    pad_id: int
    merged_bytes: int = 0  # bytes of weights merged from several tensors
    weight_files: tuple[Path, ...] = ()  # none of fresh weights
    base_key: str = ""  # of its weight files (`model_files.base_key`); empty for fresh weights
    beside: Beside = field(default_factory=Beside)  # what its folder holds beside weights
    lost: tuple[str, ...] = ()  # tensors of its files that a saved model will not have


def load_model(
    source: ModelSource,
    fits: Callable[[PreTrainedModel, Copied], None] | None = None,
    *,
    packed_elements: int | None = None,
) -> LoadedModel:
    """Check, load and check again.

    `fits` gets the model without its weights before they are read, and the bytes that will be
    copied; it raises DoesNotFit without room, because a process that runs out of memory is killed.
    Matrices of `packed_elements` and more will be packed, which checks their values as it reads
    them: they are not read here.

    Raises BadInput for everything a user can repair: a wrong name, a damaged or incomplete folder,
    code of its own, quantised weights, weights that are not finite.
    """
    wished = source.dtype
    if wished not in ("auto", *DTYPES):
        raise BadInput(f"model.dtype {wished!r} is not one of auto, {', '.join(DTYPES)}")
    if source.path == DEMO:
        return _demo(source, demo_dtype(wished))
    folder = model_folder(source)
    empty = open_empty(replace(source, path=str(folder)))
    files, choice = empty.files, empty.precision
    assert files is not None, "of a folder"
    dtype, was_tied = empty.model.dtype, _is_tied(empty.model)  # `fits` may change the model
    if fits is not None:
        fits(empty.model, empty.copied)
    tokenizer = tokenizer_of_folder(folder, source.trust_remote_code)
    model, unexpected = _weights(files, dtype, source.trust_remote_code)
    tensors, lost = tensors_beside(files, model)
    is_untied = was_tied and not _is_tied(model)
    beside = read_beside(folder, tokenizer)
    check_finite(model, str(folder), packed_elements)
    loaded = _loaded(model, tokenizer, _name(source.path), choice, empty.copied.merged_bytes)
    return replace(
        loaded,
        weight_files=files.weights,
        base_key=base_key(files.weights),
        beside=replace(beside, tensors=tensors, untied=is_untied),
        lost=tuple(dict.fromkeys((*unexpected, *lost))) if not tensors else (),
    )


def load_empty(source: ModelSource) -> LoadedModel:
    """Load all of a model but its weights: it is on the meta device.

    Raises BadInput as `load_model` does.
    """
    empty = open_empty(source, weightless=True)
    tokenizer, _ = load_tokenizer(source)
    loaded = _loaded(empty.model, tokenizer, _name(source.path), empty.precision)
    if source.path == DEMO:
        return loaded
    folder = model_folder(source, with_weights=False)
    return replace(loaded, beside=read_beside(folder, tokenizer))


def load_tokenizer(source: ModelSource) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """Load the tokenizer and the configuration alone; no weights are read or downloaded.

    Raises BadInput as `load_model` does.
    """
    if source.path == DEMO:
        from fluxtrain.data.demo import demo_files
        from fluxtrain.models.demo_model import demo_config

        tokenizer = tokenizer_of_folder(demo_files().tokenizer, trusted=False)
        return tokenizer, demo_config(len(tokenizer))
    folder, trusted = model_folder(source, with_weights=False), source.trust_remote_code
    if folder == Path(source.path).expanduser():
        check_model_folder(folder, trusted)
    else:
        refuse_foreign(folder)
    return tokenizer_of_folder(folder, trusted), _shape(folder, trusted)


def check_finite(model: nn.Module, name: str, packed_elements: int | None = None) -> None:
    """Raise BadInput if a parameter or buffer holds NaN or infinity. Reads the weights once,
    except matrices of `packed_elements` and more other than embedding and head."""
    edges = {id(p) for module in _edges(model) for p in module.parameters()}
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        large = packed_elements is not None and tensor.numel() >= packed_elements
        if large and tensor.dim() > 1 and id(tensor) not in edges:
            continue
        low, high = torch.aminmax(tensor.detach())  # NaN comes through both
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            raise BadInput(
                f"{name}: the weight {tensor_name} holds {nan} NaN and {infinite} infinite values "
                f"of {tensor.numel():,}: the checkpoint is damaged or its training diverged; "
                "use an earlier one"
            )


def _is_tied(model: nn.Module) -> bool:
    """Return whether embedding and head are one matrix."""
    matrices = [module.weight for module in _edges(model) if hasattr(module, "weight")]
    return len(matrices) == 2 and matrices[0] is matrices[1]


def _edges(model: nn.Module) -> list[nn.Module]:
    """List embedding and head."""
    getters = ("get_input_embeddings", "get_output_embeddings")
    found = [getattr(model, getter, lambda: None)() for getter in getters]
    return [module for module in found if isinstance(module, nn.Module)]


def _demo(source: ModelSource, choice: Precision) -> LoadedModel:
    from fluxtrain.data.demo import demo_files
    from fluxtrain.models.demo_model import demo_model

    tokenizer = tokenizer_of_folder(demo_files().tokenizer, trusted=False)
    model = demo_model(len(tokenizer), source.seed, getattr(torch, choice.dtype))
    return _loaded(model, tokenizer, DEMO, choice)


def model_folder(source: ModelSource, with_weights: bool = True) -> Path:
    """Return the folder of a model, downloaded where it is on the hub alone.

    Raises BadInput where there is none.
    """
    folder = Path(source.path).expanduser()
    if folder.exists():
        return folder
    if is_local(source.path):
        raise BadInput(f"{folder} does not exist: check model.path")
    fetched = _fetched(source, with_weights)
    if is_pipeline(str(fetched)):
        raise BadInput(
            f"{source.path} is an image pipeline, which is trained from a folder of its own: `hf "
            f"download {source.path} --local-dir FOLDER`, then model.path=FOLDER"
        )
    return fetched


def _fetched(source: ModelSource, with_weights: bool) -> Path:
    """Download a hub model, or find it in the local cache; safetensors if it has them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    patterns += ["*.safetensors"] if with_weights else []
    patterns += ["*.py"] if source.trust_remote_code else []
    try:
        folder = snapshot_download(
            source.path, revision=source.revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
        snapshot_download(
            source.path, revision=source.revision, allow_patterns=[f"{TEMPLATES}/*.jinja"]
        )
        if with_weights and not any(Path(folder).glob("*.safetensors")):
            snapshot_download(
                source.path, revision=source.revision, allow_patterns=["pytorch_model*.bin"]
            )
    except GatedRepoError as error:
        raise BadInput(
            f"the model {source.path} is gated: accept its terms on its page, then `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise BadInput(
            f"there is no folder and no hub model {source.path!r} (or it is private): check "
            "model.path, or `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise BadInput(f"the model {source.path} has no revision {source.revision!r}") from error
    except network_errors() as error:  # errors of the hub itself are OSErrors
        raise not_kept(source.path, error) or BadInput(
            f"{source.path!r} is no local folder, and the hub cannot be reached to fetch it: check "
            "the name, the network and its proxy, or name a local folder"
        ) from error
    return Path(folder)


def tokenizer_of_folder(folder: Path, trusted: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder. Raises BadInput where its files are missing or damaged."""
    try:
        with panics_refused(f"{folder}: its tokenizer", "repair it in the model's folder"):
            return AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trusted, local_files_only=True
            )
    except (FluxTrainError, MemoryError):
        raise
    except Exception as error:  # whatever damaged files make the library raise
        if "start new thread" in str(error):
            raise
        raise BadInput(
            f"{folder}: its tokenizer cannot be loaded ({_first_line(error)}): copy the "
            "tokenizer's files of the original model into it"
        ) from error


def _weights(
    files: ModelFiles, dtype: torch.dtype, trusted: bool
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Return the model, and the names of the tensors in its files that it does not use."""
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.folder,
                dtype=dtype,
                trust_remote_code=trusted,
                local_files_only=True,
                use_safetensors=not files.pickled,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the names
            )
    except UnpicklingError as error:
        raise BadInput(
            f"{files.weights[0]} is a pickle with more than tensors in it, which could run any "
            "code: convert it to safetensors where you trust it"
        ) from error
    except (FluxTrainError, MemoryError):
        raise
    except Exception as error:  # whatever damaged files make the library raise
        raise _unloadable(files.folder, error) from error
    model: PreTrainedModel = loaded[0]
    left_out = _check_complete(files, loaded[1], model)
    model.train()
    return model, left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyModel:
    """A model on the meta device, in the dtype that it will be trained in."""

    model: PreTrainedModel
    precision: Precision
    copied: Copied  # what loading its weights will copy
    files: ModelFiles | None  # None: the demo's, or its configuration alone is here


def open_empty(source: ModelSource, *, weightless: bool = False) -> EmptyModel:
    """Make a model without its weights; none of them are downloaded.

    weightless: a folder without weights will do. Raises BadInput where its configuration or a file
    is missing or damaged.
    """
    files: ModelFiles | None = None
    if source.path == DEMO:
        from fluxtrain.data.demo import VOCABULARY
        from fluxtrain.models.demo_model import demo_config

        shape: PretrainedConfig = demo_config(VOCABULARY)
        stored, choice = "", demo_dtype(source.dtype)
    else:
        shape, stored, files = _described(source, weightless)
        choice = choose_dtype(source.dtype, stored, source.capability)
    dtype: torch.dtype = getattr(torch, choice.dtype)
    model = _without_weights(shape, dtype, source.trust_remote_code, source.path)
    copied = copied_by_loading(model, files, stored)
    choice = with_odd_tensors(choice, copied.odd_dtypes)
    return EmptyModel(model=model, precision=choice, copied=copied, files=files)


def _described(
    source: ModelSource, weightless: bool
) -> tuple[PretrainedConfig, str, ModelFiles | None]:
    """Return the configuration of a folder or hub model, the dtype of its stored weights, and its
    files where they are examined."""
    folder, trusted = model_folder(source, with_weights=False), source.trust_remote_code
    is_here = folder == Path(source.path).expanduser()
    if is_here and not (weightless and (folder / "config.json").exists()):
        files = check_model_folder(folder, trusted)
        return _shape(folder, trusted), files.dtype or "float32", files
    model_config(folder)
    shape = _shape(folder, trusted)
    return shape, str(shape.dtype or torch.float32).removeprefix("torch."), None


def empty_model(folder: Path, dtype: torch.dtype, trusted: bool) -> PreTrainedModel:
    """Return the model of a folder with its parameters on the meta device.

    Raises BadInput where its configuration is damaged.
    """
    return _without_weights(_shape(folder, trusted), dtype, trusted, folder)


def _without_weights(
    shape: PretrainedConfig, dtype: torch.dtype, trusted: bool, where: Path | str
) -> PreTrainedModel:
    try:
        with quiet_transformers(), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                shape, dtype=dtype, trust_remote_code=trusted
            )
    except (FluxTrainError, MemoryError):
        raise
    except Exception as error:  # whatever a damaged configuration makes the library raise
        raise _unloadable(where, error) from error
    return model


def _shape(folder: Path, trusted: bool) -> PretrainedConfig:
    try:
        with quiet_transformers():
            shape: PretrainedConfig = AutoConfig.from_pretrained(
                folder, trust_remote_code=trusted, local_files_only=True
            )
    except (FluxTrainError, MemoryError):
        raise
    except Exception as error:  # whatever a damaged configuration makes the library raise
        raise _unloadable(folder, error) from error
    return shape


def _unloadable(folder: Path | str, error: Exception) -> Exception:
    """Return an error that says what is wrong with the folder; `error` itself if memory ran out."""
    words = str(error)
    if any(text in words for text in ("allocate memory", "out of memory", "start new thread")):
        return error
    return BadInput(f"{folder} cannot be loaded as a causal language model: {_first_line(error)}")


def _check_complete(files: ModelFiles, told: dict[str, Any], model: nn.Module) -> tuple[str, ...]:
    """Return the tensors of the files that the model does not use. Raises BadInput if the files
    lack tensors of the model, or the model has fewer blocks than its files."""
    for key, problem in (
        ("missing_keys", "does not hold the weights"),
        ("mismatched_keys", "holds in another shape than config.json says"),
    ):
        found = told.get(key, ())
        names = sorted(name if isinstance(name, str) else name[0] for name in found)
        if names:
            raise BadInput(
                f"{files.folder} {problem} {_first_names(names)}: "
                "config.json and weights are of different models"
            )
    left_out = tuple(sorted(told.get("unexpected_keys", ())))
    if cut := further_blocks(model, left_out):
        raise BadInput(
            f"{files.folder} holds {_first_names(cut)} too, and config.json is of a model with "
            "fewer blocks: it would be trained and saved without them; copy the config.json of "
            "these weights into the folder"
        )
    return left_out


def further_blocks(model: nn.Module, left_out: Iterable[str]) -> list[str]:
    """Return the ignored tensors that belong to whole further blocks: with a number that no block
    of the model has, and with no tensor that its blocks do not have.

    A block for predicting several tokens (DeepSeek-V3's, GLM's) is stored under the next number and
    ignored on purpose; it has tensors that the other blocks lack.
    """
    own = defaultdict[str, set[str]](set)  # by the list's name: numbers of its blocks
    kinds = set()
    for name in _names(model):
        if found := _placed(name):
            place, number, kind = found
            own[place].add(number)
            kinds.add((place, kind))
    further = defaultdict[tuple[str, str], list[tuple[str, str]]](list)
    for name in left_out:
        if found := _placed(name):
            place, number, kind = found
            if place in own and number not in own[place]:
                further[place, number].append((name, kind))
    return sorted(
        name
        for (place, _), tensors in further.items()
        if all((place, kind) in kinds for _, kind in tensors)
        for name, _ in tensors
    )


def _placed(name: str) -> tuple[str, str, str] | None:
    """Return the list of a tensor's block, the block's number in it, and the rest of the name
    without other numbers; None if the tensor is in no list."""
    number = _NUMBER.search(name)
    if number is None:
        return None
    return name[: number.start()], number.group(), _NUMBER.sub("#", name[number.end() :])


def _names(model: nn.Module) -> Iterator[str]:
    """Return the names of parameters and buffers, with and without the inner model's prefix."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    for name in model.state_dict():
        yield name
        yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _loaded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    choice: Precision,
    merged_bytes: int = 0,
) -> LoadedModel:
    embedding: Any = model.get_input_embeddings()
    text_config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        config=model.config,
        precision=choice,
        packs=model.device.type != "meta" and keeps_documents_apart(model),
        embedding_rows=(rows := int(embedding.weight.shape[0])),
        max_positions=getattr(text_config, "max_position_embeddings", None),
        pad_id=filler if (filler := pad_id(tokenizer)) in range(rows) else 0,
        merged_bytes=merged_bytes,
    )


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that fills rows; it is never trained on."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return int(next((i for i in known if i is not None), 0))


def _name(path: str) -> str:
    return Path(path).expanduser().resolve().name if Path(path).expanduser().exists() else path


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    if isinstance(error, OSError | ValueError | RuntimeError) and lines:
        return lines[0]
    return ": ".join((kind, *(line.rstrip(":") for line in lines[:2])))
