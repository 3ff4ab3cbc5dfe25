"""The one-shot kernel itself, under Triton's interpreter, for two, four and eight ranks in one process."""

import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.unit.interpreter import CHECKS, interpret


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
    said = interpret(sys.executable, sys.path, "tests.unit.one_shot_interpreted", str(world))
    assert said.count(f"with {world} ranks") == CHECKS > 0
