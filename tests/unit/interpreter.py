"""Programs that run kernels under Triton's interpreter, which a process has to ask for before it imports them."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = (ROOT / "tests/unit/one_shot_interpreted.py").read_text().count("\ndef test_")
"""Of `one_shot_interpreted`, for each number of ranks."""


def interpret(python: str, paths: Iterable[str | Path], module: str, *arguments: str) -> str:
    """Run a program of the tests with one environment's Python, and what else it imports from; return what it said."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}
    program = [python, "-m", module, *arguments]
    run = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
