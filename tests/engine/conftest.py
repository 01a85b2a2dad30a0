"""Tiny models in real Hugging Face folders: random weights, a tokenizer, a chat template."""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fluxtrain import _native
from fluxtrain.commands import preview
from fluxtrain.core.updates import updates
from fluxtrain.core.wrap.engine import Engine
from fluxtrain.data.demo import train_tokenizer
from fluxtrain.events.answers.machine import Machine
from fluxtrain.machine.machine import read_machine
from tests.engine import forked
from tests.engine.deferred_models import Hold
from tests.engine.half_models import half_model
from tests.engine.images import Images

RATES = {"cpu_matmul": 1e11, "adamw": 1e9, "adamw_8bit": 1e9, "host_copy": 1e10}  # of a machine
VOCABULARY = 320
SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a model is trained block by block, and each block is streamed through the device",
    "what is two and two? it is four, and three and three is six",
] * 20


def _llama_shape(tied: bool) -> dict[str, object]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A two-block model of `family` (llama, qwen2, qwen3, gpt2) with fixed random weights."""
    torch.manual_seed(7)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**_llama_shape(tied=False)))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_llama_shape(tied=True)))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_llama_shape(tied=True), head_dim=8))
    elif family == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    else:
        raise ValueError(family)
    return model.to(dtype)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained byte-level BPE with a chat template that marks the assistant's tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(SENTENCES, folder, VOCABULARY)
    return folder


@pytest.fixture(scope="session")
def _model_folders(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path
) -> Callable[[str, torch.dtype], Path]:
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder_of(family: str, dtype: torch.dtype) -> Path:
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(family) / "model"
            shutil.copytree(tokenizer_folder, folder)
            tiny_model(family, dtype).save_pretrained(folder)
            made[family, dtype] = folder
        return made[family, dtype]

    return folder_of


@pytest.fixture
def model_folder(
    _model_folders: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> Callable[..., Path]:
    """`model_folder(family, dtype)`: a fresh copy of a tiny model's folder, to damage at will."""

    def fresh(family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
        folder = tmp_path / f"{family}-{str(dtype).removeprefix('torch.')}"
        shutil.copytree(_model_folders(family, dtype), folder)
        return folder

    return fresh


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """A tiny image pipeline in its real layout, and pairs of images."""
    pytest.importorskip("diffusers")
    return Images(tmp_path_factory.mktemp("images"))


# -- small models of seven families, for the streaming engine's tests -----------------------------


@pytest.fixture(scope="module", autouse=True)
def _imports_out_of_the_collectors_way() -> None:
    """`wrap` collects garbage; without what torch and transformers hold, that takes no time."""
    gc.collect()
    gc.freeze()  # for each module: those before it imported more


@pytest.fixture(scope="session", autouse=True)
def _folder_of_forked_processes() -> None:
    """Made before a test counts what is in a temporary folder of its own."""
    get_temp_dir()


@pytest.fixture(scope="module", autouse=True)  # gone before a test of another folder runs
def _short_runs() -> Iterator[None]:
    """Shorten calibration and samples of a run, and leave out measuring before a plan.

    Processes that tests start anew, not forked, measure as they always do."""

    def measured(
        elsewhere: preview.PlannedMachine | None, report: object
    ) -> tuple[Machine, Mapping[str, float | None]]:
        return read_machine(), RATES if elsewhere is None else elsewhere.per_s

    with pytest.MonkeyPatch.context() as patch:
        forked.shorten(patch)
        patch.setattr(preview, "_measured", measured)
        yield


FAMILIES = ("llama", "qwen2", "gpt2", "t5", "vit", "mixtral", "mamba")
_SIZES: dict[str, int] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3}
_ATTENTION: dict[str, int] = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_BUILDERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_SIZES, **_ATTENTION}),
    "qwen2": (
        "Qwen2Config", "Qwen2ForCausalLM", {**_SIZES, **_ATTENTION, "tie_word_embeddings": True},
    ),
    "gpt2": (
        "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    ),
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "vit": (
        "ViTConfig", "ViTForImageClassification",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_labels": 5,
         "intermediate_size": 48, "image_size": 16, "patch_size": 4},
    ),
    "mixtral": (
        "MixtralConfig", "MixtralForCausalLM",
        {**_SIZES, **_ATTENTION, "num_local_experts": 4, "output_router_logits": True,
         "router_aux_loss_coef": 0.1},
    ),
    "mamba": (
        "MambaConfig", "MambaForCausalLM", {**_SIZES, "state_size": 4, "time_step_rank": 4},
    ),
}  # fmt: skip
_NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each of the seven families of models that streaming is held to."""
    return str(request.param)


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    """`tiny(family, dtype, **config)`: a small model in training mode with fixed random weights."""

    def make(
        family: str = "llama", dtype: torch.dtype = torch.float32, **changes: object
    ) -> PreTrainedModel:
        config_name, model_name, sizes = _BUILDERS[family]
        config_class, model_class = (
            getattr(transformers, config_name),
            getattr(transformers, model_name),
        )
        torch.manual_seed(11)
        options = {**sizes, **_NO_DROPOUT.get(family, {}), **changes}
        model: PreTrainedModel = model_class(config_class(**options)).to(dtype)
        return model.train()

    return make


@pytest.fixture
def batch() -> Callable[..., dict[str, torch.Tensor]]:
    """`batch(family, rows, length, seed)`: what the family's forward takes, with labels."""

    def make(
        family: str = "llama",
        rows: int = 4,
        length: int = 10,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        if family == "vit":
            pixels = torch.randn(rows, 3, 16, 16, generator=draw).to(dtype)
            return {"pixel_values": pixels, "labels": torch.randint(5, (rows,), generator=draw)}
        ids = torch.randint(1, 96, (rows, length), generator=draw)
        labels = ids.clone()
        labels[0, :3] = -100
        made = {"input_ids": ids, "labels": labels}
        if family not in ("mamba", "t5"):
            made["attention_mask"] = torch.ones_like(ids)
            made["attention_mask"][1, -3:] = 0
        return made

    return make


@pytest.fixture
def grads() -> Callable[[torch.nn.Module], dict[str, torch.Tensor]]:
    """`grads(model)`: plain copies of all gradients, by parameter name."""

    def read(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        named = ((n, p.grad) for n, p in model.named_parameters())
        return {n: g.detach().clone() for n, g in named if g is not None}

    return read


@pytest.fixture
def weights() -> Callable[[torch.nn.Module], dict[str, torch.Tensor]]:
    """`weights(model)`: plain copies of all parameters, by name."""

    def read(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    return read


@pytest.fixture
def same() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]:
    """`same(a, b)`: equal names, and equal bits in every tensor."""

    def check(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
        assert a.keys() == b.keys()
        differ = [name for name in a if not torch.equal(a[name], b[name])]
        assert not differ, f"{len(differ)} of {len(a)} differ: {differ[:4]}"

    return check


@pytest.fixture
def close() -> Callable[..., None]:
    """`close(a, b, limit)`: every tensor within `limit` of its own norm, or of the mean norm
    (the true gradient of a key's bias is zero: only rounding is left of it)."""

    def check(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], limit: float) -> None:
        assert a.keys() == b.keys()
        mean = sum(float(t.double().norm()) for t in a.values()) / len(a)
        off = {n: float((a[n].double() - b[n].double()).norm()) for n in a}
        size = {n: max(float(a[n].double().norm()), 0.05 * mean) for n in a}
        worst = max(off, key=lambda n: off[n] / size[n])
        assert off[worst] <= limit * size[worst], f"{worst}: {off[worst] / size[worst]:.2e}"

    return check


@pytest.fixture
def new_model() -> Callable[..., PreTrainedModel]:
    """`new_model(family, dtype)`: a tiny model, each time with the same random weights."""
    return tiny_model


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small .txt file of many short documents."""
    path = tmp_path_factory.mktemp("data") / "sentences.txt"
    documents = [f"{sentence}, said number {i}" for i, sentence in enumerate(SENTENCES)]
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture
def run_config(
    model_folder: Callable[..., Path], text_file: Path, tmp_path: Path
) -> Callable[..., Path]:
    """`run_config(**settings)`: a configuration file of a tiny run; keys are `section__name`."""

    def written(name: str = "run.yaml", **settings: object) -> Path:
        import yaml

        raw: dict[str, dict[str, object]] = {
            "model": {"path": str(tmp_path / "llama-float32")},
            "data": {"path": str(text_file), "sequence_length": 32, "held_out": 0.1},
            "train": {"steps": 4, "batch_rows": 4, "learning_rate": 1e-3, "evaluate_every": 2},
            "placement": {"device": "cpu"},
        }
        for key, value in settings.items():
            section, _, setting = key.partition("__")
            raw.setdefault(section, {})[setting] = value
        if "model__path" not in settings and not (tmp_path / "llama-float32").exists():
            model_folder("llama")
        path = tmp_path / name
        path.write_text(yaml.safe_dump(raw), encoding="utf-8")
        return path

    return written


@pytest.fixture
def fluxtrain(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`fluxtrain("train", ...)`: the command in a process of its own, runs below `tmp_path`."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        runs = {"FLUXTRAIN_RUNS": str(tmp_path / "runs")}
        return forked.python("-m", "fluxtrain", *arguments, environment=runs)

    return call


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """What every update of moments passes through."""
    hold = Hold()
    monkeypatch.setattr(updates, "step_", hold)
    yield hold
    hold.free.set()


@pytest.fixture
def half(tiny: Callable[..., PreTrainedModel]) -> Callable[..., tuple[torch.nn.Module, Engine]]:
    """`half(family, scale, **options)`: a wrapped fp16 model with a loss scale, and its engine."""
    return partial(half_model, tiny)


@pytest.fixture
def isa_put_back() -> Iterator[None]:
    """For tests that choose an instruction set."""
    before = _native.isa()
    yield
    _native.set_isa(before)
