from dataclasses import replace

from specsync_core import BroadcastPoint, no_tensors
from specsync_core.engines.proof import Firings, conclude, report

POINT = BroadcastPoint(
    target="engine.accept",
    when="after",
    sites=("eagle-verify-greedy",),
    site_of=lambda _: None,
    tensors_of=no_tensors,
    versions="==1",
    signature=(),
    proof="accept",
)
FOLDED = replace(POINT, target="engine.accept_in_graph")
RARE = replace(POINT, target="engine.simulate", proof=None, sites=("eagle-accept-simulated",))


def firings(*fired):
    found = Firings()
    counters = {point.target: found.counter(point) for point in (POINT, FOLDED, RARE)}
    for target in fired:
        counters[target]()
    return found


def test_one_of_a_decisions_targets_is_enough():
    assert firings("engine.accept_in_graph").unproven() == []
    assert firings("engine.simulate").unproven() == ["accept"]


def test_a_rank_on_which_nothing_fired_is_named_with_the_targets():
    good, bad = firings("engine.accept"), firings()
    problems = conclude([good.as_json(), bad.as_json()], 4, good.decisions)
    assert problems == [
        "group rank 1: the accept was never synchronised in 4 decode steps: none of engine.accept,"
        " engine.accept_in_graph fired"
    ]


def test_a_module_that_came_late_is_named():
    late = firings("engine.accept")
    late.late.append("engine.models.other.draw")
    (problem,) = conclude([late.as_json()], 4, late.decisions)
    assert problem == "group rank 0: engine.models.other.draw was imported after the start, so it is not hooked"


def test_the_report_counts_what_fired_and_names_what_did_not():
    evidence = [firings("engine.accept", "engine.accept").as_json(), firings("engine.accept").as_json()]
    assert report(evidence, 4, [POINT, RARE]).splitlines() == [
        "hooks proven on 2 ranks after 4 decode steps:",
        "  fired 2/1 times: engine.accept (eagle-verify-greedy)",
        "  applied, not fired: engine.simulate (eagle-accept-simulated)",
    ]


def test_nothing_is_expected_of_a_decision_that_the_policy_leaves_alone_where_a_step_may_make_it():
    """NGRAM drafts are agreed on the device, or on the host where there is a grammar: one of these may be off."""
    elsewhere, same_function = replace(POINT, target="engine.accept_elsewhere"), replace(POINT, sites=("another",))
    found = firings()
    found.waive([RARE, same_function])
    assert found.unproven() == ["accept"]
    found.waive([elsewhere])
    assert found.unproven() == []


def test_nothing_is_expected_of_a_target_that_is_not_hooked_everywhere():
    found = firings()
    for target in ("engine.accept", "engine.accept_in_graph"):
        found.forget(target)
    assert found.unproven() == []
    assert found.silent() == ["engine.simulate"]
