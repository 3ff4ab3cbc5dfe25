"""The architecture: imports point down only, and few modules may touch torch.distributed and the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import specsync_core

ROOT = Path(__file__).parents[2]

LAYERS = (
    {"errors", "bounded_file", "whole_file"},
    {"registry", "registry_files", "policy", "policy_file", "settings", "facts", "algorithm"},
    {"hookspecs", "manager", "sources", "narrowing", "plan", "explain"},
    {
        "liveness",
        "bounded_store",
        "group_store",
        "payload",
        "counters",
        "device_counts",
        "local_wire",
        "collectives",
        "groups",
        "transports",
        "ragged",
    },
    {
        "handshake",
        "consensus",
        "checks",
        "agreements",
        "memory",
        "point",
        "switching",
        "control",
        "stats_file",
        "sync",
        "decisions",
        "replay",
    },
    {"diagnostics"},
    {"engines"},
    {"demo", "cli", "testing", "bench", "bisect"},
)
"""Modules and packages of the core, the lowest layer first."""

DISTRIBUTED = {"bounded_store", "group_store", "local_wire", "collectives", "groups", "transports"}
DISTRIBUTED |= {"demo", "testing", "bench"}
"""May use torch.distributed. The last three measure it or start and end process groups, as an engine does."""

ENVIRONMENT = {"settings", "demo", "testing"}
"""May use the process's environment: settings reads it, the others set it for the processes that they start."""


@cache
def core_modules() -> dict[str, Path]:
    """Dotted name to file."""
    found = {}
    for path in sorted((ROOT / "specsync_core").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def plugin_modules() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "plugins").rglob("*.py")))


def nodes(tree: ast.AST, *, lazy: bool = True) -> Iterator[ast.AST]:
    """Every node that runs: not under TYPE_CHECKING, and without ``lazy`` not inside a function."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if not lazy and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield child
        yield from nodes(child, lazy=lazy)


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Every dotted name that a file imports."""
    for node in nodes(ast.parse(path.read_text(encoding="utf-8")), lazy=lazy):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide layers"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(path: Path, *, lazy: bool = True) -> set[str]:
    """Every module of the core that a file imports, however it writes that."""
    found = set()
    for name in imports(path, lazy=lazy):
        parent, _, last = name.rpartition(".")
        if parent == "specsync_core" and last in specsync_core._MODULE_OF:
            found.add(f"specsync_core.{specsync_core._MODULE_OF[last]}")
        elif name in core_modules():
            found.add(name)
        elif parent in core_modules():
            found.add(parent)
    return found - {"specsync_core"}


def part(module: str) -> str:
    """The module or package of the table that a dotted name belongs to."""
    return module.split(".")[1]


def layer(module: str) -> int:
    found = [index for index, names in enumerate(LAYERS) if part(module) in names]
    assert found, f"{module}: give it a place in the table of layers"
    return found[0]


MODULES = sorted(name for name in core_modules() if name != "specsync_core")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    upward = {other for other in imported_modules(core_modules()[module]) if layer(other) > layer(module)}
    assert not upward


def test_modules_of_one_layer_form_no_cycle() -> None:
    packages = {name for name, path in core_modules().items() if path.name == "__init__.py"}
    graph = {
        module: imported_modules(core_modules()[module], lazy=False) - packages for module in set(MODULES) - packages
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {error.args[1]}")


@pytest.mark.parametrize("module", MODULES)
def test_only_few_modules_use_torch_distributed(module: str) -> None:
    used = [name for name in imports(core_modules()[module]) if name.startswith("torch.distributed")]
    assert not used or part(module) in DISTRIBUTED


@pytest.mark.parametrize("module", MODULES)
def test_only_settings_reads_the_environment(module: str) -> None:
    tree = ast.parse(core_modules()[module].read_text(encoding="utf-8"))
    used = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "getenvb"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
    ]
    assert not used or part(module) in ENVIRONMENT


@pytest.mark.parametrize("path", plugin_modules(), ids=lambda path: path.relative_to(ROOT / "plugins").as_posix())
def test_plugins_import_public_names_only(path: Path) -> None:
    own = path.relative_to(ROOT / "plugins").parts[1]
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "specsync_core":
            assert rest in specsync_core.__all__
        assert not package.startswith("specsync_") or package in {"specsync_core", own}
        assert not name.startswith("torch.distributed")


def test_what_only_types_need_is_public_too() -> None:
    """Names under TYPE_CHECKING are no imports at run time, but they are what a third party copies."""
    for path in plugin_modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "specsync_core":
                assert {alias.name for alias in node.names} <= set(specsync_core.__all__)
