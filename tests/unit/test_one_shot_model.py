"""The one-shot protocol, searched exhaustively on a model for small sizes; every rule is needed."""

from dataclasses import replace

import pytest

from tests.unit.one_shot_model import BrokenRuleError, Rules, all_plans, search, start

DRAFT, PLAN = (7, 1), (8, 1)
"""Two calls: header and lanes."""


def run(rules: Rules, calls, *plans, **options):
    return search(rules, start(rules, tuple(calls), tuple(map(tuple, plans))), **options)


@pytest.mark.parametrize(
    ("ranks", "rules", "count"),
    [
        (2, Rules(slots=2, lanes=2, ack_every=1, tags=4), 10),
        (2, Rules(slots=4, lanes=2, ack_every=2, tags=8), 10),
        (2, Rules(slots=2, lanes=3, ack_every=2, tags=2), 5),
        (4, Rules(slots=2, lanes=1, ack_every=1, tags=4), 5),
        (4, Rules(slots=2, lanes=1, ack_every=2, tags=2), 4),
        (8, Rules(slots=1, lanes=0, ack_every=1, tags=2), 3),
    ],
)
def test_every_interleaving_delivers_every_chunk_to_every_peer(ranks, rules, count):
    calls = [(7 + turn % 2, min(rules.lanes, turn % 3)) for turn in range(count)]
    found = run(rules, calls, *[calls] * (ranks - 1))
    assert found.outcomes == {("done", ("done",) * (ranks - 1))}
    assert found.states > 50


def test_every_wrong_plan_of_a_peer_ends_and_never_takes_wrong_values():
    rules, calls = Rules(slots=2, lanes=1, ack_every=1, tags=4), (DRAFT, DRAFT, PLAN, DRAFT)
    for plan in all_plans(calls, (PLAN, (7, 0))):
        outcomes = run(rules, calls, plan).outcomes
        if plan == calls:
            assert outcomes == {("done", ("done",))}
        elif plan != calls[: len(plan)]:
            assert all(peer == "mismatch" or root == "gave up" for root, (peer,) in outcomes)
            assert {peer for _, (peer,) in outcomes} == {"mismatch"}


def test_one_peer_of_three_that_differs_stops_all():
    calls = (DRAFT, PLAN, DRAFT)
    outcomes = run(Rules(slots=2, lanes=1), calls, calls, calls, (DRAFT, DRAFT, DRAFT)).outcomes
    assert all("mismatch" in peers for _, peers in outcomes)
    assert any(root == "stopped" for root, _ in outcomes)


def test_a_peer_that_never_comes_ends_rank_0_at_the_ring_s_end():
    calls = (DRAFT,) * 4
    assert run(Rules(slots=2), calls, ()).outcomes == {("gave up", ("done",))}


def test_a_root_that_never_comes_ends_every_peer():
    outcomes = run(Rules(slots=2), (), (DRAFT,), (DRAFT,)).outcomes
    assert outcomes <= {("done", ("gave up", "gave up")), ("done", ("gave up", "stopped"))}


@pytest.mark.parametrize(
    ("change", "calls", "plan"),
    [
        ({"back_pressure": False}, [DRAFT] * 5, [DRAFT] * 5),
        ({"tags_lanes": False}, [DRAFT] * 4, [DRAFT] * 4),
        ({"clear_rounds": 0}, [(7, 2), (7, 0), (7, 0), (7, 2)], [(7, 2), (7, 0), (7, 0), (7, 2)]),
        ({"checks_header": False}, [DRAFT, DRAFT], [DRAFT, PLAN]),
    ],
)
def test_the_search_finds_what_breaks_without_each_rule(change, calls, plan):
    # Tags come again after three chunks (one slot), so a slot that is never cleared still holds an old chunk's lanes.
    rules = Rules(slots=1, lanes=2, ack_every=1, tags=3)
    right = run(rules, calls, plan)
    assert right.states > 10
    with pytest.raises(AssertionError) as failure:
        run(replace(rules, **change), calls, plan)
    assert failure.type is BrokenRuleError or "stuck" in str(failure.value)
