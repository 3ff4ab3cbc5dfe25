"""Compare the points with unpacked wheels of vLLM, without importing them.

    python -m tests.engines.vllm.signatures FOLDER/0.31.0 FOLDER/0.32.0

Each folder is named by its version and holds ``vllm/`` of that wheel. Prints a line for each target that is absent or
has other parameters, and ends with 1 if there is one. A version that is not known gets the nearest one's points.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from specsync_core import EngineFacts, plugin_manager
from specsync_core.engines.known import VLLM
from specsync_core.engines.start import find_points
from specsync_core.engines.targets import targets_of


def check(folder: Path) -> Iterator[str]:
    """Yield what does not fit."""
    facts = EngineFacts(engine="vllm", version=folder.name)
    for path, signature in targets_of(find_points(plugin_manager(), facts, VLLM.versions).points):
        actual = parameters(folder, path)
        if actual is None:
            yield f"{path}: absent"
        elif actual != signature:
            yield f"{path}: ({', '.join(actual)}), known are ({', '.join(signature)})"


def parameters(folder: Path, path: str) -> tuple[str, ...] | None:
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        file = folder.joinpath(*parts[:count]).with_suffix(".py")
        if file.exists():
            return _in(folder, ast.parse(file.read_text()), parts[count:])
    return None


def _in(folder: Path, node: ast.AST, names: list[str]) -> tuple[str, ...] | None:
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.ImportFrom) and any(alias.name == names[0] for alias in child.names):
            return parameters(folder, ".".join((child.module or "", *names)))
        if getattr(child, "name", None) != names[0]:
            continue
        if isinstance(child, ast.ClassDef) and names[1:]:
            return _in(folder, child, names[1:])
        if isinstance(child, ast.FunctionDef):
            given = child.args
            return tuple(arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    return None


def main() -> None:
    wrong = False
    for folder in map(Path, sys.argv[1:]):
        problems = list(check(folder))
        print(f"{folder.name}: {len(problems)} problems")
        for problem in problems:
            print(f"  {problem}")
        wrong = wrong or bool(problems)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
