"""What a user installs: the wheel holds the registry, the plugins and the entry points, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that the build leaves nothing behind in the checkout.
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_registry_ships_and_is_the_one_at_the_root(wheel):
    assert wheel.read("specsync_core/sites.toml") == (ROOT / "sites.toml").read_bytes()
    assert "specsync_core/py.typed" in wheel.namelist()


def test_the_plugins_ship_as_packages_of_their_own(wheel):
    packages = {name.split("/")[0] for name in wheel.namelist() if ".dist-info" not in name}
    assert packages == {"specsync_core", "specsync_eagle", "specsync_dspark", "specsync_dflash", "specsync_vllm"}


def test_every_package_of_the_checkout_ships(wheel):
    shipped = set(wheel.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "specsync_core", "plugins"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    modules = {
        name.split("/", 2)[2] if name.startswith("plugins/") else name for name in tracked if name.endswith(".py")
    }
    assert modules <= shipped


def test_entry_points_are_declared(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    assert "specsync = specsync_core.cli:main" in text
    for plugin in ("eagle = specsync_eagle", "eagle-rocm = specsync_eagle.rocm", "dspark = ", "dflash = ", "vllm = "):
        assert plugin in text
