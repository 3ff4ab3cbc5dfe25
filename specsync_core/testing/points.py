"""Broadcast points without their engine: a function under a point's hook, and what can be wrong with a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from specsync_core.engines.hooks import build_hooks
from specsync_core.engines.host_hooks import Hook
from specsync_core.engines.known import ENGINES
from specsync_core.engines.proof import Firings
from specsync_core.engines.versions import is_among
from specsync_core.errors import EngineError, RegistryError
from specsync_core.facts import EngineFacts
from specsync_core.hookspecs import BroadcastPoint
from specsync_core.manager import PluginManager
from specsync_core.registry import Registry, Site
from specsync_core.sync import SpecTpSync

PLATFORMS = ("cuda", "rocm", "cpu")


def hooked(point: BroadcastPoint, function: Callable[..., Any], sync: SpecTpSync) -> Callable[..., Any]:
    """Return ``function`` as it would run under the point's hook, had the engine been patched.

    Args:
        function: stands in for `BroadcastPoint.target`, with the parameters of `BroadcastPoint.signature`.
        sync: this rank's.
    """
    hooks = [hook for hook in build_hooks([point], sync, Firings()) if hook.target == point.target]
    for hook in hooks:
        function = _under(hook, function)
    return function


def _under(hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if hook.kind == "around":
            return hook.function(function, *args, **kwargs)
        if hook.kind == "before":
            args, kwargs = hook.function(*args, **kwargs) or (args, kwargs)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        replaced = hook.function(result, *args, **kwargs)
        return result if replaced is None else replaced

    return call


def points_by_engine(manager: PluginManager) -> Iterator[tuple[EngineFacts, BroadcastPoint]]:
    """Yield the points that plugins have in any known engine, version and platform; equal targets and versions once."""
    seen = set()
    for engine in ENGINES.values():
        for version in engine.versions:
            for platform in PLATFORMS:
                facts = EngineFacts(engine=engine.name, version=version, platform=platform)
                for point in manager.broadcast_points(facts):
                    key = (engine.name, point.target, point.versions, point.sites, point.when)
                    if key not in seen:
                        seen.add(key)
                        yield facts, point


def point_problems(point: BroadcastPoint, engine: str, registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a point, with the site that it is about."""
    where = f"the point at {point.target}"
    if not point.sites:
        yield "-", f"{where} names no site"
    for slug in point.sites:
        try:
            site = registry.site(slug)
        except RegistryError as error:
            yield slug, f"{where}: {error}"
            continue
        yield from ((slug, f"{where}: {problem}") for problem in _site_problems(point, site))
    if not point.signature:
        yield ", ".join(point.sites), f"{where} has no signature to hold the engine's function to"
    yield from ((", ".join(point.sites), f"{where}{problem}") for problem in _version_problems(point, engine))
    if point.when == "callback" and point.callback not in point.signature:
        yield ", ".join(point.sites), f"{where}: its callback {point.callback!r} is no parameter"


def _version_problems(point: BroadcastPoint, engine: str) -> Iterator[str]:
    try:
        if not any(is_among(version, point.versions) for version in ENGINES[engine].versions):
            yield f" fits no known version of {engine} ({point.versions})"
    except EngineError as error:
        yield f": {error}"


def _site_problems(point: BroadcastPoint, site: Site) -> Iterator[str]:
    if point.when == "engine" or point.wait_for is not None:
        return
    agrees = point.op is not None or point.leads
    if agrees and site.kind != "consensus":
        yield f"it agrees on a host value, and the site is of kind {site.kind}"
    elif not agrees and site.kind != "broadcast":
        yield f"it hands over tensors, and the site is of kind {site.kind}"
