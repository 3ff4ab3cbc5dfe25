"""Hooks applied by replacing functions."""

import inspect

import pytest

from specsync_core.engines.hooks import Hook
from specsync_core.engines.patch import apply_hooks
from tests.unit.engines import toy_engine

TOY = "tests.unit.engines.toy_engine"


@pytest.fixture
def failures(monkeypatch):
    for name in ("decide", "draw_block"):
        monkeypatch.setattr(toy_engine, name, getattr(toy_engine, name))
    monkeypatch.setattr(toy_engine.Worker, "step", toy_engine.Worker.step)
    return []


def apply(failures, *hooks):
    return apply_hooks(hooks, lambda target, error: failures.append((target, str(error))))


def test_before_around_and_after_act_in_that_order(failures):
    seen = []
    hooks = (
        Hook(f"{TOY}.decide", "after", lambda result, *_, **__: seen.append(("after", result)) or [result]),
        Hook(f"{TOY}.decide", "around", lambda inner, logits: (seen.append("around"), inner(logits))[1]),
        Hook(f"{TOY}.decide", "before", lambda logits: seen.append("before") or ((logits + 1,), {})),
    )
    assert apply(failures, *hooks) == []
    assert toy_engine.decide(1) == [2]
    assert seen == ["before", "around", ("after", 2)]


def test_a_false_result_replaces_a_true_one(failures):
    apply(failures, Hook(f"{TOY}.decide", "after", lambda *_: False))
    assert toy_engine.decide(True) is False


def test_a_method_is_replaced_for_instances_that_exist(failures):
    worker = toy_engine.Worker()
    apply(failures, Hook(f"{TOY}.Worker.step", "after", lambda result, *_: result + 1))
    assert worker.step(1) == 2


def test_the_signature_stays(failures):
    before = inspect.signature(toy_engine.decide)
    apply(failures, Hook(f"{TOY}.decide", "after", lambda *_, **__: None))
    assert inspect.signature(toy_engine.decide) == before


def test_a_target_that_is_absent_is_named(failures):
    absent = Hook(f"{TOY}.decline", "after", lambda *_: None)
    assert apply(failures, absent, Hook("no_such_module.decide", "after", lambda *_: None)) == [
        f"{TOY}.decline",
        "no_such_module.decide",
    ]


@pytest.mark.parametrize("place", ["before", "after", "function"])
def test_peers_are_told_of_what_is_raised_anywhere_in_a_call(failures, monkeypatch, place):
    def fail(*_):
        raise ValueError("no logits")

    if place == "function":
        monkeypatch.setattr(toy_engine, "decide", fail)
    kind = "after" if place == "function" else place
    apply(failures, Hook(f"{TOY}.decide", kind, (lambda *_: None) if place == "function" else fail))
    with pytest.raises(ValueError, match="no logits"):
        toy_engine.decide(1)
    assert failures == [(f"{TOY}.decide", "no logits")]
