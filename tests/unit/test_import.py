"""The public names, and what importing costs: torch only where tensors are."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
import tomli

import specsync_core

ROOT = Path(__file__).parents[2]


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh interpreter holds after running ``code``."""
    script = f"{code}\nimport sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert loaded_after("import specsync_core").isdisjoint({"torch", "pydantic", "pluggy", "typer", "rich"})


TORCH_FREE = [
    "specsync_core.algorithm",
    "specsync_core.errors",
    "specsync_core.facts",
    "specsync_core.hookspecs",
    "specsync_core.manager",
    "specsync_core.plan",
    "specsync_core.policy_file",
    "specsync_core.registry_files",
    "specsync_core.settings",
    "specsync_core.control.change",
    "specsync_core.control.client",
    "specsync_core.control.listener",
    "specsync_core.diagnostics",
    "specsync_core.cli.app",
    "specsync_core.cli.check",
    "specsync_core.cli.ctl",
    "specsync_core.cli.demo",
    "specsync_core.cli.plan",
    "specsync_core.cli.plugins",
    "specsync_core.cli.sites",
    "specsync_dflash",
    "specsync_dspark",
    "specsync_eagle",
    "specsync_eagle.rocm",
    "specsync_vllm",
]


def test_these_modules_import_no_torch() -> None:
    loaded = loaded_after("\n".join(f"import {module}" for module in TORCH_FREE))
    assert set(TORCH_FREE) <= loaded
    assert "torch" not in loaded


def test_names_that_need_no_torch_do_not_import_it() -> None:
    code = "from specsync_core import Plan, Site, hookimpl, load_registry, parse_sites, resolve_plan, PolicyError"
    assert "torch" not in loaded_after(f"{code}\nresolve_plan(load_registry(), {{}})")


@pytest.mark.parametrize("name", specsync_core.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(specsync_core, name) is not None


def test_public_names_are_sorted_and_unique() -> None:
    assert specsync_core.__all__ == sorted(set(specsync_core.__all__))


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((ROOT / "specsync_core" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(typed) | {"__version__"} == set(specsync_core.__all__)
    for name, module in typed.items():
        if module != "specsync_core":
            assert getattr(import_module(str(module)), name) is getattr(specsync_core, name)


def test_dir_lists_the_public_names() -> None:
    assert set(specsync_core.__all__) <= set(dir(specsync_core))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'specsync_core' has no attribute 'SpecTpSink'"):
        _ = specsync_core.SpecTpSink


def test_the_version_is_the_distributions() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert specsync_core.__version__ == project["version"] == metadata.version("specsync-core")
