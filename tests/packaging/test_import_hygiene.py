"""What an import brings with it, read from sys.modules of a fresh process.

A linter reads import statements; only a process shows what importing a package really runs.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = {"torch", "transformers", "peft", "accelerate", "numpy", "safetensors", "tokenizers"}
APP = {"textual", "fluxtui"}


def modules_of(package: str) -> list[str]:
    """The package and every module in it, found without running any of them."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    folders = list(spec.submodule_search_locations or ())
    found = [package]
    for module in pkgutil.iter_modules(folders):
        name = f"{package}.{module.name}"
        found += modules_of(name) if module.ispkg else [name]
    return found


def brought_in_by(*modules: str) -> set[str]:
    """Top-level names in sys.modules after importing `modules` in a fresh process."""
    code = "; ".join(f"import {name}" for name in modules)
    code += "; import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    finished = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


def test_the_front_door_is_light() -> None:
    assert not brought_in_by("fluxtrain") & (TORCH | APP | {"pydantic", "msgspec", "ctypes"})


def test_a_command_looks_after_ctrl_c_before_python_has_read_much() -> None:
    """What is imported before that shows Python's own traceback."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from fluxtrain.__main__ import main; "
        "print(*sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-S", "-c", code, str(ROOT / "engine")], check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    brought = set(finished.stdout.split())
    assert "fluxtrain.commands.importing" in brought
    assert not brought & {"typing", "enum", "re", "signal"}


def test_units_and_errors_are_of_the_standard_library_alone() -> None:
    brought = brought_in_by("fluxtrain.units", "fluxtrain.errors")
    third_party = brought - set(sys.stdlib_module_names) - brought_in_by("sys") - {"fluxtrain"}
    assert third_party == set()


@pytest.mark.parametrize("package", ["events", "files"])
def test_a_package_for_programs_needs_no_torch_and_no_configuration_library(package: str) -> None:
    brought = brought_in_by(*modules_of(f"fluxtrain.{package}"))
    assert "msgspec" in brought
    assert not brought & (TORCH | APP | {"pydantic"})


def test_the_configuration_and_the_hardware_facts_need_no_torch() -> None:
    brought = brought_in_by("fluxtrain.config.schema", *modules_of("fluxtrain.machine"))
    assert not brought & (TORCH | APP)


def test_the_command_line_starts_without_torch() -> None:
    assert not brought_in_by("fluxtrain.cli") & (TORCH | APP)


def test_the_app_never_brings_torch() -> None:
    modules = [name for name in modules_of("fluxtui") if not name.endswith("__main__")]
    brought = brought_in_by(*modules)
    assert "textual" in brought
    assert not brought & TORCH


def test_the_engine_never_brings_the_app_wrap_only_when_used_and_images_only_for_images() -> None:
    """In one process, as torch takes seconds: the front door first, then every module."""
    left_out = ("__main__", "libflux_native")
    modules = [name for name in modules_of("fluxtrain") if not name.endswith(left_out)]
    code = (
        "import fluxtrain, sys; assert 'torch' not in sys.modules; "
        "fluxtrain.wrap; assert 'torch' in sys.modules; "
        "assert fluxtrain.auto_wrap is fluxtrain.wrap; "
        "import fluxtrain.train.run; early = {'peft', 'bitsandbytes'} & set(sys.modules); "
        "assert not early, 'only adapters need these'; import fluxtrain.commands.preview; "
        "assert 'diffusers' not in sys.modules, 'runs of text need no image library'; "
        f"import {', '.join(modules)}; "
        f"brought = {APP} & set(sys.modules); assert not brought, brought"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
