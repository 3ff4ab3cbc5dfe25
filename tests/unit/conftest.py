"""Fixtures of the unit tests: an environment without settings, the built-in registry, plugins that can be installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, settings

from specsync_core.registry import Registry
from specsync_core.registry_files import builtin_registry, merge_registries
from specsync_core.settings import VARIABLES

# No limit of time per example: a busy machine is no failure, and pytest's own time-out ends what hangs.
settings.register_profile("specsync", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("specsync")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the shell that runs the tests are not about them, nor is the width of its terminal."""
    for variable in (*VARIABLES, "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def registry() -> Registry:
    return merge_registries([builtin_registry()])


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that Python imports from for the length of the test."""
    directory = tmp_path / "site-packages"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    return directory


@pytest.fixture
def install_plugin(site_packages: Path) -> Iterator[Callable[..., Path]]:
    """Install a plugin the way pip does: a module, and a distribution whose entry point names it."""
    installed: list[str] = []

    def install(name: str, source: str, *, distribution: str = "", version: str = "1.0", value: str = "") -> Path:
        module = f"{(distribution or name).replace('-', '_')}_{name.replace('-', '_')}_plugin"
        (site_packages / f"{module}.py").write_text(dedent(source))
        distribution = distribution or f"specsync-{name}"
        info = site_packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[specsync]\n{name} = {value.format(module) or module}\n")
        importlib.invalidate_caches()
        installed.append(module)
        return site_packages / f"{module}.py"

    yield install
    for module in installed:
        sys.modules.pop(module, None)
