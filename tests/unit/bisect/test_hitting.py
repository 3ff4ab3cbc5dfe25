"""Minimal sets and hitting sets, against trying everything."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from specsync_core.bisect.hitting import hitting_sets, minimal

families = st.lists(st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=4), max_size=5)


def subsets(letters: str = "abcde") -> list[frozenset[str]]:
    sizes = range(len(letters) + 1)
    return [frozenset(each) for each in chain.from_iterable(combinations(letters, size) for size in sizes)]


@given(families)
def test_hitting_sets_are_all_minimal_ones(family: list[frozenset[str]]) -> None:
    hits = [each for each in subsets() if all(each & member for member in family)]
    expected = {each for each in hits if not any(other < each for other in hits)}
    found = hitting_sets(family)
    assert set(found) == expected
    assert len(found) == len(expected)


@given(families)
def test_minimal_sets(family: list[frozenset[str]]) -> None:
    assert set(minimal(family)) == {each for each in family if not any(other < each for other in family)}


def test_nothing_to_hit() -> None:
    assert hitting_sets([]) == [frozenset()]
