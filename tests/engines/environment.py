"""Build a Python environment with the real wheel of one engine version, what it imports, and this project.

Each version gets ``.venv-ENGINE-VERSION`` at the project's root. One that is whole already is left alone; the project
alone is installed again when its metadata changed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """How the environment of one version is made."""

    engine: str
    version: str
    torch: str
    """The requirement under which torch is installed first."""
    installs: tuple[tuple[str, ...], ...]
    """The arguments of pip, call after call."""
    texts: tuple[str, ...] = ()
    """What else the recipe consists of: files that pip reads."""

    @property
    def path(self) -> Path:
        return ROOT / f".venv-{self.engine}-{self.version}"

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def is_built(self) -> bool:
        """Whether the environment is whole, and from the present recipe."""
        return all(self.has_stamp(name, recipe) for name, recipe in self._recipes().items())

    def build(self) -> None:
        """Build what is missing."""
        recipes = self._recipes()
        if not self.has_stamp("engine", recipes["engine"]):
            venv.create(self.path, clear=True, with_pip=True)
            for arguments in ((self.torch,), *self.installs):
                self.pip(arguments)
            self.write_stamp("engine", recipes["engine"])
        if not self.has_stamp("project", recipes["project"]):
            # Entry points come with it: the engine finds the adapter as it would in an operator's installation.
            self.pip(("--editable", str(ROOT)))
            self.write_stamp("project", recipes["project"])

    def pip(self, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True, env=os.environ | dict(environ or {}))

    def has_stamp(self, name: str, recipe: str) -> bool:
        """Whether this part was built from this recipe."""
        path = self.path / f".{name}-built"
        return path.exists() and path.read_text() == _digest(recipe)

    def write_stamp(self, name: str, recipe: str) -> None:
        (self.path / f".{name}-built").write_text(_digest(recipe))

    def _recipes(self) -> dict[str, str]:
        return {
            "engine": "\0".join((self.version, self.torch, *self.texts)),
            "project": (ROOT / "pyproject.toml").read_text(),
        }


def _digest(recipe: str) -> str:
    return hashlib.sha256(recipe.encode()).hexdigest()


def build_and_say(environment: Environment) -> None:
    """Build, and say on stdout how long it took."""
    started = time.monotonic()
    environment.build()
    taken_s = time.monotonic() - started
    print(f"{environment.engine} {environment.version}: {environment.path.name} ready after {taken_s:.0f} s")
