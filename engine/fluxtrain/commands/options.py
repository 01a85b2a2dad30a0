"""Options and arguments that commands have, with their words of help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluxtrain.commands.completion import run_names, setting_keys
from fluxtrain.errors import BadInput

if TYPE_CHECKING:
    from fluxtrain.config.schema import RunConfig


def folder_of(text: str) -> Path:
    """Read the name of a folder; an empty one is an error of the user."""
    if not text:
        raise typer.BadParameter("it is empty: name a folder")
    return Path(text)


def overrides_of(sets: list[str] | None, steps: int | None, device: str | None) -> list[str]:
    """Return the options as overrides of the configuration."""
    overrides = list(sets or [])
    if steps is not None:
        overrides.append(f"train.steps={steps}")
    if device is not None:
        overrides.append(f"placement.device={device}")
    return overrides


def chosen_config(path: Path | None, demo: bool, overrides: list[str]) -> RunConfig | None:
    """Read the configuration that a command names; None where it names none."""
    from fluxtrain.commands.paths import refuse_missing_paths
    from fluxtrain.config.schema import config_of, demo_config, image_demo_config, load_config

    if demo and str(path) == OF_IMAGES:
        return image_demo_config(overrides)
    if demo and path is not None:
        raise BadInput(
            f"--demo and {path} were both given: leave one out (--demo {OF_IMAGES} edits images)"
        )
    unnamed = demo_config if demo else config_of
    chosen = load_config(path, overrides) if path is not None else unnamed(overrides)
    if chosen is not None:
        refuse_missing_paths(chosen)
    return chosen


def nothing_named(verb: str, overrides: list[str]) -> BadInput:
    """Return the error of a command that lacks a configuration; a wrong override comes first."""
    from fluxtrain.config.schema import validate
    from fluxtrain.config.text import apply_overrides

    validate(apply_overrides({}, overrides), "--set")
    return BadInput(
        f"nothing to {verb}: name a CONFIG.yaml (`fluxtrain init` writes one), or use --demo"
    )


Config = Annotated[Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="a YAML file")]
OF_IMAGES = "image-edit"  # stands where a configuration would, behind --demo
Demo = Annotated[
    bool,
    typer.Option(
        "--demo",
        help="a small model on text that every Python has; `--demo image-edit`: on drawn images",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="as in train.steps=100", autocompletion=setting_keys
    ),
]
Steps = Annotated[int | None, typer.Option("--steps", help="short for --set train.steps=N")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
Whole = Annotated[bool, typer.Option("--whole", help="look for bad and repeated rows to the end")]
Named = Annotated[
    str,
    typer.Argument(metavar="RUN", help="its id, its folder, or `last`", autocompletion=run_names),
]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks")]
Progress = Annotated[
    bool, typer.Option("--progress", help="say on standard error what is being done, with --json")
]

TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="at the end, a Perfetto trace of its last 256 steps"
    ),
]

DiskWaitMinutes = Annotated[
    float,
    typer.Option(
        "--disk-wait", metavar="MINUTES", min=0.0, help="how long a full disk is waited for"
    ),
]

CommCompress = Annotated[
    str | None,
    typer.Option(
        "--comm_compress",
        metavar="NAME",
        help="how sharded training sends gradients: comm.compress",
    ),
]
CommConfig = Annotated[
    str | None,
    typer.Option(
        "--comm_config_json", metavar="JSON", help="options of that method, as a JSON object"
    ),
]
ProfileSteps = Annotated[
    int | None,
    typer.Option("--profile", metavar="N", help="profile N steps of sharded training", min=1),
]


def comm_overrides(name: str | None, config: str | None, profile: int | None) -> list[str]:
    """Return the options of communication as overrides. Raises BadInput for JSON that is none."""
    found = [] if name is None else [f"comm.compress={name}"]
    if config is not None:
        from fluxtrain.config.parallel_settings import options_of

        found.append(f"comm.config={json.dumps(options_of(config))}")
    return found if profile is None else [*found, f"comm.profile_steps={profile}"]


# -- of compare ------------------------------------------------------------------------------------

Results = Annotated[
    list[Path],
    typer.Argument(metavar="RUN|RESULTS...", help="run folders, or their results.jsonl"),
]
Plots = Annotated[
    Path | None,
    typer.Option("--plots", metavar="FOLDER", help="also draw curves there, as SVG (matplotlib)"),
]

# -- of export -------------------------------------------------------------------------------------

Adapter = Annotated[
    str,
    typer.Argument(
        metavar="RUN|ADAPTER",
        help="a run, `last`, or an adapter's folder",
        autocompletion=run_names,
    ),
]
To = Annotated[
    Path | None, typer.Option("--to", parser=folder_of, metavar="FOLDER", help="a new folder")
]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="N", min=1, help="the checkpoint of a run's step N"),
]
Merge = Annotated[
    bool, typer.Option("--merge", help="write the base with the adapter in its weights")
]
Gguf = Annotated[
    str | None,
    typer.Option(
        "--gguf",
        metavar="TYPE",
        help="write one file for llama.cpp: f32, f16, bf16, q8_0, q4_0; with its llama-quantize "
        "also q2_k to q6_k",
    ),
]
Onto = Annotated[
    str,
    typer.Option(
        "--onto",
        metavar="dequantised|original",
        help="of qlora: merge into what the packed base was in training, or into its original",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, bf16, fp16 or fp32")]
Base = Annotated[
    str | None, typer.Option("--base", metavar="FOLDER|ID", help="the base, where it is now")
]
OtherBase = Annotated[
    bool, typer.Option("--other-base", help="accept a base with other weight files")
]
Packed = Annotated[
    str | None,
    typer.Option(
        "--packed",
        metavar="nf4|nf4-double|int8",
        help="how another program packed the base in training",
    ),
]
Check = Annotated[bool, typer.Option("--check/--no-check", help="compare with base and adapter")]
CheckedData = Annotated[
    str | None, typer.Option("--data", metavar="FILE", help="compare on rows of it")
]
CheckedRows = Annotated[int, typer.Option("--rows", help="how many rows are compared")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="run Python code that comes with the base")
]

# -- of dry-run ------------------------------------------------------------------------------------

DRY_STEPS = 3
DrySteps = Annotated[int, typer.Option("--steps", min=2, help="how many; the first one warms up")]

# -- of evaluate and generate ----------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="a run, `last`, a model's or an adapter's folder, a hub id, or `demo`",
        autocompletion=run_names,
    ),
]
EvaluatedData = Annotated[
    str | None,
    typer.Argument(metavar="[DATA]", help="as data.path; left out: what the run held out"),
]
Tasks = Annotated[
    Path | None,
    typer.Option("--tasks", metavar="FOLDER", help="of lm-eval's task files, with their data"),
]
DataSets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="data.KEY=VALUE", help="as in data.chat_template=chatml"),
]
BatchRows = Annotated[int | None, typer.Option("--rows", help="how many rows a pass takes")]
RowTokens = Annotated[
    int | None, typer.Option("--sequence-length", help="tokens of a row, as data.sequence_length")
]
UsedDtype = Annotated[str, typer.Option("--dtype", help="auto, bf16, fp16 or fp32")]
UsedCards = Annotated[
    str | None,
    typer.Option("--cards", help="how many GPUs, or their numbers: 0,1; else as few as hold it"),
]
Offload = Annotated[str, typer.Option("--offload", help="auto, none, weights or max")]
Budget = Annotated[
    float | None, typer.Option("--budget-gib", help="device memory that may be used, in GiB")
]
Prompt = Annotated[
    str | None,
    typer.Option("--prompt", metavar="TEXT", help="answer this text and end"),
]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="answer each line, or .jsonl, in batches"),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="of an answer, at most")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="0: the most likely token; left out: as the model says"),
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="choose among tokens of so much probability")
]
Slots = Annotated[
    int, typer.Option("--slots", help="with --json: adapters that can be mounted at once")
]
SlotRank = Annotated[int, typer.Option("--slot-rank", help="the largest rank of these")]
DrawSeed = Annotated[int | None, typer.Option("--seed", help="draw the same tokens each time")]
SystemWords = Annotated[str, typer.Option("--system", help="begin conversations with this")]
Plain = Annotated[bool, typer.Option("--plain", help="continue text, without the chat template")]

# -- of sample -------------------------------------------------------------------------------------

Words = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="what should change")]
Reference = Annotated[
    Path | None,
    typer.Option("--reference", metavar="FILE", help="the picture to change; none: words alone"),
]
Picture = Annotated[
    Path, typer.Option("--to", parser=folder_of, metavar="FILE", help="the PNG file to write")
]
SampleSteps = Annotated[
    int | None, typer.Option("--steps", min=1, help="of the sampler; else image.sample_steps")
]
Guidance = Annotated[
    float | None, typer.Option("--guidance", min=0, help="else image.sample_guidance")
]
ImageSeed = Annotated[int, typer.Option("--seed", min=0, help="of the noise it starts from")]
Show = Annotated[bool, typer.Option("--show", help="draw it in the terminal, too")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="read and write a JSON object a line, for programs")
]
