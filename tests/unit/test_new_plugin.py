"""``specsync new-plugin``: what it writes works, and it never writes over anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specsync_core.cli import main
from specsync_core.cli.new_plugin import SITES, write_plugin
from specsync_core.cli.output import UsageError
from specsync_core.registry_files import read_registry

ROOT = Path(__file__).parents[2]


def say(capsys, *words: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["new-plugin", *words])
    except SystemExit as error:
        code = int(error.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("written") / "specsync-my-draft"
    write_plugin("my-draft", target, 4201)
    return target


def test_what_it_writes_passes_its_own_tests_whatever_the_folders_policy(written):
    policy = written / "specsync.toml"
    policy.write_text('sites = "off"\n')
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPECSYNC_", "SGLANG_"))}
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        command, cwd=written, env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    policy.unlink()
    assert finished.returncode == 0, finished.stdout
    assert "2 passed" in finished.stdout


def test_it_is_clean(written):
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--line-length",
        "120",
        "--select",
        "E,F,I,B,UP,SIM,RUF",
    ]
    finished = subprocess.run([*ruff, "."], cwd=written, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout
    left = [path for path in written.rglob("*.[pt]*") if "@" in path.read_text().replace("@hookimpl", "")]
    assert left == [], "a placeholder was left"


def test_pages_install_pytest_before_they_run_it(written):
    for text in ((written / "README.md").read_text(), (ROOT / "docs/write-a-plugin.md").read_text()):
        assert "pip install ." not in text
        assert 0 < text.index("pip install -e '.[test]'") < text.index("python -m pytest")


def test_its_registry_is_a_third_partys(written):
    sites = read_registry(written / "specsync_my_draft" / "sites.toml", "specsync-my-draft").sites
    assert [site.number for site in sites] == list(range(4201, 4201 + SITES))
    assert {site.algorithm for site in sites} == {"my-draft"}
    assert 'my-draft = "specsync_my_draft"' in (written / "pyproject.toml").read_text()


def test_the_command_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = say(capsys, "lookahead", "--json")
    assert code == 0
    said = json.loads(out)
    assert said["directory"] == "specsync-lookahead"
    assert {
        str(path.relative_to("specsync-lookahead")) for path in Path("specsync-lookahead").rglob("*") if path.is_file()
    } == set(said["files"])
    assert list(tmp_path.iterdir()) == [tmp_path / "specsync-lookahead"]
    code, out, _ = say(capsys, "other", "--directory", "elsewhere")
    assert out.startswith(
        "wrote 8 files to elsewhere. Next:\n  cd elsewhere\n  pip install -e '.[test]'\n  python -m pytest\n"
    )


def test_two_names_get_numbers_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    numbers = set()
    for name in ("alpha", "beta", "gamma-2"):
        say(capsys, name)
        registry = read_registry(Path(f"specsync-{name}", f"specsync_{name.replace('-', '_')}", "sites.toml"), "x")
        numbers |= {site.number for site in registry.sites}
    assert len(numbers) == 3 * SITES
    assert min(numbers) >= 1000


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("My", "'My' is no name for a plugin: it must be lower case words"),
        ("2fast", "begin with a letter"),
        ("a_b", "joined by '-'"),
        ("../x", "is no name for a plugin"),
        ("x" * 41, "at most 40 characters"),
        ("", "is no name for a plugin"),
        ("dspark", "'dspark' is taken: it is the algorithm dspark."),
        ("rng", "'rng' is taken: it is the preset rng."),
        ("dspark-plan", "'dspark-plan' is taken: it is the site dspark-plan."),
        ("eagle-rocm", "'eagle-rocm' is taken by an installed plugin"),
        ("eagle-verify", "'eagle-verify' is taken: there is a site eagle-verify-greedy."),
        ("core", "'core' is taken: there is a package specsync_core already."),
    ],
)
def test_a_name_that_will_not_do_is_refused(tmp_path, monkeypatch, capsys, name, problem):
    monkeypatch.chdir(tmp_path)
    code, _, error = say(capsys, name)
    assert code == 2
    assert problem in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_exists_is_left_as_it_is(tmp_path, monkeypatch, capsys, make):
    monkeypatch.chdir(tmp_path)
    make(Path("specsync-lookahead"))
    code, _, error = say(capsys, "lookahead")
    assert code == 2
    assert "specsync-lookahead exists; nothing was written. Give another --directory" in error
    assert os.listdir(tmp_path) == ["specsync-lookahead"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"absent/x cannot be written: No such file or directory\. Nothing was left"):
        write_plugin("lookahead", tmp_path / "absent" / "x", 4201)


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_plugin("lookahead", tmp_path / "x", 4201)
    assert list(tmp_path.iterdir()) == []
