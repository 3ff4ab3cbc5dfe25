"""Every block of the README is run: commands with their output, the example, the policy file, the demo."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specsync_core import load_registry, parse_sites, resolve_plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run(command: str, **environ: str) -> str:
    """Run a command as a shell user would, and return what it prints."""
    words = shlex.split(command)
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        environ[name] = value
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPECSYNC_", "SGLANG_"))}
    finished = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        cwd=ROOT,
        env={**clean, "COLUMNS": "120", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return finished.stdout


def sessions() -> list[tuple[str, str]]:
    """Every ``$ command`` of the README, with the output that stands below it."""
    found = []
    for block in blocks("console"):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command, _ in sessions() if command.startswith("make ")]
    assert sorted(targets) == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize(("command", "output"), [each for each in sessions() if "specsync " in each[0]])
def test_commands_print_what_the_readme_says(command, output):
    assert run(command).strip() == output.strip()


def test_the_example_is_the_file_and_heals_on_two_ranks():
    (example,) = blocks("python")
    assert example.strip() in (ROOT / "examples/engine_step.py").read_text()
    printed = run("torchrun --standalone --nproc-per-node 2 examples/engine_step.py", OMP_NUM_THREADS="1")
    assert "rank 0: [104, 202], healed 0" in printed
    assert "rank 1: [104, 202], healed 2" in printed


def test_the_policy_file_is_valid_and_does_what_it_says(tmp_path):
    (text,) = blocks("toml")
    (tmp_path / "specsync.toml").write_text(text)
    plan = resolve_plan(load_registry(), environ={}, config=tmp_path / "specsync.toml")
    assert plan.timeout_s == 60.0


def test_the_policies_of_the_table_are_valid():
    registry = load_registry()
    policies = re.findall(r"^\| `([^`]+)` \| ", README, re.MULTILINE)
    assert len(policies) >= 6
    for policy in policies:
        assert parse_sites(policy, registry)


def shape(text: str) -> list[str]:
    """The lines of a text without its numbers, alignment and blank lines."""
    lines = (re.sub(r"[-\d][\d.,:]*", "#", line) for line in text.splitlines())
    return [" ".join(line.split()) for line in lines if line.strip()]


TOLD = ("(a)", "First divergence", "Rank", "It finished", "Against", "Unfaulted", "sync o", "Medians")
"""What the demo says in every run, numbers aside; healed memory gates and the like depend on the machine."""


def test_the_demo_prints_what_the_readme_shows():
    (shown,) = [block for block in blocks("text") if "First divergence" in block]
    printed = shape(run("specsync demo"))
    told = [line for line in shape(shown) if line.startswith(TOLD)]
    assert len(told) >= 10
    missing = [line for line in told if line not in printed]
    assert not missing, "run `specsync demo` and put its output into the README"
