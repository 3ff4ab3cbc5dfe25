"""A third party's plugin, as its users have it: both wheels in a fresh environment, nothing of the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.engines.vllm.signatures import parameters

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_plugin"
VLLM = sorted(ROOT.glob(".venv-vllm-*/lib/python3*/site-packages/vllm/v1/spec_decode/medusa.py"))


def pip(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *map(str, words)], check=True, capture_output=True, text=True
    )


class Environment:
    """A fresh virtual environment; torch and the other dependencies are borrowed from the one that runs the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        self.bin = folder / "env" / "bin"
        wheels = folder / "wheels"
        core = folder / "core"
        subprocess.run(["git", "clone", "--quiet", ROOT, core], check=True)
        shutil.copytree(
            EXAMPLE, folder / "medusa", ignore=shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info")
        )
        for source in (core, folder / "medusa"):
            pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source)
        pip("--python", self.bin / "python", "install", "--no-deps", "--no-index", *sorted(wheels.glob("*.whl")))
        (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
        # Only now, so that pip does not take the checkout's own installation for this environment's.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.site = site

    def run(self, *words: str, **environ: str) -> str:
        """Run a command of the environment away from the checkout, and return what it prints."""
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("SPECSYNC_", "SGLANG_", "PYTHON"))
        }
        finished = subprocess.run(
            [self.bin / words[0], *words[1:]],
            cwd=self.folder / "medusa",
            env={**clean, "OMP_NUM_THREADS": "1", **environ},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("third-party"))


def test_both_distributions_come_from_their_wheels(environment):
    where = "import specsync_core, specsync_medusa; print(specsync_core.__file__, specsync_medusa.__file__)"
    assert all(path.startswith(str(environment.site)) for path in environment.run("python", "-P", "-c", where).split())
    (medusa,) = [
        plugin for plugin in json.loads(environment.run("specsync", "plugins", "--json")) if plugin["name"] == "medusa"
    ]
    assert (medusa["distribution"], medusa["status"]) == ("specsync-medusa", "active")
    assert len(medusa["hooks"]) == 4


def test_its_sites_are_listed_and_join_the_presets(environment):
    listed = json.loads(environment.run("specsync", "sites", "--json"))
    sites = {site["slug"]: site for site in listed["sites"] if site["source"] == "specsync-medusa"}
    assert len(sites) == 7
    assert all(site["number"] >= 1000 for site in sites.values())
    drawing = {slug for slug, site in sites.items() if site["cause"] == "rng"}
    assert len(drawing) == 3
    rng = {slug for slug in listed["presets"]["rng"]["sites"] if slug in sites}
    assert rng == drawing | {"medusa-mem"}
    assert "medusa-mem" in listed["presets"]["init"]["sites"]


def test_policies_name_its_sites(environment):
    plan = json.loads(environment.run("specsync", "plan", "--json", SPECSYNC_SITES="medusa,-1103"))
    on = {site["site"] for site in plan["sites"] if site["mode"]["value"] == "sync"}
    assert "medusa-heads" in on
    assert "medusa-block" not in on
    assert all(slug.startswith("medusa-") for slug in on)


def test_the_demo_runs_it_and_it_heals_a_fault(environment):
    story = json.loads(environment.run("specsync", "demo", "--algorithm", "medusa", "--steps", "12", "--json"))
    assert story["held"]
    text = json.dumps(story)
    assert "medusa-accept-greedy" in text
    healed = [part["healed"] for part in _dicts(story) if part.get("healed")]
    assert any(part.get("medusa-accept-greedy") for part in healed)


def _dicts(value):
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts(inner)


def test_the_wheel_holds_the_template(environment):
    said = json.loads(environment.run("specsync", "new-plugin", "lookahead", "--directory", "../lookahead", "--json"))
    assert "specsync_lookahead/sites.toml" in said["files"]
    assert (environment.folder / "lookahead" / ".gitignore").is_file()


def test_its_own_tests_pass(environment):
    assert "passed" in environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.skipif(not VLLM, reason="no environment with vLLM here: make test-engines builds it")
def test_the_installed_vllm_has_the_function_that_its_point_names():
    sys.path.insert(0, str(EXAMPLE))
    try:
        from specsync_medusa import vllm
    finally:
        sys.path.remove(str(EXAMPLE))
    from specsync_core import EngineFacts

    (point,) = vllm.points(EngineFacts(engine="vllm", version="0.32.0", algorithm="medusa"))
    for path in VLLM:
        assert parameters(path.parents[3], point.target) == point.signature
