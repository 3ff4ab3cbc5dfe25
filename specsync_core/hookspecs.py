"""The hooks that a plugin may implement. pluggy is used at start-up only; no torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import pluggy

from specsync_core.errors import PluginError, did_you_mean
from specsync_core.facts import EngineFacts, Facts

if TYPE_CHECKING:
    from specsync_core.algorithm import Algorithm
    from specsync_core.registry import ReadableFile

PROJECT = "specsync"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

When = Literal["before", "after", "callback", "engine"]
Capture = Literal["never", "any-communicator", "engine-communicator"]
Op = Literal["min", "max", "all", "any", "root"]


@dataclass(frozen=True)
class Call:
    """One call of a hooked engine function."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None
    """What the function returned; None before it ran."""
    scope: str | None = None
    """What the innermost enclosing call (`BroadcastPoint.within`) says of itself; None outside of all."""

    def argument(self, name: str, signature: Sequence[str]) -> Any:
        """Return an argument, however it was passed. ``signature`` holds the function's parameter names."""
        return self.kwargs[name] if name in self.kwargs else self.args[signature.index(name)]


@dataclass(frozen=True)
class Scope:
    """A function of the engine that encloses others, which behave by what they were called from."""

    target: str
    """Dotted path of the enclosing function."""
    value_of: Callable[[Call], str]
    """What the calls inside are to see as `Call.scope`, from the enclosing call's arguments."""
    signature: tuple[str, ...]
    """The target's parameter names; a different signature is refused."""


@dataclass(frozen=True)
class BroadcastPoint:
    """Where in an engine's code a decision is made, and how to take its tensors.

    The engine adapter turns a point into a hook; the point itself never touches the engine.
    """

    target: str
    """Dotted path of the engine's function."""
    when: When
    """Take the tensors from the arguments before the call, or from the result after it; or from what the argument
    named `callback` returns, each time that the function calls it. ``engine``: the engine broadcasts here by
    itself, nothing is hooked, and the target only has to be there."""
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
    capture: Capture = "never"
    """May the call run while a graph is captured, and with whose communicator must it then broadcast."""
    callback: str | None = None
    """For ``when="callback"``: name of the argument, a function whose results are the site's tensors. `site_of` is
    asked once per call of the target, `tensors_of` with the callback's result."""
    within: tuple[Scope, ...] = ()
    """The enclosing functions by which `site_of` tells calls apart; the innermost one that is running counts."""
    only_if_imported: bool = False
    """Skip the point when the engine has not imported the target's module by the time it creates its draft worker:
    it then cannot run it (model files)."""
    op: Op | None = None
    """For a consensus site: how the host value that the function returns is agreed on; it replaces the result."""
    value_of: Callable[[Call], Any] | None = None
    """For `op`: the host value to agree on, where it is not what the function returns. With ``when="before"`` it is
    asked for before the function runs."""
    put: Callable[[Call, Any], None] | None = None
    """For `value_of`: writes the agreed value to where the engine reads it."""
    rows: bool = False
    """The function returns a list of lists of integers, whose number and lengths may differ between ranks; group
    rank 0's replaces it."""
    leads: bool = False
    """For `rows` at a consensus site: group rank 0 alone runs the function, and its result goes to every rank."""
    unless: str | None = None
    """Not hooked where this site is in mode sync, which settles the same decision."""
    callers: tuple[str, ...] = ()
    """Modules whose calls count; empty for all. Reads the caller's frame: for start-up only."""
    wait_for: Callable[[Call], None] | None = None
    """Instead of a broadcast: wait, before or after the call, for what makes this rank's own clock decide."""
    derive: Callable[[Call], None] | None = None
    """For ``when="after"``, outside of graph captures: called behind the sync on every rank but group rank 0 (there
    too where faults may be injected), to write anew what the function has already derived from this rank's own values.
    Also called in audit: where no value has changed, it has to change nothing."""
    proof: str | None = None
    """Name of a decision that is made in every decode step. Of the applied points with one name at least one must
    have fired after the first steps."""

    def __post_init__(self) -> None:
        """Refuse words that are not known. Raises PluginError, with the target and the known words."""
        self._check("when", self.when, get_args(When))
        self._check("capture", self.capture, get_args(Capture))
        if self.op is not None:
            self._check("op", self.op, get_args(Op))
        if self.derive is not None and (problem := self._derive_problem()):
            raise PluginError(
                f"BroadcastPoint at {self.target}: derive goes with tensors, when='after' and capture='never', not with"
                f" {problem}."
            )

    def _derive_problem(self) -> str | None:
        """Return what keeps `derive` from being called, or from being right."""
        if self.when != "after":
            return f"when={self.when!r}"
        if self.capture != "never":
            return f"capture={self.capture!r}"
        others = {"op": self.op, "value_of": self.value_of, "rows": self.rows, "wait_for": self.wait_for}
        return next((name for name, value in others.items() if value), None)

    def _check(self, name: str, word: str, known: tuple[str, ...]) -> None:
        if word not in known:
            hint = did_you_mean(str(word), known)
            raise PluginError(
                f"BroadcastPoint at {self.target}: unknown {name} {word!r}{hint}. Known: {', '.join(known)}."
            )


def no_tensors(call: Call) -> tuple[()]:
    """`BroadcastPoint.tensors_of` of a point that has none: a host value, a wait, or one that the engine syncs."""
    return ()


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
