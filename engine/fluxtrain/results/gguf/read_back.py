"""Reads a GGUF file back with transformers' own loader, and compares it with its model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from fluxtrain.config.schema import RunConfig
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.errors import Disagrees, DoesNotFit
from fluxtrain.events.answers.answers import ComparedLogits
from fluxtrain.machine.machine import memory_left
from fluxtrain.models.loading import ModelSource, load_model
from fluxtrain.models.quiet import quiet_transformers
from fluxtrain.results.adapter.chosen_base import ExportRequest
from fluxtrain.results.export.agreement import agreement, unit_roundoff
from fluxtrain.results.export.gate import MOST_TOKENS, compared_rows, streamed_logits
from fluxtrain.results.gguf.families import head_size, rope
from fluxtrain.results.gguf.gguf_file import GgufModel
from fluxtrain.results.gguf.vocabulary import Vocabulary, rebuilt
from fluxtrain.units import GIB

# The most that a matrix may differ from the model's, relative to it, by how many bits its type has.
_LIMITS = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3, "q8_0": 0.02, "q6_k": 0.05, "q5_k": 0.1}
_LARGEST = 0.4  # of fewer bits; a wrong order of rows makes it 1.4
_TRIED = (
    "Hello  world! It's 12345 o'clock, isn't it?\n\n\tdef f(x): return x**2  # naïve café ÅNGSTRÖM"
    " — 日本語のテキスト, русский 🙂 don't WE'LL\r\n   end "
)


def compared(
    request: ExportRequest,
    model: GgufModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    run: RunConfig | None,
    tell: Callable[[str], None],
) -> ComparedLogits:
    """Compare settings, tokens, weights and logits.

    Raises Disagrees for what quantisation does not explain, DoesNotFit where host memory lacks.
    """
    kind = path.stem.rpartition("-")[2]
    tell(f"reading {path.name} back")
    refuse_too_large(model)
    with quiet_transformers():
        read: dict[str, Any] = load_gguf_checkpoint(str(path))  # type: ignore[no-untyped-call]
    refuse_other_settings(read["config"], model)
    file = rebuilt(vocabulary_read(read["tokenizer"], model.vocabulary.pattern))
    refuse_other_tokens(file, tokenizer, _TRIED)
    tell("computing the model")
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(
        ModelSource(path=str(model.base.files.folder), trust_remote_code=request.trust_remote_code)
    )
    longest = min(MOST_TOKENS, model.family.settings(model.config)["context_length"])
    rows = compared_rows(loaded, request.data, run, request.rows, longest)
    for ids in rows.inputs["input_ids"]:
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        refuse_other_tokens(file, tokenizer, text)
    dtype, blocks = loaded.model.dtype, len(take_apart(loaded.model).blocks)
    expected = streamed_logits(loaded.model, rows, device, "plain")
    del loaded
    gc.collect()
    tell(f"computing {path.name}")
    back = _read_back(path, model, dtype)
    off = largest_difference(back, model, kind)
    found = streamed_logits(back, rows, device, "plain")
    roundoff = max(unit_roundoff(dtype), off)
    return agreement(expected, found, roundoff, blocks, source=rows.source, rows=rows.rows)


def refuse_too_large(model: GgufModel) -> None:
    """Raise DoesNotFit where transformers' loader would need more host memory than there is: it
    holds all weights at once."""
    needed = 2 * model.base.files.weight_bytes  # as they are read, and in the model
    left = memory_left()
    if left is not None and needed > left[1]:
        raise DoesNotFit(
            f"to read the file back needs {needed / GIB:.1f} GiB of host memory and "
            f"{left[1] / GIB:.1f} GiB is free: close other programs, or leave the check out with "
            "--no-check"
        )


def _read_back(path: Path, model: GgufModel, dtype: torch.dtype) -> PreTrainedModel:
    """Load with transformers, which makes weights of the file; settings that it does not read from
    one are the model's own."""
    config = model.config
    if kind := model.family.read_as:
        same = {key: value for key, value in config.to_dict().items() if key != "model_type"}
        config = AutoConfig.for_model(kind, **same)
    with quiet_transformers(), redirect_stderr(StringIO()):  # for a bar that has no switch
        found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=config, dtype=dtype
        )
    return found


def refuse_other_settings(read: Mapping[str, Any], model: GgufModel) -> None:
    """Raise Disagrees where the settings that transformers reads are not the model's."""
    config = model.config
    known = {**config.to_dict(), "rope_theta": rope(config)["rope_theta"],
             "head_dim": head_size(config)}  # fmt: skip
    known["max_position_embeddings"] = model.family.settings(config)["context_length"]
    for key, value in read.items():
        mine = known.get(key)
        if key.endswith("_token_id") or not isinstance(mine, int | float):
            continue
        if isinstance(value, int | float) and abs(value - mine) > 1e-6 * abs(mine):
            raise Disagrees(
                f"the file's {key} is {value} and the model's {mine}; nothing was written: report "
                "this, with the model's config.json"
            )


def vocabulary_read(read: Mapping[str, Any], pattern: str) -> Vocabulary:
    """Return the tokenizer's part of a file, as transformers reads it; it passes over `pattern`."""
    return Vocabulary(
        model=read["tokenizer_type"], pattern=pattern, tokens=read["tokens"],
        kinds=read["token_type"], merges=read.get("merges", []), scores=read.get("scores", []),
        space_before=bool(read.get("add_prefix_space", False)),
    )  # fmt: skip


def refuse_other_tokens(file: FastTokenizer, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Raise Disagrees where the file tokenizes a text otherwise than the model's tokenizer.

    read: the tokenizer's part of the file, as transformers reads it.
    """
    mine = tokenizer(text, add_special_tokens=False).input_ids
    found = file.encode(text, add_special_tokens=False).ids
    if mine != found:
        at = next((i for i, (a, b) in enumerate(zip(mine, found, strict=False)) if a != b), 0)
        some, others = mine[at : at + 3], found[at : at + 3]
        raise Disagrees(
            f"the file's tokens are not the model's: {tokenizer.decode(some)!r} is {some} and not "
            f"{others}; nothing was written: convert the model with llama.cpp's own script, "
            "convert_hf_to_gguf.py"
        )


def largest_difference(back: PreTrainedModel, model: GgufModel, kind: str) -> float:
    """Return by how much a weight of the model read back differs at most, relative to it.

    Raises Disagrees where that is more than its type explains.
    """
    limit = next((most for name, most in _LIMITS.items() if kind.startswith(name)), _LARGEST)
    worst, largest = "", 0.0
    found = back.state_dict()
    for parameter in model.names:
        stored_name = model.base.stored_name(parameter)
        assert stored_name is not None, parameter
        wanted = model.base.tensor(stored_name).float()
        difference = float((found[parameter].float() - wanted).norm() / (wanted.norm() + 1e-30))
        if not difference <= largest:  # NaN is the largest
            worst, largest = parameter, difference
    if not largest <= limit:
        raise Disagrees(
            f"{worst} of the file differs by {largest:.2e} of itself, where {kind} explains "
            f"{limit:.2e}; nothing was written: report this, with the model's config.json"
        )
    return largest
