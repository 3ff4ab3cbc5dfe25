"""Applies hooks by replacing functions where the engine finds them; for engines that have no hook registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from specsync_core.engines.hooks import Hook
from specsync_core.engines.targets import find_target

Fail = Callable[[str, Exception], None]
"""Called with a target and what it raised, before that is raised on; tells the peers."""


def apply_hooks(hooks: Sequence[Hook], fail: Fail) -> list[str]:
    """Replace each target once, with all its hooks around it; return the targets that were not reached.

    A module's name for a function is a target of its own: where two modules hold one function, name each.
    """
    by_target: dict[str, list[Hook]] = {}
    for hook in hooks:
        by_target.setdefault(hook.target, []).append(hook)
    return [target for target, of_it in by_target.items() if not _replace(target, of_it, fail)]


def _replace(target: str, hooks: Sequence[Hook], fail: Fail) -> bool:
    place, _, name = target.rpartition(".")
    try:
        owner = find_target(place) if "." in place else None
        original = getattr(owner, name)
    except (LookupError, AttributeError):
        return False
    replacement = _hooked(original, hooks, target, fail)
    setattr(owner, name, replacement)
    return getattr(owner, name) is replacement


def _hooked(original: Callable[..., Any], hooks: Sequence[Hook], target: str, fail: Fail) -> Callable[..., Any]:
    befores, afters = ([hook.function for hook in hooks if hook.kind == kind] for kind in ("before", "after"))
    inner = original
    for hook in hooks:
        if hook.kind == "around":
            inner = _around(hook.function, inner)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            for before in befores:
                args, kwargs = before(*args, **kwargs) or (args, kwargs)
            result = inner(*args, **kwargs)
            for after in afters:
                changed = after(result, *args, **kwargs)
                result = result if changed is None else changed
            return result
        except Exception as error:
            fail(target, error)
            raise

    return call


def _around(function: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(inner, *args, **kwargs)

    return call
