"""The kernels of the transports under Triton's interpreter, with the Triton that an engine brings."""

import os
import subprocess

import pytest

from tests.engines.environment import ROOT
from tests.engines.sglang.environment import VERSIONS, is_built, python_of

VERSION = VERSIONS[0]


@pytest.mark.skipif(not is_built(VERSION), reason=f"no environment of sglang {VERSION}: run `make test-engines`")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4])
def test_the_kernels_under_the_interpreter(world):
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    program = [str(python_of(VERSION)), "-m", "tests.unit.one_shot_interpreted", str(world)]
    run = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(f"with {world} ranks") == 11
