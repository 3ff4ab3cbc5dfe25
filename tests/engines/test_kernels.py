"""The kernels under Triton's interpreter, with the Triton that an engine brings."""

import os
import subprocess

import pytest

from tests.engines.environment import ROOT
from tests.engines.sglang.environment import VERSIONS, is_built, python_of
from tests.unit.plugins.tree_masks import CASES
from tests.unit.test_one_shot_kernel import CHECKS

VERSION = VERSIONS[0]


pytestmark = [
    pytest.mark.skipif(not is_built(VERSION), reason=f"no environment of sglang {VERSION}: run `make test-engines`"),
    pytest.mark.timeout(600),
]


def interpret(module, *arguments):
    """Run a program of the tests under the interpreter; return what it printed."""
    paths = (ROOT, ROOT / "plugins" / "eagle")
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    program = [str(python_of(VERSION)), "-m", module, *arguments]
    run = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("world", [2, 4])
def test_the_transports_kernels(world):
    assert interpret("tests.unit.one_shot_interpreted", str(world)).count(f"with {world} ranks") == CHECKS > 0


def test_the_kernel_that_spreads_trees_into_a_mask():
    assert interpret("tests.unit.plugins.tree_masks").count("trees of") == 2 * len(CASES) + 1
