"""Families of sets: which are minimal, and the smallest sets that hit all of them. No IO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Sites: TypeAlias = frozenset[str]
"""A set of slugs."""


def minimal(sets: Iterable[Sites]) -> list[Sites]:
    """Return the sets that hold no other one, each once, the smaller ones first."""
    kept: list[Sites] = []
    for candidate in sorted(set(sets), key=lambda each: (len(each), sorted(each))):
        if not any(other <= candidate for other in kept):
            kept.append(candidate)
    return kept


def hitting_sets(family: Iterable[Sites]) -> list[Sites]:
    """Return every minimal set that shares a member with each set of the family (Berge's multiplication).

    For an empty family that is the empty set: there is nothing to hit.
    """
    hitting: list[Sites] = [frozenset()]
    for each in minimal(family):
        grown = [known if known & each else known | {member} for known in hitting for member in sorted(each)]
        hitting = minimal(grown)
    return hitting
