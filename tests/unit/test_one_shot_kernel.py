"""The one-shot kernel itself, under Triton's interpreter, for two, four and eight ranks in one process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_kernel_under_the_interpreter(world):
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    program = [sys.executable, "-m", "tests.unit.one_shot_interpreted", str(world)]
    run = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("with") == 8
