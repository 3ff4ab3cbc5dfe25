"""Finding an engine's functions by dotted paths, and checking that they are the ones that a point was read from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from specsync_core.errors import did_you_mean
from specsync_core.hookspecs import BroadcastPoint


def find_target(path: str) -> Any:
    """Import what a dotted path names: a function of a module, or a method of a class of one.

    Raises:
        LookupError: no module on the path can be imported, or it lacks the name; the message says which.
    """
    parts = path.split(".")
    found, rest = _import_longest(parts)
    for name in rest:
        if not hasattr(found, name):
            raise LookupError(f"{_name(found)} has no {name}{did_you_mean(name, dir(found))}")
        found = getattr(found, name)
    return found


def _import_longest(parts: Sequence[str]) -> tuple[Any, Sequence[str]]:
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            return import_module(module), parts[count:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise LookupError(f"{module} cannot be imported: {error}") from error
        except Exception as error:
            raise LookupError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    raise LookupError(f"no module named {parts[0]}")


def _name(found: Any) -> str:
    return found.__name__ if isinstance(found, ModuleType) else f"{found.__module__}.{found.__qualname__}"


def check_target(path: str, signature: Sequence[str]) -> str | None:
    """Return what is wrong with a target, or None: it is absent, or its parameters are not the known ones."""
    try:
        target = find_target(path)
    except LookupError as error:
        return f"{path}: not found: {error}"
    actual = tuple(inspect.signature(inspect.unwrap(target)).parameters)
    if actual == tuple(signature):
        return None
    return f"{path}: its parameters are ({', '.join(actual)}), known are ({', '.join(signature)})"


def targets_of(points: Iterable[BroadcastPoint]) -> list[tuple[str, tuple[str, ...]]]:
    """Return every target of points and of their scopes once, with its known parameters."""
    wanted: dict[tuple[str, tuple[str, ...]], None] = {}
    for point in points:
        wanted[point.target, point.signature] = None
        wanted.update({(scope.target, scope.signature): None for scope in point.within})
    return list(wanted)


def check_points(points: Iterable[BroadcastPoint]) -> Iterator[str]:
    """Yield what is wrong with the targets of points, scopes included; each target is named once."""
    for path, signature in targets_of(points):
        if problem := check_target(path, signature):
            yield problem


def is_imported(point: BroadcastPoint) -> bool:
    """Whether the engine has imported the module of a point's target."""
    return any(point.target.startswith(f"{name}.") for name in _leaf_modules(point.target))


def _leaf_modules(path: str) -> Iterable[str]:
    """The modules on a dotted path that are imported and are no package."""
    parts = path.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts)))
    return (name for name in names if name in sys.modules and not hasattr(sys.modules[name], "__path__"))
