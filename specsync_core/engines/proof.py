"""Proof that hooks fire: counts per target, and what the ranks conclude from them after the first decode steps.

A log line "applied" proves nothing: a re-export or a closure can keep the old function (SG #21388).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from specsync_core.hookspecs import BroadcastPoint


@dataclass
class Firings:
    """How often each applied point's hook acted on this rank."""

    counts: dict[str, int] = field(default_factory=dict)
    """By the target's dotted path; a target that never fired is there with 0."""
    decisions: dict[str, list[str]] = field(default_factory=dict)
    """By `BroadcastPoint.proof`: the targets of which one must fire."""

    late: list[str] = field(default_factory=list)
    """Targets whose modules were imported only after the hooks were placed, so that they are not hooked."""

    def counter(self, point: BroadcastPoint) -> Callable[[], None]:
        """Return the function that a point's hook calls when it acts."""
        counts, target = self.counts, point.target
        counts.setdefault(target, 0)
        if point.proof is not None:
            self.decisions.setdefault(point.proof, []).append(target)

        def fired() -> None:
            if target in counts:
                counts[target] += 1

        return fired

    def forget(self, target: str) -> None:
        """Expect nothing more of a target that is not hooked on every rank."""
        self.counts.pop(target, None)
        for targets in self.decisions.values():
            targets[:] = [other for other in targets if other != target]

    def waive(self, off: Iterable[BroadcastPoint]) -> None:
        """Expect nothing of a decision that the policy leaves alone in part: a step may make it there.

        Args:
            off: points that are not applied, as all their sites are off.
        """
        for point in off:
            if point.proof is not None and point.target not in self.decisions.get(point.proof, ()):
                self.decisions.pop(point.proof, None)

    def unproven(self) -> list[str]:
        """Return the decisions of which no target fired."""
        return [
            name
            for name, targets in self.decisions.items()
            if targets and not any(map(self.counts.__getitem__, targets))
        ]

    def silent(self) -> list[str]:
        """Return the targets that never fired."""
        return [target for target, count in self.counts.items() if count == 0]

    def as_json(self) -> dict[str, object]:
        return {"counts": self.counts, "unproven": self.unproven(), "silent": self.silent(), "late": self.late}


def conclude(evidence: Sequence[dict[str, object]], steps: int, decisions: dict[str, list[str]]) -> list[str]:
    """Return what is wrong with the ranks' evidence (`Firings.as_json`), by group rank; nothing when all is proven."""
    problems = []
    for rank, theirs in enumerate(evidence):
        missing, late = theirs["unproven"], theirs["late"]
        assert isinstance(missing, list)
        assert isinstance(late, list)
        problems += [f"group rank {rank}: {path} was imported after the start, so it is not hooked" for path in late]
        problems += [
            f"group rank {rank}: the {name} was never synchronised in {steps} decode steps: none of"
            f" {', '.join(decisions.get(name, ['its targets']))} fired"
            for name in missing
        ]
    return problems


def report(evidence: Sequence[dict[str, object]], steps: int, active: Iterable[BroadcastPoint]) -> str:
    """Say what fired on all ranks of a group, and which hooks were applied and have not fired."""
    sites = {point.target: ", ".join(point.sites) for point in active}
    counts = [theirs["counts"] for theirs in evidence]
    lines = [f"hooks proven on {len(evidence)} ranks after {steps} decode steps:"]
    silent = []
    for target, slugs in sites.items():
        fired = [theirs.get(target, 0) for theirs in counts if isinstance(theirs, dict)]
        if any(fired):
            times = str(fired[0]) if len(set(fired)) == 1 else "/".join(map(str, fired))
            lines.append(f"  fired {times} times: {target} ({slugs})")
        else:
            silent.append(f"  applied, not fired: {target} ({slugs})")
    return "\n".join([*lines, *silent])
