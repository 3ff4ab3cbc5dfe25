from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specsync_dspark.planner import (
    CostTable,
    VerifyLimits,
    VerifyPlanner,
    plan_verify_lens,
    step_confidence,
    survival,
    throughput_budget,
    verify_lens,
)

from tests.unit.plugins.support import LoneSync

# Few different values, so that ties are the rule.
CONFIDENCE = st.integers(1, 3).flatmap(
    lambda gamma: st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=gamma, max_size=gamma), min_size=1, max_size=4
    )
)


def survival_oracle(rows):
    result = []
    for row in rows:
        chance, chances = 1.0, []
        for confidence in row:
            chance *= confidence
            chances.append(chance)
        result.append(chances)
    return result


@given(CONFIDENCE, st.integers(-1, 14), st.data())
def test_verify_lens_spend_the_budget_on_the_likeliest_by_position_then_request(rows, budget, data):
    gamma = len(rows[0])
    max_len = data.draw(st.integers(1, gamma + 1))
    limits = VerifyLimits(max_len, data.draw(st.integers(0, max_len)), data.draw(st.sampled_from([0.0, 0.1, 0.3])))
    chances = survival_oracle(rows)
    ranked = sorted(
        (-chance, position, request)
        for request, row in enumerate(chances)
        for position, chance in enumerate(row[:max_len])
    )
    chosen = [0] * len(rows)
    for chance, _, request in ranked[: max(budget, 0)]:
        chosen[request] += -chance >= limits.survival_eps
    expected = [min(max(limits.min_len + count, limits.min_len, 1), max_len) for count in chosen]
    found = plan_verify_lens(survival(torch.tensor(rows)), budget, limits)
    assert found.dtype == torch.int32
    assert found.tolist() == expected


@given(CONFIDENCE, st.integers(0, 12))
def test_no_other_plan_of_the_same_size_expects_more(rows, budget):
    chances = survival_oracle(rows)
    limits = VerifyLimits(max_len=len(rows[0]) + 1, survival_eps=0.0)
    lens = plan_verify_lens(survival(torch.tensor(rows)), budget, limits).tolist()
    got = sum(sum(row[: length - 1]) for row, length in zip(chances, lens, strict=True))
    cells = [chance for row in chances for chance in row]
    spent = sum(length - 1 for length in lens)
    assert spent == min(budget, len(cells))
    assert got == pytest.approx(max(map(sum, combinations(cells, spent))), abs=1e-6)


@given(CONFIDENCE, st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0]), min_size=1, max_size=6))
def test_the_budget_maximises_expected_tokens_per_second(rows, speeds):
    table = CostTable(tuple(range(2, 2 * len(speeds) + 1, 2)), tuple(sorted(speeds, reverse=True)))
    limits = VerifyLimits(max_len=len(rows[0]) + 1)
    cells = sorted(
        (chance for row in survival_oracle(rows) for chance in row if chance >= limits.survival_eps), reverse=True
    )
    gains = [(len(rows) + sum(cells[:drafts])) * table.lookup(len(rows) + drafts) for drafts in range(len(cells) + 1)]
    budget = throughput_budget(survival(torch.tensor(rows)), table, limits)
    assert gains[budget] == pytest.approx(max(gains))
    assert budget == 0 or gains[budget] > gains[0]


def test_a_free_verify_takes_every_draft_and_a_dear_one_none():
    chances = survival(torch.full((2, 3), 0.5))
    limits = VerifyLimits(max_len=4)
    assert throughput_budget(chances, CostTable((1,), (10.0,)), limits) == 6
    assert throughput_budget(chances, CostTable((2, 8), (100.0, 1.0)), limits) == 0


def test_costs_are_those_of_the_padded_batch():
    table = CostTable((1, 4, 8), (9.0, 5.0, 2.0))
    assert [table.lookup(tokens) for tokens in (0, 1, 2, 4, 5, 8, 99)] == [9.0, 9.0, 5.0, 5.0, 2.0, 2.0, 2.0]


def test_the_plan_is_agreed_and_its_budget_is_not():
    sync = LoneSync(overwrite={"dspark-plan": lambda lens: lens.fill_(2)})
    chances = survival(torch.full((3, 2), 0.9))
    budget = throughput_budget(chances, CostTable((1,), (1.0,)), VerifyLimits(3))
    assert sync.slugs == []
    assert verify_lens(sync, chances, budget, VerifyLimits(3)).tolist() == [2, 2, 2]
    assert sync.slugs == ["dspark-plan"]


def test_confidence_is_that_of_the_likeliest_token_whatever_was_drawn():
    assert step_confidence(torch.tensor([[[0.0, 0.0], [9.0, 0.0]]])).tolist() == [
        pytest.approx([0.5, 0.99988], abs=1e-4)
    ]


def test_the_budget_is_earned_by_the_step_before_request_by_request():
    costs = CostTable((2, 3, 4), (10.0, 9.0, 1.0))  # of two requests one draft pays off, if it is likely; more never do
    sure, unsure = [0.9, 0.9], [0.1, 0.1]
    planner, sync = VerifyPlanner(costs, VerifyLimits(max_len=3)), LoneSync()
    assert planner.plan(sync, (7, 8), torch.tensor([unsure, unsure])).tolist() == [2, 1]  # unknown, so certain
    assert planner.plan(sync, (8, 7), torch.tensor([sure, sure])).tolist() == [1, 1]
    assert planner.plan(sync, (7, 9), torch.tensor([unsure, sure])).tolist() == [1, 2]
    assert planner.plan(sync, (7,), torch.tensor([sure])).tolist() == [2]
    assert planner.plan(sync, (), torch.empty(0, 2)).tolist() == []
    assert planner.plan(sync, (7,), torch.tensor([sure])).tolist() == [3]
    assert sync.slugs == ["dspark-plan"] * 6


def test_an_empty_batch_is_planned_too():
    assert verify_lens(LoneSync(), torch.empty(0, 3), 4, VerifyLimits(4)).tolist() == []
    assert throughput_budget(torch.empty(0, 3), CostTable((1,), (1.0,)), VerifyLimits(4)) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VerifyLimits(max_len=2, min_len=3), "VerifyLimits: min_len=3, max_len=2: need 0 <= min_len"),
        (lambda: VerifyLimits(max_len=0, min_len=0), "max_len >= 1"),
        (lambda: CostTable((), ()), "CostTable: batch_tokens=\\(\\) must ascend"),
        (lambda: CostTable((2, 1), (1.0, 1.0)), "must ascend"),
        (lambda: CostTable((1, 2), (1.0,)), "one entry for each of steps_per_second"),
    ],
)
def test_bad_limits_and_tables_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
