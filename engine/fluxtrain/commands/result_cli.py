"""The commands that use what was trained: evaluate, generate, sample and compare."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import typer

from fluxtrain.commands import options
from fluxtrain.commands.importing import Importing
from fluxtrain.commands.output import answer, complain, print_json, say, silent
from fluxtrain.errors import BadInput


def register(app: typer.Typer, epilog: str) -> None:
    """Add the commands to the command line."""
    app.command(epilog=epilog)(evaluate)
    app.command(epilog=epilog)(generate)
    app.command(epilog=epilog)(compare)
    app.command(epilog=epilog)(sample)


def evaluate(  # noqa: PLR0913, PLR0917 - typer reads the options from the signature
    model: options.Model,
    data: options.EvaluatedData = None,
    tasks: options.Tasks = None,
    step: options.Step = None,
    sets: options.DataSets = None,
    sequence_length: options.RowTokens = None,
    rows: options.BatchRows = None,
    base: options.Base = None,
    other_base: options.OtherBase = False,
    packed: options.Packed = None,
    dtype: options.UsedDtype = "auto",
    device: options.Device = None,
    cards: options.UsedCards = None,
    offload: options.Offload = "auto",
    budget_gib: options.Budget = None,
    trust: options.Trust = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compute a model's loss on data, or its scores in tasks.

    The model may be larger than the card.
    """
    from fluxtrain.results.naming import refuse_missing

    refuse_missing(model)
    if tasks is not None and (data or sets or sequence_length):
        raise BadInput(
            "--tasks has its data in its files: leave DATA, --set and --sequence-length out"
        )
    with Importing():
        from fluxtrain.commands.pages import evaluation_page, tasks_page
        from fluxtrain.results.evaluate_model import EvaluationRequest, evaluate_model
        from fluxtrain.results.evaluate_tasks import evaluate_tasks
        from fluxtrain.results.model_request import ModelRequest

    named = ModelRequest(
        named=model, step=step, base=base, other_base=other_base, packed=packed, dtype=dtype,
        device=device, cards=cards, offload=offload, budget_gib=budget_gib,
        trust_remote_code=trust,
    )  # fmt: skip
    tell = silent if json else complain
    if tasks is not None:
        scored = evaluate_tasks(named, tasks, rows, tell)
        answer(scored, tasks_page, json=json)
        return
    request = EvaluationRequest(
        model=named, data=data, rows=rows, sequence_length=sequence_length,
        overrides=tuple(sets or ()),
    )  # fmt: skip
    answer(evaluate_model(request, tell), evaluation_page, json=json)


def generate(  # noqa: PLR0913, PLR0917 - as above
    model: options.Model,
    step: options.Step = None,
    prompt: options.Prompt = None,
    prompts: options.Prompts = None,
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.DrawSeed = None,
    system: options.SystemWords = "",
    plain: options.Plain = False,
    rows: options.BatchRows = None,
    base: options.Base = None,
    other_base: options.OtherBase = False,
    packed: options.Packed = None,
    dtype: options.UsedDtype = "auto",
    device: options.Device = None,
    cards: options.UsedCards = None,
    offload: options.Offload = "auto",
    budget_gib: options.Budget = None,
    slots: options.Slots = 0,
    slot_rank: options.SlotRank = 64,
    trust: options.Trust = False,
    json: options.JsonLines = False,
    debug: options.Debug = False,
) -> None:
    """Chat with a model, or answer one prompt or a file of them.

    A chat reads standard input line by line, so a text can be piped into it too.
    """
    from fluxtrain.results.naming import refuse_missing

    refuse_missing(model)
    if prompts is not None and not prompts.expanduser().exists():
        raise BadInput(f"{prompts} does not exist: check --prompts")
    with Importing():
        from fluxtrain.commands import generation
        from fluxtrain.models.generate.sampling import Sampling
        from fluxtrain.results.model_request import ModelRequest

    request = generation.GenerationRequest(
        model=ModelRequest(
            named=model, step=step, base=base, other_base=other_base, packed=packed, dtype=dtype,
            device=device, cards=cards, offload=offload, budget_gib=budget_gib,
            trust_remote_code=trust, slots=slots, slot_rank=slot_rank,
        ),
        sampling=Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
        ),
        prompts=prompts, prompt=prompt, rows=rows, system=system, plain=plain,
    )  # fmt: skip
    if json:
        generation.answer_in_json(request)
    elif prompts is not None or prompt is not None:
        generation.answer_prompts(request, complain, say)
    else:
        generation.chat(request, complain)


def compare(
    results: options.Results,
    plots: options.Plots = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show sharded runs side by side, from their results.jsonl.

    Runs that differ in their seeds alone make a row.
    """
    from fluxtrain.commands import compare as comparison

    lines = comparison.read_lines(results)
    rows = comparison.compared(lines)
    if plots is not None:
        for path in comparison.draw(lines, plots):
            complain(f"drawn: {path}")
    answer(rows, comparison.table, json=json)


def sample(  # noqa: PLR0913, PLR0917 - as above
    run: options.Named,
    prompt: options.Words,
    reference: options.Reference = None,
    to: options.Picture = Path("sample.png"),
    steps: options.SampleSteps = None,
    guidance: options.Guidance = None,
    seed: options.ImageSeed = 0,
    show: options.Show = False,
    device: options.Device = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make an image with the model of an image run."""
    if not prompt.strip():
        raise BadInput("--prompt is empty: say what should change")
    if reference is not None and not reference.is_file():
        raise BadInput(f"--reference: {reference} is no file: name the picture to change")
    with Importing():
        from fluxtrain.results.image_sampling import SampleRequest
        from fluxtrain.results.image_sampling import sample as made

    request = SampleRequest(
        run=run, prompt=prompt, reference=reference, to=to, steps=steps, guidance=guidance,
        seed=seed, device=device,
    )  # fmt: skip
    found = made(request, silent if json else complain)
    if json:
        print_json(found)
        return
    if show:
        _draw(to)
    say(f"{found.path}: {found.width} x {found.height} pixels in {found.seconds:.1f} s")


def _draw(path: Path) -> None:
    """Draw a picture as textual-image does, where it is installed, else in half blocks; nothing
    where there are no colours."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    from fluxtrain.files.half_blocks import BLOCK, half_blocks

    console = Console()
    if console.no_color or console.color_system is None:
        return
    try:
        drawn = import_module("textual_image.renderable").Image(str(path))
    except ImportError:
        cells = [
            [Segment(BLOCK, Style.parse(f"{above} on {below}")) for above, below in line]
            for line in half_blocks(path, console.width, console.width)
        ]
        drawn = Segments([part for line in cells for part in (*line, Segment.line())])
    console.print(drawn)
