"""What ranks settle when they start. The other ranks are played by what `exchange` returns."""

import logging

import pytest

from specsync_core import BroadcastPoint, EngineError, EngineFacts, PolicyError, hookimpl, no_tensors
from specsync_core.engines.start import Candidates, agree_to_start, find_points, is_strict, nearest
from specsync_core.manager import PluginManager

TOY = "tests.unit.engines.toy_engine"


def point(name="decide", versions=">=1.0,<3.0", signature=("logits", "greedy"), when="after"):
    return BroadcastPoint(
        target=f"{TOY}.{name}",
        when=when,
        sites=("eagle-target",),
        site_of=lambda _: None,
        tensors_of=no_tensors,
        versions=versions,
        signature=signature,
    )


def manager(*points):
    class Plugin:
        @hookimpl
        def specsync_broadcast_points(self, engine):
            return points

    made = PluginManager()
    made.register(Plugin(), "toy")
    return made


def facts(version):
    return EngineFacts(engine="toy", version=version, algorithm="eagle")


def test_the_points_of_the_version_are_found():
    old, new = point(versions="==1.0"), point(versions="==2.0")
    assert find_points(manager(old, new), facts("2.0"), ("1.0", "2.0")) == Candidates((new,))


@pytest.mark.parametrize(("version", "near"), [("2.5", "2.0"), ("0.9", "1.0"), ("2.0.post1", "2.0"), ("1.9rc2", "1.0")])
def test_an_unknown_version_is_a_problem_and_gets_the_points_of_the_nearest(version, near):
    assert nearest(version, ("1.0", "2.0")) == near
    found = find_points(manager(point(versions=f"=={near}")), facts(version), ("1.0", "2.0"))
    assert len(found.points) == 1
    assert found.problems == (f"toy {version} is not known; known are 1.0, 2.0, of which {near} is the nearest",)


def test_an_algorithm_that_nobody_knows_is_a_problem():
    found = find_points(manager(point(when="engine")), facts("1.0"), ("1.0",))
    assert found.problems == ("no installed plugin knows where toy 1.0 decides for eagle",)


def alone(*points, problems=()):
    return lambda: Candidates(points, tuple(problems))


def test_what_is_in_order_starts():
    assert [each.target for each in agree_to_start(alone(point()), True, None).points] == [f"{TOY}.decide"]


def test_a_changed_signature_stops_the_start():
    with pytest.raises(EngineError) as caught:
        agree_to_start(alone(point(signature=("logits",))), True, None)
    assert str(caught.value).splitlines() == [
        "not every decision of this engine could be synchronised:",
        f"  every rank: {TOY}.decide: its parameters are (logits, greedy), known are (logits)",
        "  Install versions that fit each other, or set SPECSYNC_STRICT=0 to go on without these sites.",
    ]


def test_a_problem_of_another_rank_stops_this_one_and_names_it():
    def exchange(topic, own):
        return [own, {"error": None, "problems": [], "refused": [f"{TOY}.decide: not found: gone"]}]

    with pytest.raises(EngineError, match=r"group rank 1: tests.unit.engines.toy_engine.decide: not found: gone"):
        agree_to_start(alone(point()), True, exchange)


def test_an_error_of_any_rank_reaches_every_rank():
    def fail():
        raise PolicyError("SPECSYNC_SITES: unknown token 'x'")

    def exchange(topic, own):
        return [{"error": None, "problems": [], "refused": []}, own]

    with pytest.raises(EngineError, match="group rank 1: PolicyError: SPECSYNC_SITES: unknown token 'x'"):
        agree_to_start(fail, False, exchange)


def test_without_strict_no_rank_hooks_what_one_cannot(caplog):
    def exchange(topic, own):
        return [own, {"error": None, "problems": [], "refused": [f"{TOY}.decide: not found: gone"]}]

    with caplog.at_level(logging.WARNING, "specsync"):
        found = agree_to_start(alone(point(), point("draw_block", signature=("steps", "sampler"))), False, exchange)
    assert [each.target for each in found.points] == [f"{TOY}.draw_block"]
    assert "SPECSYNC_STRICT=0" in caplog.text
    assert "group rank 1" in caplog.text


@pytest.mark.parametrize(
    ("environ", "strict"),
    [({}, True), ({"SPECSYNC_STRICT": "0"}, False), ({"SPECSYNC_STRICT": "0", "SPECSYNC_TIMEOUT_S": "soon"}, True)],
)
def test_an_environment_that_cannot_be_read_is_strict_and_raises_nothing_yet(monkeypatch, environ, strict):
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    assert is_strict() == strict
