"""Hooks over a sync that notes its calls."""

from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import pytest

from specsync_core import BroadcastPoint, Scope, no_tensors
from specsync_core.engines.hooks import active_points, build_hooks
from specsync_core.engines.proof import Firings
from specsync_core.errors import PluginError
from tests.unit.engines import toy_engine

TOY = "tests.unit.engines.toy_engine"
SITE, OTHER = "eagle-target", "eagle-verify-greedy"


class NotingSync:
    """Has some sites on; notes what is synchronised and what is agreed on."""

    def __init__(self, *on):
        self.on, self.calls = on, []

    def enabled(self, site):
        return site in self.on

    reachable = enabled

    def point(self, site):
        return lambda *tensors: self.calls.append((site, tensors))

    def agree(self, site, value, op):
        self.calls.append((site, op, value))
        return "agreed"


POINT = BroadcastPoint(
    target=f"{TOY}.decide",
    when="after",
    sites=(SITE,),
    site_of=lambda _: SITE,
    tensors_of=lambda call: (call.result,),
    versions="==1",
    signature=("logits", "greedy"),
)


@pytest.fixture
def engine(monkeypatch):
    """Apply hooks to the toy engine, as an engine's registry does."""

    def apply(*hooks):
        for hook in hooks:
            name = hook.target.removeprefix(f"{TOY}.")
            monkeypatch.setattr(toy_engine, name, wrapped(getattr(toy_engine, name), hook))
        return toy_engine

    return apply


def wrapped(original, hook):
    @wraps(original)
    def call(*args, **kwargs):
        if hook.kind == "around":
            return hook.function(original, *args, **kwargs)
        if hook.kind == "before":
            args, kwargs = hook.function(*args, **kwargs) or (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook.function(result, *args, **kwargs)
        return result if changed is None else changed

    return call


def hooks(sync, *points):
    firings = Firings()
    return list(build_hooks(active_points(points, sync), sync, firings, (__name__,))), firings


def test_a_point_whose_sites_are_off_or_that_the_engine_syncs_has_no_hook():
    assert hooks(NotingSync(OTHER), POINT)[0] == []
    assert hooks(NotingSync(SITE), replace(POINT, when="engine"))[0] == []


def test_after_takes_the_result_and_before_the_arguments(engine):
    sync = NotingSync(SITE)
    before = replace(POINT, when="before", tensors_of=lambda call: (call.argument("logits", POINT.signature),))
    made, firings = hooks(sync, POINT, before)
    assert engine(*made).decide("tokens") == "tokens"
    assert sync.calls == [(SITE, ("tokens",))] * 2
    assert firings.counts == {POINT.target: 2}


@pytest.mark.parametrize(("rank", "taps", "derived"), [(0, (), []), (1, (), ["synced"]), (0, ("faults",), ["synced"])])
def test_what_was_derived_is_written_anew_behind_the_sync_on_every_rank_but_group_rank_0(engine, rank, taps, derived):
    sync, seen = NotingSync(SITE), []
    group = SimpleNamespace(rank_in_group=rank)
    sync.groups, sync.taps = SimpleNamespace(tp=group, dp_attention=False), taps
    point = replace(POINT, derive=lambda call: seen.append("synced" if sync.calls else "too early"))
    engine(*build_hooks([point], sync, Firings())).decide([[0, 5]])
    assert seen == derived


@pytest.mark.parametrize(
    "wrong", [{"when": "before"}, {"capture": "any-communicator"}, {"op": "min"}, {"rows": True}, {"wait_for": print}]
)
def test_where_nothing_would_be_derived_it_is_refused(wrong):
    with pytest.raises(PluginError, match=rf"when='after' and capture='never', not with {next(iter(wrong))}"):
        replace(POINT, derive=lambda call: None, **wrong)


def test_a_call_of_no_site_is_left_alone_and_does_not_count(engine):
    sync = NotingSync(SITE)
    made, firings = hooks(sync, replace(POINT, site_of=lambda call: SITE if call.kwargs.get("greedy") else None))
    engine(*made).decide("tokens")
    assert (sync.calls, firings.counts) == ([], {POINT.target: 0})


def test_a_site_of_the_point_that_is_off_fires_and_is_not_synced(engine):
    sync = NotingSync(SITE)
    made, firings = hooks(sync, replace(POINT, sites=(SITE, OTHER), site_of=lambda _: OTHER))
    engine(*made).decide("tokens")
    assert (sync.calls, firings.counts) == ([], {POINT.target: 1})


def test_the_scope_tells_calls_apart_and_ends_with_its_call(engine):
    scope = Scope(f"{TOY}.decide_within", lambda call: SITE if call.kwargs["greedy"] else OTHER, ("logits", "greedy"))
    sync = NotingSync(SITE, OTHER)
    point = replace(POINT, sites=(SITE, OTHER), site_of=lambda call: call.scope, within=(scope,))
    toy = engine(*hooks(sync, point)[0])
    toy.decide("outside")
    toy.decide_within("a", greedy=True)
    toy.decide_within("b", greedy=False)
    toy.decide("outside again")
    assert sync.calls == [(SITE, ("a",)), (OTHER, ("b",))]


def test_a_scope_ends_also_when_its_call_raises(engine, monkeypatch):
    def fail(logits, *, greedy=True):
        raise ValueError("no logits")

    sync = NotingSync(SITE)
    scope = Scope(f"{TOY}.decide_within", lambda _: SITE, ("logits", "greedy"))
    made, _ = hooks(sync, replace(POINT, site_of=lambda call: call.scope, within=(scope,)))
    monkeypatch.setattr(toy_engine, "decide_within", fail)
    toy = engine(*made)
    with pytest.raises(ValueError, match="no logits"):
        toy.decide_within("a")
    toy.decide("b")
    assert sync.calls == []


@pytest.mark.parametrize("by_name", [True, False])
def test_a_callback_is_synced_each_time_it_is_called(engine, by_name):
    sync = NotingSync(SITE)
    signature = ("steps", "sampler")
    point = replace(POINT, target=f"{TOY}.draw_block", when="callback", callback="sampler", signature=signature)
    toy = engine(*hooks(sync, point)[0])
    drawn = toy.draw_block(2, sampler=str) if by_name else toy.draw_block(2, str)
    assert drawn == ["0", "1"]
    assert sync.calls == [(SITE, ("0",)), (SITE, ("1",))]


def test_a_host_value_is_agreed_on_for_the_callers_that_decide_by_it(engine):
    sync = NotingSync(SITE)
    point = replace(POINT, target=f"{TOY}.measure", tensors_of=no_tensors, op="min", callers=(__name__,))
    # This module is not among the wrappers here: it is the caller.
    made = list(build_hooks([point], sync, Firings(), ("tests.unit.engines.nobody",)))
    assert made[0].function("8 GiB", "cuda") == "agreed"
    elsewhere = list(build_hooks([replace(point, callers=("another.module",))], sync, Firings()))
    assert elsewhere[0].function("8 GiB", "cuda") is None
    assert sync.calls == [(SITE, "min", "8 GiB")]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wait_makes_no_collective(engine, when):
    sync, waited = NotingSync(SITE), []
    made, firings = hooks(sync, replace(POINT, when=when, wait_for=lambda call: waited.append(call.args)))
    assert engine(*made).decide("tokens") == "tokens"
    assert (waited, sync.calls, firings.counts) == ([("tokens",)], [], {POINT.target: 1})


@pytest.mark.parametrize("consensus", [False, True])
def test_a_muted_hook_leaves_every_call_alone(engine, consensus):
    sync = NotingSync(SITE)
    made, _ = hooks(sync, replace(POINT, op="min") if consensus else POINT)
    toy = engine(*made)
    toy.decide("a")
    for hook in made:
        hook.mute()
    assert toy.decide("b") == "b"
    assert len(sync.calls) == 1
