"""Build the environments of the SGLang versions that the tests run: the real wheels, on CPU.

    python -m tests.engines.sglang.environment 0.5.17 0.5.23

SGLang is installed without its dependencies (they are GPU builds); ``requirements.txt`` next to this file pins what its
import and a CPU engine need, and ``stubs`` stands in for packages whose wheels need a GPU library.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from tests.engines.environment import ROOT, Environment, build_and_say

__all__ = ["HERE", "ROOT", "VERSIONS", "environment", "is_built", "python_of"]

HERE = Path(__file__).resolve().parent
VERSIONS = ("0.5.17", "0.5.23")


def environment(version: str) -> Environment:
    requirements = HERE / "requirements.txt"
    return Environment(
        engine="sglang",
        version=version,
        torch="torch==2.13.0",
        installs=(
            ("--no-deps", "--requirement", str(requirements)),
            ("--no-deps", f"sglang=={version}"),
        ),
        texts=(requirements.read_text(),),
    )


def python_of(version: str) -> Path:
    return environment(version).python


@cache
def is_built(version: str) -> bool:
    """Whether the environment is whole, and from the present recipe, when it is first asked for."""
    return environment(version).is_built()


def main() -> None:
    for version in sys.argv[1:] or VERSIONS:
        build_and_say(environment(version))


if __name__ == "__main__":
    main()
