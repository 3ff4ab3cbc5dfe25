"""Hooks of decisions that live on the host: a count that is agreed on before it is used, and drafts that are lists.

Drafts that each rank's CPU found by itself differ in *count*, not only in value (VL #31154). Either every rank drafts
and group rank 0's rows replace the others', or group rank 0 alone drafts (VL #56732).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

from specsync_core.hookspecs import BroadcastPoint, Call
from specsync_core.sync import SpecTpSync


@dataclass(frozen=True)
class Hook:
    """A function to apply to a target of the engine.

    ``before(*args, **kwargs)`` returns None or new ``(args, kwargs)``; ``after(result, *args, **kwargs)`` returns None
    or a new result; ``around(original, *args, **kwargs)`` returns the result.
    """

    target: str
    kind: Literal["before", "after", "around"]
    function: Callable[..., Any]
    mute: Callable[[], None] = lambda: None
    """Make the hook leave every further call alone; for a target that another rank could not hook."""


def agree_on_given(point: BroadcastPoint, sync: SpecTpSync, fired: Callable[[], None]) -> Hook:
    """Agree on `BroadcastPoint.value_of`, and hand the agreed value to `BroadcastPoint.put`."""
    value_of, put, op = point.value_of, point.put, point.op
    assert value_of is not None, "this kind of point says what its value is"
    assert put is not None, "and where it goes"
    assert op is not None, "and how it is agreed on"

    def settle(call: Call) -> None:
        site = point.site_of(call)
        if site is not None and sync.enabled(site):
            fired()
            put(call, sync.agree(site, value_of(call), op))

    def before(*args: Any, **kwargs: Any) -> None:
        settle(Call(args, kwargs))

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        settle(Call(args, kwargs, result))

    return Hook(point.target, "before", before) if point.when == "before" else Hook(point.target, "after", after)


def sync_rows(point: BroadcastPoint, sync: SpecTpSync, fired: Callable[[], None]) -> Hook:
    """Every rank drafts; group rank 0's rows replace the others': lengths first, then values."""

    def after(result: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]] | None:
        site = point.site_of(Call(args, kwargs, result))
        if site is None:
            return None
        fired()
        return sync.sync_lists(site, result)

    return Hook(point.target, "after", after)


def lead_rows(point: BroadcastPoint, sync: SpecTpSync, fired: Callable[[], None]) -> Hook:
    """Group rank 0 alone runs the function. In audit every rank runs it, keeps its own rows, and they are compared."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        site = point.site_of(Call(args, kwargs))
        if site is None:
            return original(*args, **kwargs)
        fired()
        return unpack(sync.lead(site, lambda: pack(original(*args, **kwargs))))

    return Hook(point.target, "around", around)


def pack(rows: Sequence[Sequence[int]]) -> list[int]:
    """Write rows as one list: how many there are, their lengths, then all values."""
    return [len(rows), *map(len, rows), *(int(value) for value in chain.from_iterable(rows))]


def unpack(packed: Sequence[int]) -> list[list[int]]:
    """Read what `pack` wrote."""
    values: Iterator[int] = iter(packed)
    lengths = list(islice(values, next(values)))
    return [list(islice(values, length)) for length in lengths]
