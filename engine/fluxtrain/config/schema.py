"""The configuration of a run: what can be set, its default and why. No torch here.

`auto` means that FluxTrain chooses from what it measures and says why. Everything a user can get
wrong is a `BadInput` that names the key, the value and the cure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from fluxtrain.config.data_settings import DataSettings
from fluxtrain.config.errors import explain
from fluxtrain.config.image_settings import ImageSettings
from fluxtrain.config.parallel_settings import CommSettings, FsdpSettings
from fluxtrain.config.section import SampleSettings, Section, Several, TrackerSettings
from fluxtrain.config.text import apply_overrides, parse_yaml, read_text
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.plan import Setting
from fluxtrain.plan.request import Auto, ParallelRequest, PlacementRequest, Positive
from fluxtrain.plan.states import OptimizerName, PackedFormat

SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # of dtypes

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Request = PlacementRequest | ParallelRequest  # sections that the planner declares


class ModelSettings(Section):
    """Which model is trained."""

    path: str = Field(
        default="demo",
        min_length=1,
        description="a folder in Hugging Face format, a hub id, or `demo`: a small Llama-shaped "
        "model that starts from random weights",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub model")
    trust_remote_code: bool = Field(
        default=False,
        description="run Python code that comes with the model; only for sources you trust",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="precision of weights and activations, also as bf16, fp16, fp32; bfloat16 and "
        "float16 also have exact fp32 masters, float16 a loss scale too; auto takes "
        "bfloat16 on a card that has it (compute capability 8.0), float16 on one from 7.0, and "
        "without a card the model's own",
    )
    packed_cache: bool = Field(
        default=True,
        description="keep the packed weights of qlora in ~/.cache/fluxtrain/packed, so that the "
        "next start reads those (half a byte a weight) and packs nothing; frozen weights of lora "
        "and qlora that the host cannot hold live there, too",
    )
    kernels: Literal["auto", "liger", "torch"] = Field(
        default="auto",
        description="kernels of norms, rotary embeddings and gated activations on a GPU: those of "
        "liger-kernel where it is installed and knows the model, or torch's own",
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _short_names(cls, value: Any) -> Any:
        return SHORT_NAMES.get(value, value) if isinstance(value, str) else value


class MethodSettings(Section):
    """What is trained of the model."""

    name: Literal["full", "lora", "qlora"] = Field(
        default="full",
        description="full: every weight is trained; lora: low-rank adapters on the frozen "
        "weights of linear layers; qlora: the same on weights packed in 4 or 8 bits",
    )
    rank: Positive = Field(
        default=16, description="rank of the adapters; more learns more, and takes more memory"
    )
    alpha: Positive | Auto = Field(
        default="auto",
        description="what adapters add is scaled by alpha / rank (rslora: by its root); auto is "
        "twice the rank",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of the adapters' inputs that is dropped in training"
    )
    targets: Auto | Annotated[list[str], Field(min_length=1), Several] = Field(
        default="auto",
        description="names of the layers that get adapters, such as [q_proj, v_proj]; auto is all "
        "linear layers that text passes through but the head, routers and gates of one value",
    )
    variant: Literal["lora", "rslora", "dora"] = Field(
        default="lora",
        description="lora; rslora: scaled by the root of the rank (arXiv 2312.03732); dora: "
        "magnitude and direction apart (arXiv 2402.09353), slower",
    )
    base: PackedFormat = Field(
        default="nf4-double",
        description="how qlora packs the frozen weights: nf4 takes 0.56 bytes each, nf4-double "
        "0.52 (its scales are in 8 bits), int8 one",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _all_linear_layers(cls, value: Any) -> Any:
        """Read peft's name for what auto is."""
        return "auto" if value in ("all-linear", ["all-linear"]) else value


class TrainSettings(Section):
    """The optimization itself."""

    steps: Positive | None = Field(
        default=None, description="optimizer steps; when left out, `epochs` decides"
    )
    epochs: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="passes over the data when `steps` is left out",
    )
    batch_rows: Positive | Auto = Field(
        default="auto",
        description="rows of one backward pass; auto chooses from free memory and the data",
    )
    accumulation: Positive = Field(
        default=1,
        description="backward passes of one optimizer step, whose rows are batch_rows times this",
    )
    learning_rate: Rate | Auto = Field(
        default="auto",
        description="peak learning rate; auto is 2e-5 for the weights of a trained model, 2e-4 "
        "for adapters, and 3e-3 for the demo, which starts from random ones",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="shape of the learning rate after the warm-up"
    )
    warmup_steps: Annotated[int, Field(ge=0)] | Auto = Field(
        default="auto", description="steps of linear warm-up; auto is 3 % of the run, 100 at most"
    )
    weight_decay: Rate = Field(default=0.01, description="decoupled weight decay of AdamW")
    no_decay: Annotated[tuple[Literal["norms", "biases", "embeddings"], ...], Several] = Field(
        default=("norms", "biases", "embeddings"), description="parameters that are not decayed"
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's two decay rates")
    eps: float = Field(default=1e-8, ge=1e-30, allow_inf_nan=False, description="AdamW's epsilon")
    states: Literal["fp32", "bf16", "8bit"] = Field(
        default="fp32",
        description="how AdamW's two moments are kept: fp32 takes 8 bytes a parameter, bf16 "
        "(rounded at random) 4, 8bit (block-wise, as bitsandbytes does it) 2; parameters below "
        "4096 elements keep fp32",
    )
    moments: Literal["auto", "with_weights", "deferred"] = Field(
        default="auto",
        description="when fp32 moments of weights on the host are updated: together "
        "with_weights, or deferred until all weights are, during the next backward pass (the same "
        "bits); auto defers where a GPU's step is predicted to be shorter",
    )
    optimizer: OptimizerName = Field(
        default="adamw",
        description="FluxTrain's own adamw keeps fp32 masters, in every placement; the others "
        "are those of bitsandbytes and torchao, which must be installed: they update the weights "
        "as they are, and only with everything on the device (placement.offload none)",
    )
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=1.0,
        description="the global gradient norm is clipped to this; null only measures it, and each "
        "block is updated as soon as its gradients arrive",
    )
    seed: int = Field(default=0, ge=0, description="seed of dropout and of random initial weights")
    evaluate_every: Positive | Literal["auto", "end"] = Field(
        default="auto",
        description="steps between evaluations; auto is a tenth of the run and at most "
        "10 % of the time, end only the last",
    )
    checkpoint_every: Positive | Literal["auto", "end"] = Field(
        default="auto",
        description="steps between checkpoints; auto is a tenth of the run or 10 minutes, "
        "whichever comes first, and at most 5 % of the time",
    )
    keep_checkpoints: Positive = Field(
        default=2,
        description="how many checkpoints are kept: the newest, and from 2 on the one with the "
        "best evaluation among them",
    )
    final_model: Literal["last", "best"] = Field(
        default="last",
        description="which weights `model/` holds at the end: those of the last step, or of the "
        "best evaluation, for which each better one is followed by a checkpoint",
    )
    early_stopping_patience: Positive | None = Field(
        default=None,
        description="training ends after this many evaluations without an improvement; left out, "
        "it goes on to its last step",
    )
    early_stopping_threshold: Rate = Field(
        default=0.0,
        description="how far an evaluation loss must fall below the last one that counted to be "
        "an improvement for early_stopping_patience",
    )

    @property
    def checkpoints_kept(self) -> int:
        """Return how many checkpoints stay at most, if the best one must."""
        return max(self.keep_checkpoints, 2 if self.final_model == "best" else 1)

    @property
    def optimizer_in_backward(self) -> bool:
        """Return whether each block is updated as soon as its gradients arrive."""
        own = self.optimizer == "adamw"
        return self.max_grad_norm is None and self.accumulation == 1 and own

    @model_validator(mode="after")
    def _deferred_only_after_the_norm(self) -> TrainSettings:
        if self.moments == "deferred" and self.optimizer_in_backward:
            raise ValueError(
                "moments = deferred waits for all weights, and max_grad_norm = null updates each "
                "block at once: set one of the two, or moments = with_weights"
            )
        return self

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each beta must be at least 0 and below 1")
        return betas


class RunConfig(Section):
    """Everything that defines a run."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    method: MethodSettings = Field(default_factory=MethodSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    samples: SampleSettings = Field(default_factory=SampleSettings)
    image: ImageSettings = Field(default_factory=ImageSettings)
    trackers: TrackerSettings = Field(default_factory=TrackerSettings)
    placement: PlacementRequest = Field(default_factory=PlacementRequest)
    parallel: ParallelRequest = Field(default_factory=ParallelRequest)
    fsdp: FsdpSettings = Field(default_factory=FsdpSettings)
    comm: CommSettings = Field(default_factory=CommSettings)

    @model_validator(mode="before")
    @classmethod
    def _fsdp_of_a_trainer(cls, raw: Any) -> Any:
        """Read `trainer.fsdp` as `fsdp`."""
        trainer = raw.get("trainer") if isinstance(raw, dict) else None
        if not isinstance(trainer, dict) or set(trainer) != {"fsdp"} or "fsdp" in raw:
            return raw
        return {**{key: raw[key] for key in raw if key != "trainer"}, "fsdp": trainer["fsdp"]}

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 shards the model over processes."""
        return self.fsdp.enabled or self.parallel.mode == "fsdp"

    @property
    def ranks_planned(self) -> int:
        """Return how many processes share a sharded model where no launcher says so; else 1."""
        return self.parallel.processes if self.is_sharded else 1

    @model_validator(mode="after")
    def _communication_only_between_shards(self) -> RunConfig:
        unset = {"compress": "none", "gather": "none", "profile_steps": 0}
        given = [name for name, value in unset.items() if getattr(self.comm, name) != value]
        if given and not self.is_sharded:
            told = ", ".join(f"comm.{name} = {getattr(self.comm, name)}" for name in given)
            without = " ".join(f"comm.{name}={unset[name]}" for name in given)
            raise ValueError(
                f"{told}: that is of sharded models: set parallel.mode=fsdp, or {without}"
            )
        return self

    @model_validator(mode="after")
    def _processes_share_evenly(self) -> RunConfig:
        processes, cards, rows = self.parallel.processes, self.parallel.cards, self.train.batch_rows
        if processes > 1 and isinstance(cards, tuple):
            raise ValueError(
                f"parallel.cards is {list(cards)} and parallel.processes is {processes}: each "
                f"process has cards of its own, so set parallel.cards={len(cards)} for each"
            )
        if rows != "auto" and rows % processes:
            raise ValueError(
                f"train.batch_rows = {rows} cannot be shared evenly by parallel.processes = "
                f"{processes}: set train.batch_rows={-(-rows // processes) * processes}"
            )
        return self

    @model_validator(mode="after")
    def _warmup_within_the_run(self) -> RunConfig:
        steps, warmup = self.train.steps, self.train.warmup_steps
        if steps is not None and warmup != "auto" and warmup > steps:
            raise ValueError(
                f"train.warmup_steps = {warmup} is more than train.steps = {steps}: "
                "shorten the warm-up or train longer"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_for_what_needs_them(self) -> RunConfig:
        train = self.train
        if train.early_stopping_patience is not None:
            needs = "train.early_stopping_patience counts evaluations"
        elif train.final_model == "best":
            needs = "train.final_model = best compares evaluations"
        else:
            return self
        if self.data.held_out == 0 and self.data.held_out_path is None:
            raise ValueError(
                f"{needs}, and data.held_out = 0 leaves nothing to evaluate on: set data.held_out "
                "to a share such as 0.02, or name data.held_out_path"
            )
        if train.evaluate_every == "end":
            raise ValueError(
                f"{needs}, and train.evaluate_every = end makes only one, after the last step: "
                "set it to a number of steps, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _other_optimizers_only_on_the_device(self) -> RunConfig:
        name, placement = self.train.optimizer, self.placement
        if name == "adamw":
            return self
        if placement.offload not in ("auto", "none"):
            raise ValueError(
                f"placement.offload = {placement.offload} keeps states on the host, where "
                f"train.optimizer = {name} cannot update them: use placement.offload=none, or "
                "train.states=8bit with FluxTrain's own adamw"
            )
        if self.train.states != "fp32":
            raise ValueError(
                f"train.states = {self.train.states} is of FluxTrain's own adamw, and "
                f"train.optimizer = {name} has its own format: set one of the two"
            )
        if self.model.dtype == "float16":
            raise ValueError(
                f"train.optimizer = {name} keeps no fp32 masters, which model.dtype = float16 "
                "needs: use bfloat16 or float32, or FluxTrain's own adamw"
            )
        return self


def settings(config: RunConfig) -> Iterator[Setting]:
    """Return every setting of `config`, in the order of the schema."""
    for section_name in RunConfig.model_fields:
        section: Section | Request = getattr(config, section_name)
        for name, default, description in _fields_of(section):
            value = _plain(getattr(section, name))
            yield Setting(
                key=f"{section_name}.{name}",
                value=value,
                default=default,
                changed=bool(value != default),
                description=description,
            )


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; entries of data become mappings of what they set."""
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value


def _fields_of(section: Section | Request) -> Iterator[tuple[str, Any, str]]:
    """Name, default and description of every setting of a section."""
    if not isinstance(section, Section):
        for knob in fields(section):
            yield knob.name, knob.default, str(knob.metadata["description"])
        return
    for name, field in type(section).model_fields.items():
        yield name, field.default, field.description or ""


def validate(raw: dict[str, Any], source: str = "configuration") -> RunConfig:
    """Check a plain dictionary; every mistake is named at once in one `BadInput`."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        keys = [setting.key for setting in settings(RunConfig())]
        raise BadInput(f"{source}: {explain(error, keys, raw)}") from None


def overridden(raw: dict[str, Any], overrides: list[str], source: str) -> RunConfig:
    """Check a plain dictionary with overrides; where they name another compression of gradients,
    the options of the former one do not count."""
    result = apply_overrides(raw, overrides)
    if _compression_in(raw) not in (None, _compression_in(result)):
        result = apply_overrides({**raw, "comm": {**raw["comm"], "config": {}}}, overrides)
    return validate(result, source)


def _compression_in(raw: dict[str, Any]) -> Any:
    comm = raw.get("comm")
    return comm.get("compress") if isinstance(comm, dict) else None


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file and apply `section.key=value` overrides.

    Raises:
        BadInput: no such file, not text, not YAML (with the line), empty, unknown keys, bad values.
    """
    raw = parse_yaml(read_text(Path(path)), str(path))
    return overridden(raw, overrides or [], str(path))


def config_of(overrides: list[str]) -> RunConfig | None:
    """Return the run that overrides alone define; None unless they name both model and data."""
    raw = apply_overrides({}, overrides)
    sections = [raw.get(section) for section in ("model", "data")]
    named = all(isinstance(section, dict) and "path" in section for section in sections)
    return validate(raw, "--set") if named else None


def demo_config(overrides: list[str] | None = None) -> RunConfig:
    """Return the run of `--demo`: a model of a few million parameters on text that every Python
    has."""
    raw: dict[str, Any] = {
        "model": {"path": "demo"},
        "data": {"path": "demo", "sequence_length": 128, "held_out": 0.02},
        "train": {"steps": 400, "batch_rows": 4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
    }
    return validate(apply_overrides(raw, overrides or []), "the demo")


def image_demo_config(overrides: list[str] | None = None) -> RunConfig:
    """Return the run of `--demo image-edit`: a small image pipeline on pairs drawn on the spot."""
    raw: dict[str, Any] = {
        "model": {"path": "demo-image-edit"},
        "data": {"path": "demo-image-edit", "held_out": 0.04},
        "image": {"size": 64, "caption_tokens": 16},
        "train": {
            "steps": 60, "batch_rows": 8, "learning_rate": 4e-3, "betas": [0.9, 0.99],
            "evaluate_every": 20,
        },
        "samples": {"every": 20},
    }  # fmt: skip
    return validate(apply_overrides(raw, overrides or []), "the demo")


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration file, for editors and for the wizard."""
    schema = RunConfig.model_json_schema()
    schema["title"] = "FluxTrain run configuration"
    return schema
