"""The pytest plugin ``specsync``: what tests of plugins are made of, as fixtures.

pytest loads this module in every run where specsync is installed, so it imports nothing until a fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from specsync_core.testing import FakeEngine


@pytest.fixture
def specsync_conformance() -> Callable[..., Any]:
    """`specsync_core.testing.plugin_conformance`: call it with the plugin; it raises where a rule is broken."""
    from specsync_core.testing import plugin_conformance

    return plugin_conformance


@pytest.fixture
def specsync_run_ranks() -> Callable[..., list[Any]]:
    """`specsync_core.testing.run_ranks`: call it with a function at module level and a number of processes."""
    from specsync_core.testing import run_ranks

    return run_ranks


@pytest.fixture
def specsync_fake_ranks() -> Callable[..., list[Any]]:
    """`specsync_core.testing.run_fake_ranks`: call it with a function of one `FakeGroup` and a number of threads."""
    from specsync_core.testing import run_fake_ranks

    return run_fake_ranks


@pytest.fixture
def specsync_fake_engine() -> type[FakeEngine]:
    """`specsync_core.testing.FakeEngine`: call it with an algorithm and a sync, then ``run()``."""
    from specsync_core.testing import FakeEngine

    return FakeEngine


@pytest.fixture
def specsync_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without specsync's variables: the shell's settings are not about the test."""
    from specsync_core.settings import VARIABLES

    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
