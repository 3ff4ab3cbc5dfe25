"""Points that can be switched, and which captures are known to know their plan."""

import pytest
import torch

from specsync_core.errors import PlanMismatchError
from specsync_core.replay import Replay
from specsync_core.switching import Capture, Captures, Switch, in_force


class Plan:
    def __init__(self, digest):
        self.digest = digest


class Owner:
    """What a capture looks at of a `SpecTpSync`."""

    def __init__(self):
        self.plan, self.plan_generation, self._captures = Plan("a" * 64), 0, Captures()

    def capturing(self):
        from contextlib import contextmanager

        @contextmanager
        def capture():
            with self._captures.known():
                yield Capture(self)

        return capture()

    def change(self):
        self.plan, self.plan_generation = Plan("b" * 64), self.plan_generation + 1


class OnGpu:
    is_cuda = True


def test_a_switch_does_what_is_in_force():
    calls = []
    switch = Switch("dspark-plan", lambda *tensors, logits=None: calls.append((1, tensors, logits)), Captures())
    bound = switch.now
    switch("x", logits="y")
    switch.now = lambda *tensors, logits=None: calls.append((2, tensors, logits))
    switch("z")
    switch()
    assert calls == [(1, ("x",), "y"), (2, ("z",), None), (2, (), None)]
    assert in_force(switch, "x") is switch.now
    assert in_force(bound, "x") is bound


def test_captures_that_do_not_know_the_plan_are_noted(monkeypatch):
    captures = Captures()
    switch = Switch("dspark-plan", lambda *tensors, logits=None: None, captures)
    switch(OnGpu()) if torch.cuda.is_available() else None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    switch(torch.zeros(1))
    assert not captures.foreign, "a tensor on the host is in no graph"
    with captures.known():
        switch(OnGpu())
        in_force(switch, OnGpu())
    assert not captures.foreign
    switch(OnGpu())
    assert list(captures.foreign) == ["dspark-plan"]
    captures = Captures()
    in_force(Switch("dspark-target", lambda *_: None, captures), OnGpu())
    assert list(captures.foreign) == ["dspark-target"]


def test_a_replay_of_another_plan_is_refused_also_where_there_are_no_graphs():
    owner, calls = Owner(), []
    replay = Replay(lambda: calls.append(owner.plan_generation), torch.device("cpu"), sync=owner)
    free = Replay(lambda: calls.append("free"), torch.device("cpu"))
    replay()
    owner.change()
    assert replay.stale
    assert not free.stale
    free()
    with pytest.raises(PlanMismatchError) as caught:
        replay()
    assert str(caught.value) == (
        "a graph that was captured under plan aaaaaaaaaaaa (generation 0) must not be replayed under plan bbbbbbbbbbbb"
        " (generation 1): its calls would follow the old plan. Capture it again, on every rank at the same step."
    )
    assert calls == [0, "free"]
    again = Replay(lambda: calls.append(owner.plan_generation), torch.device("cpu"), sync=owner)
    again()
    assert calls == [0, "free", 1]
