"""The policy file: ``specsync.toml``, or the table ``[tool.specsync]`` of a ``pyproject.toml``.

    sites = "all"                            # the policy
    timeout_s = 60
    [presets]
    careful = "all,-dspark-plan"             # one more word for policies
    [algorithms.dflash]
    sites = "rng:audit"                      # decides about dflash's sites only
    [models."*DeepSeek-V4*"]
    sites = "careful"                        # decides for the models that match
    [models."*DeepSeek-V4*".algorithms.dspark]
    sites = "all"

What stands further down is stronger: algorithms over the file's own policy, models over both; of several
model tables that match, a later one over an earlier one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os.path import lexists
from pathlib import Path
from typing import Any

import tomli
from pydantic import ConfigDict, Field, ValidationError

from specsync_core.bounded_file import MAX_TEXT_BYTES, read_bounded
from specsync_core.errors import PolicyError
from specsync_core.registry import Table
from specsync_core.registry_files import keys_at, problem_line
from specsync_core.settings import Transport

FILE_NAME = "specsync.toml"
PYPROJECT = "pyproject.toml"
TOOL_TABLE = ("tool", "specsync")

logger = logging.getLogger("specsync")


class _Section(Table):
    # Most commands never see a policy file, and building the validators costs start-up time.
    model_config = ConfigDict(defer_build=True)


class AlgorithmPolicy(_Section):
    """``[algorithms.NAME]``"""

    sites: str
    """Policy for this algorithm's sites; it decides about no others."""


class ModelPolicy(_Section):
    """``[models."GLOB"]``, for models whose name or path matches; case does not matter."""

    sites: str | None = None
    """Policy; absent leaves the decision to the rest of the file."""
    transport: Transport | None = None
    """As in the file's head."""
    algorithms: dict[str, AlgorithmPolicy] = Field(default_factory=dict)
    """Per algorithm, for this model."""


class PolicyTables(_Section):
    """The whole file."""

    sites: str | None = None
    """Policy: which sites are on. Absent leaves the decision to plugins and the registry's default."""
    transport: Transport | None = None
    """How tensors travel: ``auto`` (default), ``one-shot``, ``grouped`` or ``group``."""
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds that ranks wait for each other at start-up and in host agreements. Default 30."""
    counters: bool | None = None
    """Count divergence in mode sync too. Default true; audit always counts."""
    presets: dict[str, str] = Field(default_factory=dict)
    """More presets: name to policy. They may use each other, and may not shadow a name of the registry."""
    algorithms: dict[str, AlgorithmPolicy] = Field(default_factory=dict)
    """Per algorithm."""
    models: dict[str, ModelPolicy] = Field(default_factory=dict)
    """Per model: a glob over its name; of several that match, the later one is stronger."""


@dataclass(frozen=True)
class PolicyFile:
    """A policy file's content, with the place of each key."""

    path: str
    tables: PolicyTables
    lines: Mapping[tuple[str, ...], int]
    """Path of a key inside the tables to the line that it stands on."""

    def origin(self, *key: str) -> str:
        """Return ``file:line`` of a key, or of the table around it; without a line the key itself."""
        line = _line(self.lines, key)
        return f"{self.path}: {_table(key[:-1])}{key[-1]}" if line is None else f"{self.path}:{line}"

    def models_matching(self, model: str | None) -> list[tuple[str, ModelPolicy]]:
        """Return the model tables that fit a model's name, the strongest last; none for an unknown model."""
        if model is None:
            return []
        tables = self.tables.models.items()
        return [(glob, table) for glob, table in tables if fnmatchcase(model.lower(), glob.lower())]


def find_policy_file(config: Path | None, directory: Path | None = None) -> PolicyFile | None:
    """Read the policy file that is in force, if there is one.

    Args:
        config: the file that ``SPECSYNC_CONFIG`` or the caller names.
        directory: where to look for ``specsync.toml``, then ``pyproject.toml``; None is the working directory.

    Raises:
        PolicyError: a file that is named is not there, or one that is there cannot be read or is wrong; a
            ``pyproject.toml`` that nobody named and that cannot be read is left alone, with a warning.
    """
    if config is not None:
        return read_policy_file(config)
    directory = Path() if directory is None else directory
    if lexists(own := directory / FILE_NAME):
        return read_policy_file(own)
    pyproject = directory / PYPROJECT
    text = _read_somebodys(pyproject) if lexists(pyproject) else ""
    return _tool_table(pyproject, text) if _may_be_ours(text) else None


def read_policy_file(path: Path) -> PolicyFile:
    """Read one policy file; in a file called ``pyproject.toml`` the table ``[tool.specsync]``.

    Raises:
        PolicyError: the file cannot be read, is no TOML, or a table or key is wrong (one line for each).
    """
    if path.name == PYPROJECT:
        found = _tool_table(path, _read(path))
        if found is None:
            raise PolicyError(f"{path}: there is no table [tool.specsync]. Add it, or name another file.")
        return found
    text = _read(path)
    return _validate(path, text, _parse(path, text), ())


def _read_somebodys(path: Path) -> str:
    """A ``pyproject.toml`` that nobody named; one that cannot be read stops no engine, and counts as empty."""
    try:
        return _read(path)
    except PolicyError as error:
        logger.warning("A table [tool.specsync] in it would have no effect: %s", error)
        return ""


def _may_be_ours(text: str) -> bool:
    """Whether it may hold a policy: what is broken without one is not ours to refuse."""
    return re.search(r"^\s*\[\s*tool\b", text, re.MULTILINE) is not None and "specsync" in text


def _tool_table(path: Path, text: str) -> PolicyFile | None:
    table: Any = _parse(path, text)
    for part in TOOL_TABLE:
        table = table.get(part) if isinstance(table, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise PolicyError(f"{path}: [tool] specsync: write it as a table, [tool.specsync].")
    return _validate(path, text, table, TOOL_TABLE)


def _read(path: Path) -> str:
    try:
        return read_bounded(path, MAX_TEXT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise PolicyError(
            f"{path.absolute()}: the policy file cannot be read: {why}. Mend it, or name another in SPECSYNC_CONFIG."
        ) from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except (tomli.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(f"{path}: not valid TOML: {error}. Mend it, and try it with `specsync check`.") from error


def _validate(path: Path, text: str, document: dict[str, Any], prefix: tuple[str, ...]) -> PolicyFile:
    lines = {key[len(prefix) :]: line for line, key in _keys_by_line(text) if key[: len(prefix)] == prefix}
    try:
        return PolicyFile(str(path), PolicyTables.model_validate(document), lines)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            loc = tuple(str(part) for part in problem["loc"])
            place = f":{line}" if (line := _line(lines, loc)) else ""
            where = f"{path}{place}: {_table((*prefix, *loc[:-1]))}"
            problems.append(problem_line(problem, where, loc[-1], keys_at(PolicyTables, loc[:-1])))
        raise PolicyError("\n".join(problems)) from error


def _line(lines: Mapping[tuple[str, ...], int], key: tuple[str, ...]) -> int | None:
    """Return the line of a key, else of the innermost table around it that has one."""
    around = (key[:length] for length in range(len(key), 0, -1))
    return next((lines[path] for path in around if path in lines), None)


def _table(path: tuple[str, ...]) -> str:
    """Return ``[a."b c".d] `` as TOML writes it, or nothing for the head of the file."""
    shown = [part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"' for part in path]
    return f"[{'.'.join(shown)}] " if shown else ""


_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_HEADER_LINE = re.compile(rf"\s*(\[\s*{_KEY}(?:\s*\.\s*{_KEY})*\s*\])")
_KEY_LINE = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=")


def _keys_by_line(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the line of each key that begins one. Good enough for messages: it does not know multi-line strings."""
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER_LINE.match(line):
            table = _key_path(header[1])
            yield number, table
        elif key := _KEY_LINE.match(line):
            yield number, (*table, *_key_path(f"{key[1]} = {{}}"))


def _key_path(toml: str) -> tuple[str, ...]:
    """Return the one path of nested tables that a TOML header or key spells."""
    try:
        document: dict[str, Any] = tomli.loads(toml)
    except tomli.TOMLDecodeError:
        return ()
    path = []
    while document:
        ((key, document),) = document.items()
        path.append(key)
    return tuple(path)
