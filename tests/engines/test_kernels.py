"""The kernels under Triton's interpreter, with the Triton that an engine brings."""

import pytest

from tests.engines.environment import ROOT
from tests.engines.sglang.environment import VERSIONS, is_built, python_of
from tests.unit.interpreter import CHECKS, interpret
from tests.unit.plugins.tree_masks import CASES

VERSION = VERSIONS[0]
PYTHON = str(python_of(VERSION))


pytestmark = [
    pytest.mark.skipif(not is_built(VERSION), reason=f"no environment of sglang {VERSION}: run `make test-engines`"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("world", [2, 4])
def test_the_transports_kernels(world):
    said = interpret(PYTHON, (), "tests.unit.one_shot_interpreted", str(world))
    assert said.count(f"with {world} ranks") == CHECKS > 0


def test_the_kernel_that_spreads_trees_into_a_mask():
    said = interpret(PYTHON, (ROOT / "plugins" / "eagle",), "tests.unit.plugins.tree_masks")
    assert said.count("trees of") == 2 * len(CASES) + 1
