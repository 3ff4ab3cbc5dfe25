"""What the ranks of an engine decide together when they start: which points are hooked, or that nobody starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specsync_core.engines.targets import check_points
from specsync_core.engines.versions import is_among
from specsync_core.errors import EngineError, SpecSyncError
from specsync_core.facts import EngineFacts
from specsync_core.hookspecs import BroadcastPoint
from specsync_core.manager import PluginInfo, PluginManager
from specsync_core.settings import read_environment

logger = logging.getLogger("specsync")

Exchange = Callable[[str, Any], list[Any]]
"""Give a topic and a payload, get every rank's payload by group rank."""

WAY_OUT = "Install versions that fit each other, or set SPECSYNC_STRICT=0 to go on without these sites."


@dataclass(frozen=True)
class Candidates:
    """The points that fit an engine, and what speaks against starting with them."""

    points: tuple[BroadcastPoint, ...]
    problems: tuple[str, ...] = ()
    """Each names a target, a version or an algorithm that is not known."""


def find_points(manager: PluginManager, engine: EngineFacts, known_versions: Sequence[str]) -> Candidates:
    """Ask the plugins for the points of an engine, its version and its algorithm; targets are not looked at.

    A version that nobody read gets the points of the nearest known one, and a problem.
    """
    problems = []
    version = engine.version
    if version not in known_versions:
        version = nearest(version, known_versions)
        problems.append(
            f"{engine.engine} {engine.version} is not known; known are {', '.join(known_versions)}, of which {version}"
            " is the nearest"
        )
    fitting = tuple(point for info, point in manager.owned_points(engine) if _fits(version, point, info))
    if not any(point.when != "engine" for point in fitting):
        problems.append(f"no installed plugin knows where {engine.engine} {version} decides for {engine.algorithm}")
    return Candidates(fitting, tuple(problems))


def _fits(version: str, point: BroadcastPoint, info: PluginInfo) -> bool:
    try:
        return is_among(version, point.versions)
    except EngineError as error:
        raise info.error(f"BroadcastPoint at {point.target}: {error}") from error


def nearest(version: str, known_versions: Sequence[str]) -> str:
    """Return the newest known version that is not newer than this one, else the oldest."""
    older = [known for known in known_versions if _leading_numbers(known) <= _leading_numbers(version)]
    return older[-1] if older else known_versions[0]


def _leading_numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def is_strict() -> bool:
    """Whether what is not as known stops the start. An environment that cannot be read does; `agree_to_start` says how,
    on every rank, when the plan is resolved."""
    try:
        return read_environment().strict
    except SpecSyncError:
        return True


OWN_START = "its own start (policy, plugins, the engine's functions)"
"""What a rank is in until it meets the others: for the peers, should it stay there."""


def agree_to_start(attempt: Callable[[], Candidates], strict: bool, exchange: Exchange | None) -> Candidates:
    """Look for points on this rank, and settle with all ranks what is hooked.

    Args:
        attempt: finds this rank's points; its `SpecSyncError` is delivered to every rank.
        strict: a problem of any rank stops all of them; False logs it, and no rank hooks what one cannot.
        exchange: brings the ranks together; None is a rank alone.

    Raises:
        EngineError: on every rank alike.
    """
    error, candidates = None, Candidates(())
    try:
        candidates = attempt()
    except SpecSyncError as problem:
        error = f"{type(problem).__name__}: {problem}"
    refused = list(check_points(point for point in candidates.points))
    own: dict[str, Any] = {"error": error, "problems": list(candidates.problems), "refused": refused}
    theirs = [own] if exchange is None else exchange("engine start", own)
    if fatal := _by_rank(theirs, "error"):
        raise EngineError(f"the start was given up:\n{fatal}")
    wrong = _by_rank(theirs, "problems", "refused")
    if wrong and strict:
        raise EngineError(f"not every decision of this engine could be synchronised:\n{wrong}\n  {WAY_OUT}")
    if wrong:
        logger.warning("SPECSYNC_STRICT=0, so the start goes on without what is not known:\n%s", wrong)
    lost = {line.split(":")[0] for other in theirs for line in other["refused"]}
    return Candidates(tuple(_without(candidates.points, lost)), tuple(wrong.splitlines()))


def _without(points: Iterable[BroadcastPoint], lost: set[str]) -> Iterable[BroadcastPoint]:
    return (point for point in points if not {point.target, *(scope.target for scope in point.within)} & lost)


def _by_rank(answers: Sequence[dict[str, Any]], *keys: str) -> str:
    """Write what ranks say, each saying once, with the group ranks that say it."""
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        for key in keys:
            said = answer[key] or []
            for line in [said] if isinstance(said, str) else said:
                ranks.setdefault(line, []).append(rank)
    everyone = list(range(len(answers)))
    return "\n".join(
        f"  {'every rank' if who == everyone else 'group rank ' + ', '.join(map(str, who))}: {line}"
        for line, who in ranks.items()
    )
