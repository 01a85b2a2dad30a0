"""The longer pages of the wizard, the plan and the launch, as functions of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from textual.content import Content

from fluxtrain.telemetry.storage import free_bytes
from fluxtrain.units import bytes_text
from fluxtui.wizard import drawing
from fluxtui.wizard.answers import Answers
from fluxtui.wizard.checks import Check
from fluxtui.wizard.configuring import yaml_text
from fluxtui.wizard.launching import command_text
from fluxtui.wizard.plan_preview import PlanPreview

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def plan_pending(elapsed_s: float, width: int, go_on: bool) -> Content:
    """The engine is at work; the keys still do."""
    mark = _SPINNER[int(elapsed_s * 4) % len(_SPINNER)]
    lines = [
        Content.assemble(
            (f"{mark} ", "$accent"),
            "The engine reads the model and measures what is free",
            (f"  {elapsed_s:.0f} s", drawing.MUTED),
        )
    ]
    if go_on:
        lines.append(Content.styled("  goes on by itself when the plan is there", drawing.MUTED))
    return Content("\n").join(lines)


def plan_page(plan: PlanPreview, width: int) -> Content:
    """The plan: model, predicted memory, and every choice with its reason."""
    lines: list[Content] = []
    head = " · ".join(
        part
        for part in (plan.model, f"on {plan.device}" if plan.device else "", _steps(plan.steps))
        if part
    )
    if head:
        lines += [drawing.paragraph(head, width), Content("")]
    if not plan.fits:
        cure = "this does not fit: press → for more offload, or esc for a smaller model"
        lines += [drawing.problem(cure, width), Content("")]
    lines += [
        drawing.memory_bar("device", plan.device_bytes, plan.device_budget_bytes, width),
        drawing.memory_bar("host", plan.host_bytes, plan.host_limit_bytes, width),
        Content.styled("        predicted peaks against what is free", drawing.MUTED),
        Content(""),
        Content.styled("Chosen for you", "bold"),
        drawing.table([(c.name, c.value, c.because) for c in plan.choices], width),
    ]
    return Content("\n").join(lines)


def plan_refused(message: str, width: int) -> Content:
    """Why there is no plan, and what can be done here."""
    cure = "Press esc to change an answer, ← → for another offload setting, or r to ask again."
    return Content("\n").join(
        [
            drawing.problem(message, width),
            Content(""),
            drawing.paragraph(cure, width, drawing.MUTED),
        ]
    )


def launch_page(
    answers: Answers,
    plan: PlanPreview | None,
    root: Path,
    width: int,
    *,
    error: str | None,
    with_yaml: bool,
) -> Content:
    """Everything once more: in words, as a command, and as YAML where that has no other place."""
    rows = summary_rows(answers, plan)
    rows.append(("runs in", str(root), ""))
    free = free_bytes(root)
    if free is not None:
        rows.append(("free disk", bytes_text(free), ""))
    lines = [Content.styled("Ready", "bold"), Content("")]
    if error:
        lines += [drawing.problem(error, width), Content("")]
    lines += [
        _pairs([(name, value) for name, value, _ in rows], width),
        Content(""),
        Content.assemble(("▸ ", "bold $accent"), ("Enter starts the training", "bold $accent")),
        Content.styled(
            "  in a process of its own: closing this app does not stop it", drawing.MUTED
        ),
        Content(""),
        Content.styled("The same from a shell", "bold"),
        drawing.paragraph(command_text(answers), width, "$accent"),
        Content(""),
    ]
    if with_yaml:
        lines += [Content.styled("config.yaml", "bold"), _indented(config_text(answers, plan))]
    return Content("\n").join(lines)


def config_text(answers: Answers, plan: PlanPreview | None) -> str:
    """The YAML of the run. The demo needs none, so its own settings come from the plan."""
    return plan.config_text if answers.is_demo and plan is not None else yaml_text(answers)


def summary_rows(answers: Answers, plan: PlanPreview | None) -> list[tuple[str, str, str]]:
    """The answers in words: name, value, and what is known about it."""
    steps = answers.steps if plan is None or plan.steps is None else plan.steps
    offload = answers.offload
    if plan is not None and plan.offload and plan.offload != offload:
        offload_text = f"{plan.offload} ({offload})"
    else:
        offload_text = offload
    return [
        ("model", answers.model_path, ""),
        ("data", answers.data_file, ""),
        ("method", answers.method, ""),
        ("offload", offload_text, ""),
        ("steps", "auto" if steps is None else f"{steps:,}", ""),
    ]


def aside(
    answers: Answers,
    checks: dict[str, Check | None],
    plan: PlanPreview | None,
    machine: Sequence[str],
    width: int,
) -> Content:
    """The column beside the question on a wide screen: the run so far, and this machine."""
    if answers.step == "launch":
        lines = [
            Content.styled("config.yaml", "bold"),
            Content(""),
            _indented(config_text(answers, plan)),
        ]
        return Content("\n").join(lines)
    lines = [Content.styled("Your run", "bold"), Content("")]
    for name, value, _ in summary_rows(answers, plan):
        check = checks.get(name)
        wrong = check is not None and check.error is not None
        lines.append(
            Content.assemble(
                (name.ljust(9), drawing.MUTED),
                (drawing.shortened(value or "-", width - 9), "$error" if wrong else "bold"),
            )
        )
    lines += [Content(""), Content.styled("This machine", "bold"), Content("")]
    lines += [drawing.paragraph(line, width) for line in machine]
    return Content("\n").join(lines)


def _pairs(rows: Sequence[tuple[str, str]], width: int) -> Content:
    return Content("\n").join(
        Content.assemble(
            (name.ljust(11), drawing.MUTED), (drawing.shortened(value, width - 11), "bold")
        )
        for name, value in rows
    )


def _indented(text: str) -> Content:
    return Content("\n".join(f"  {line}" for line in text.rstrip().splitlines()))


def _steps(steps: int | None) -> str:
    return "" if steps is None else f"{steps:,} steps"
