"""Turns broadcast points into hook functions, whatever applies them to the engine.

A hook is built once, at start-up, over what `SpecTpSync.point` returns. A point whose sites are all off, or whose
group has one rank, yields no hook at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

from specsync_core.engines.host_hooks import Hook, agree_on_given, lead_rows, sync_rows
from specsync_core.engines.proof import Firings
from specsync_core.groups import select_group
from specsync_core.hookspecs import BroadcastPoint, Call, Scope
from specsync_core.sync import PointCall, SpecTpSync

__all__ = ["Hook", "active_points", "build_hooks"]

ReadScope = Callable[[], str | None]


def active_points(points: Iterable[BroadcastPoint], sync: SpecTpSync) -> list[BroadcastPoint]:
    """Return the points that need a hook: one of their sites is on or may be turned on, in a group of several ranks."""
    return [
        point
        for point in points
        if point.when != "engine"
        and any(map(sync.reachable, point.sites))
        and not (point.unless is not None and sync.enabled(point.unless) and sync.plan.mode(point.unless) == "sync")
    ]


def build_hooks(
    points: Iterable[BroadcastPoint], sync: SpecTpSync, firings: Firings, wrapper_modules: Sequence[str] = ()
) -> Iterator[Hook]:
    """Yield the hooks of active points, and those of the scopes that they ask about.

    Args:
        wrapper_modules: modules whose frames lie between a hook and the hooked function's caller.
    """
    variables: dict[tuple[Scope, ...], ContextVar[str | None]] = {}
    for point in points:
        read_scope: ReadScope = _no_scope
        if point.within:
            if point.within not in variables:
                variables[point.within] = ContextVar(point.target, default=None)
                for scope in point.within:
                    yield Hook(scope.target, "around", _enter(scope, variables[point.within]))
            read_scope = variables[point.within].get
        yield _hook(point, sync, firings, read_scope, frozenset({__name__, *wrapper_modules}))


def _no_scope() -> None:
    return None


def _enter(scope: Scope, variable: ContextVar[str | None]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        token = variable.set(scope.value_of(Call(args, kwargs)))
        try:
            return original(*args, **kwargs)
        finally:
            variable.reset(token)

    return around


def _hook(
    point: BroadcastPoint, sync: SpecTpSync, firings: Firings, read_scope: ReadScope, own_modules: frozenset[str]
) -> Hook:
    fired = firings.counter(point)
    if point.wait_for is not None:
        return Hook(point.target, *_wait(point, point.wait_for, fired))
    if point.value_of is not None:
        return agree_on_given(point, sync, fired)
    if point.rows:
        return lead_rows(point, sync, fired) if point.leads else sync_rows(point, sync, fired)
    if point.op is not None:
        agreed = {slug: slug for slug in point.sites if sync.enabled(slug)}
        return Hook(point.target, "after", _agree(point, agreed, sync, fired, own_modules), agreed.clear)
    calls = {slug: sync.point(slug) for slug in point.sites if sync.reachable(slug)}
    if point.when == "after":
        derive = point.derive
        if derive is not None and select_group(sync.groups).rank_in_group == 0 and not sync.taps:
            derive = None  # group rank 0's values are its own, but for a fault that is injected there
        after = _after(point, calls, fired, read_scope, derive)
        return Hook(point.target, "after", after, calls.clear)
    build = {"before": _before, "callback": _callback}[point.when]
    return Hook(point.target, "before", build(point, calls, fired, read_scope), calls.clear)


def _after(
    point: BroadcastPoint,
    calls: Mapping[str, PointCall],
    fired: Callable[[], None],
    read_scope: ReadScope,
    derive: Callable[[Call], None] | None = None,
) -> Callable[..., Any]:
    site_of, tensors_of = point.site_of, point.tensors_of

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        call = Call(args, kwargs, result, read_scope())
        site = site_of(call)
        if site is None:
            return
        fired()
        if (act := calls.get(site)) is not None:
            act(*tensors_of(call))
            if derive is not None:
                derive(call)

    return after


def _before(
    point: BroadcastPoint, calls: Mapping[str, PointCall], fired: Callable[[], None], read_scope: ReadScope
) -> Callable[..., Any]:
    after = _after(point, calls, fired, read_scope)

    def before(*args: Any, **kwargs: Any) -> None:
        after(None, *args, **kwargs)

    return before


def _callback(
    point: BroadcastPoint, calls: Mapping[str, PointCall], fired: Callable[[], None], read_scope: ReadScope
) -> Callable[..., Any]:
    name, signature = point.callback, point.signature
    assert name is not None, "a point of kind callback names its argument"

    def before(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        call = Call(args, kwargs, None, read_scope())
        site = point.site_of(call)
        act = None if site is None else calls.get(site)
        if act is None:
            return None
        inner = call.argument(name, signature)

        def agreed(*inner_args: Any, **inner_kwargs: Any) -> Any:
            result = inner(*inner_args, **inner_kwargs)
            fired()
            act(*point.tensors_of(Call(inner_args, inner_kwargs, result)))
            return result

        if name in kwargs:
            return args, {**kwargs, name: agreed}
        place = signature.index(name)
        return (*args[:place], agreed, *args[place + 1 :]), kwargs

    return before


def _wait(
    point: BroadcastPoint, wait_for: Callable[[Call], None], fired: Callable[[], None]
) -> tuple[Literal["before", "after"], Callable[..., Any]]:
    def before(*args: Any, **kwargs: Any) -> None:
        fired()
        wait_for(Call(args, kwargs))

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        before(*args, **kwargs)

    return ("after", after) if point.when == "after" else ("before", before)


def _agree(
    point: BroadcastPoint,
    agreed: Mapping[str, str],
    sync: SpecTpSync,
    fired: Callable[[], None],
    own_modules: frozenset[str],
) -> Callable[..., Any]:
    op = point.op
    assert op is not None, "a consensus point names its op"

    def after(result: Any, *args: Any, **kwargs: Any) -> Any:
        if point.callers and _caller(own_modules) not in point.callers:
            return None
        site = point.site_of(Call(args, kwargs, result))
        if site is None or site not in agreed:
            return None
        fired()
        return sync.agree(site, result, op)

    return after


def _caller(own_modules: frozenset[str]) -> str:
    """Name the module that called the hooked function, looking past the frames of hooks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in own_modules:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
