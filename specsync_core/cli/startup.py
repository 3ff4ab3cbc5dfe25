"""What an engine's start-up would refuse of the environment, found before it: faults, control socket, directories."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from specsync_core.errors import ControlError, PolicyError
from specsync_core.registry import Registry
from specsync_core.settings import Environment


def startup_checks(environment: Environment, registry: Registry) -> Iterator[Callable[[], None]]:
    """Yield checks; each raises a SpecSyncError where an engine would stop, or would go on without what was asked for.

    Nothing is left behind in any directory.
    """
    if environment.faults is not None:
        yield partial(_check_faults, environment.faults, environment.allow_faults, registry)
    if environment.control is not None:
        yield partial(_check_control, environment.control.value)
    for variable, directory in (
        ("SPECSYNC_DUMP_DIR", environment.dump_dir),
        ("SPECSYNC_STATS_DIR", environment.stats_dir),
    ):
        if directory is not None:
            yield partial(_check_directory, variable, directory)


def _check_faults(text: str, allowed: bool, registry: Registry) -> None:
    from specsync_core.diagnostics.fault_grammar import parse_faults
    from specsync_core.diagnostics.faults import check_allowed

    check_allowed(parse_faults(text, registry, "SPECSYNC_FAULTS"), allowed)


def _check_control(template: str) -> None:
    from specsync_core.control.listener import find_problem

    path = template.replace("{pid}", str(os.getpid()))
    problem = find_problem(path) or _why_not_writable(Path(path).parent)
    if problem is not None:
        raise ControlError(f"SPECSYNC_CONTROL: {path}: {problem}")


def _check_directory(variable: str, directory: Path) -> None:
    """Each rank makes the directory with its parents, so the nearest that is there has to take files."""
    there = next((folder for folder in (directory, *directory.parents) if os.path.lexists(folder)), directory)
    if (problem := _why_not_writable(there)) is not None:
        raise PolicyError(f"{variable}: {directory}: {problem}")


def _why_not_writable(folder: Path) -> str | None:
    """Try it: modes say little of /proc, of read-only mounts and of root."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder} takes no file: {error.strerror or error}. Give a directory that this user may write to."
    return None
