"""The one-shot kernel itself, under Triton's interpreter, for two, four and eight ranks in one process."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = (ROOT / "tests/unit/one_shot_interpreted.py").read_text().count("\ndef test_")
"""Of the program, for each number of ranks."""


def obstacle() -> str | None:
    """What keeps Triton's interpreter from running here."""
    try:
        triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    if triton < (3, 8) and numpy >= (2, 4):
        return "Triton's interpreter before 3.8 turns arrays into scalars in a way that numpy 2.4 refuses"
    return None


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_kernel_under_the_interpreter(world):
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    program = [sys.executable, "-m", "tests.unit.one_shot_interpreted", str(world)]
    run = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(f"with {world} ranks") == CHECKS > 0
