"""The hooks that a plugin may implement. pluggy is used at start-up only; no torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from specsync_core.facts import EngineFacts, Facts

if TYPE_CHECKING:
    from specsync_core.algorithm import Algorithm
    from specsync_core.registry import ReadableFile

PROJECT = "specsync"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Call:
    """One call of a hooked engine function."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None
    """What the function returned; None before it ran."""


@dataclass(frozen=True)
class BroadcastPoint:
    """Where in an engine's code a decision is made, and how to take its tensors.

    The engine adapter turns a point into a hook; the point itself never touches the engine.
    """

    target: str
    """Dotted path of the engine's function."""
    when: Literal["before", "after"]
    """Take the tensors from the arguments before the call, or from the result after it."""
    sites: tuple[str, ...]
    """Slugs of every site that a call may belong to."""
    site_of: Callable[[Call], str | None]
    """The site that this call belongs to; None leaves the call alone."""
    tensors_of: Callable[[Call], Sequence[Any]]
    """The site's tensors in the registry's order; they are overwritten in place."""
    versions: str
    """Engine versions that the point was read from, e.g. ``>=0.5.16,<0.5.24``."""
    signature: tuple[str, ...]
    """The target's parameter names; a different signature is refused."""
    capture: Literal["never", "any-communicator", "engine-communicator"] = "never"
    """May the call run while a graph is captured, and with whose communicator must it then broadcast."""


class Specs:
    """The hook specifications of project ``specsync``."""

    @hookspec
    def specsync_sites(self) -> ReadableFile:  # type: ignore[empty-body]
        """Return the path of a TOML registry to merge.

        A ``Path`` or an importlib ``Traversable``; numbers from 1000, slugs prefixed with the algorithm's name.
        """

    @hookspec
    def specsync_broadcast_points(self, engine: EngineFacts) -> Sequence[BroadcastPoint]:  # type: ignore[empty-body]
        """Return where in this engine's code the plugin's sites are decided; empty for an engine it does not know."""

    @hookspec
    def specsync_policy(self, facts: Facts) -> str | None:
        """Return a default policy for this model or platform, or None. The operator's file and environment win."""

    @hookspec
    def specsync_algorithm(self) -> Algorithm:  # type: ignore[empty-body]
        """Return the algorithm's reference decision functions, as the demo engine runs them."""
