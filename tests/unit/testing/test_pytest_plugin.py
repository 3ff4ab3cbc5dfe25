"""The fixtures that every project with specsync installed has, and what loading them costs."""

import subprocess
import sys

import pytest

from specsync_core import testing


def test_pytest_loads_it(request):
    plugin = request.config.pluginmanager.get_plugin("specsync")
    assert plugin.__name__ == "specsync_core.testing.pytest_plugin"


def test_loading_it_imports_nothing_heavy():
    code = "import sys, specsync_core.testing.pytest_plugin; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"torch", "pydantic", "numpy"}.isdisjoint(found)


@pytest.mark.parametrize("name", testing.__all__)
def test_every_name_of_the_package_exists(name):
    assert getattr(testing, name) is not None
    assert name in dir(testing)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'run_rank'"):
        _ = testing.run_rank


def test_fixtures(
    specsync_conformance, specsync_run_ranks, specsync_fake_ranks, specsync_fake_engine, specsync_no_settings
):
    assert specsync_conformance is testing.plugin_conformance
    assert specsync_run_ranks is testing.run_ranks
    assert specsync_fake_ranks is testing.run_fake_ranks
    assert specsync_fake_engine is testing.FakeEngine


def test_settings_of_the_shell_are_taken_away(monkeypatch, request):
    import os

    monkeypatch.setenv("SPECSYNC_SITES", "none")
    request.getfixturevalue("specsync_no_settings")
    assert "SPECSYNC_SITES" not in os.environ
