"""A bounded piece of the hour-scale soak (``benchmarks/soak.py``): two minutes in CI, a few seconds elsewhere."""

from __future__ import annotations

import os

import pytest

from benchmarks.soak import GROWTH_BYTES, WARM_UP_ROUNDS, Round, judge, soak

SECONDS = 120 if os.environ.get("CI") else 15


@pytest.mark.timeout(600)
def test_random_faults_are_healed_memory_is_flat_and_no_token_differs() -> None:
    report = soak(ranks=2, seconds=SECONDS, rounds=10_000, seed=SECONDS)
    assert report.findings == []
    assert report.rounds > 0
    assert report.values_healed > 0
    assert report.faults_fired > 0


def rounds(count: int = 12, healed: int = 3, **changes: object) -> list[Round]:
    return [Round(**{**one(number), "healed": healed, **changes}) for number in range(count)]


def one(number: int) -> dict[str, object]:
    return {
        **{"algorithm": "dspark", "temperature": 0.0, "clean": f"digest {number}", "faulted": f"digest {number}"},
        **{"tokens": 10, "fired": 1, "healed": 0, "resident_bytes": 300 << 20},
    }


def test_equal_ranks_are_no_finding() -> None:
    report = judge([rounds(healed=0), rounds()])
    assert (report.findings, report.rounds, report.values_healed, report.tokens) == ([], 12, 36, 120)
    assert report.resident_mib == [[300.0, 300.0]] * 2


def test_other_tokens_are_a_finding_with_round_and_rank() -> None:
    other = rounds()
    other[5].clean, other[7].faulted = "something else", "something else"
    assert judge([rounds(healed=0), other]).findings == [
        "round 5 (dspark, temperature 0.0): group rank 1 has other tokens than group rank 0",
        "round 7 (dspark, temperature 0.0): with faults, group rank 1 has other tokens",
    ]


def test_memory_that_grows_is_a_finding() -> None:
    growing = rounds()
    for number, each in enumerate(growing[WARM_UP_ROUNDS:]):
        each.resident_bytes += number * GROWTH_BYTES
    assert judge([rounds(healed=0), growing]).findings == ["group rank 1: resident memory grew from 312 to 456 MiB"]


def test_a_soak_without_faults_that_strike_proves_nothing() -> None:
    assert "proves nothing" in judge([rounds(healed=0), rounds(healed=0)]).findings[0]
