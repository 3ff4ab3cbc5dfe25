"""The agreement on a step, rank by rank and look by look: a store in memory takes the place of the group's."""

from __future__ import annotations

import threading
import time

import pytest

from specsync_core.control import pledges
from specsync_core.control.pledges import LEAD, Pledges
from specsync_core.errors import ControlError, PlanMismatchError, TransportError, UnsettledError

DIGEST = "d" * 64


class Store:
    """One rank's view of notes that all ranks share."""

    def __init__(self, notes: dict, rank: int, world_size: int) -> None:
        self.notes, self.rank, self.world_size = notes, rank, world_size
        self.failure = None

    def post(self, key, payload):
        self.notes[key] = payload

    def read(self, key):
        return self.notes.get(key)

    def remove(self, key):
        self.notes.pop(key, None)

    def glance(self):
        pass

    def fail(self, error):
        self.failure = error

    def roll_call(self):
        return "Group rank 1 has ended."


class Rank:
    def __init__(self, notes: dict, rank: int, steps: list[int], refusal=None, apply=None, timeout_s=5.0) -> None:
        self.step, self.made_at = steps[rank], []
        self.store = Store(notes, rank, len(steps))
        self.pledges = Pledges(self.store, "topic", lambda: self.step, lambda: refusal, apply or self.apply, timeout_s)

    def apply(self, proposal, step):
        self.made_at.append(step)
        return {"step": step}

    def next_step(self):
        self.step += 1
        self.pledges.begin_step(self.step)


def ranks_at(*steps: int, **kwargs) -> list[Rank]:
    notes: dict = {}
    return [Rank(notes, rank, list(steps), **kwargs) for rank in range(len(steps))]


def look(*ranks: Rank) -> None:
    for rank in ranks:
        rank.pledges.look()


class Proposing(threading.Thread):
    """Group rank 0's listener, which proposes and follows."""

    def __init__(self, rank: Rank, wait_s: float = 5.0) -> None:
        super().__init__(daemon=True)
        self.rank, self.wait_s, self.result = rank, wait_s, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.rank.pledges.propose({"dspark-plan": "off"}, DIGEST, "mode", self.wait_s)
        except Exception as error:
            self.result = error


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def propose(ranks: list[Rank], **kwargs) -> Proposing:
    """Propose, let every rank arm, and wait for the verdict."""
    notes = ranks[0].store.notes
    proposing = Proposing(ranks[0], **kwargs)
    wait_for(lambda: "topic/now" in notes)
    look(*ranks)
    wait_for(lambda: f"topic/{notes['topic/now']['number']}/verdict" in notes)
    return proposing


def test_all_ranks_change_at_the_latest_pledge_however_far_apart_they_are():
    ranks = ranks_at(5, 9, 7)
    proposing = propose(ranks)
    look(*ranks)  # each pledges
    look(*ranks)  # each learns the others'
    assert [rank.pledges.target for rank in ranks] == [9 + LEAD] * 3
    for rank in ranks:
        while not rank.made_at:
            rank.next_step()
    assert [rank.made_at for rank in ranks] == [[9 + LEAD]] * 3
    proposing.join(5)
    assert proposing.result == [{"step": 9 + LEAD}] * 3
    for rank in ranks:
        for _ in range(5):
            rank.next_step()
    assert [len(rank.made_at) for rank in ranks] == [1, 1, 1]


def test_no_rank_passes_its_pledge_before_it_knows_the_others():
    ranks = ranks_at(5, 5)
    propose(ranks)
    look(ranks[0])  # group rank 1 has not pledged
    ranks[0].next_step()
    assert ranks[0].step == 6
    passed = threading.Thread(target=ranks[0].next_step, daemon=True)
    passed.start()
    passed.join(0.3)
    assert passed.is_alive(), "it reached its pledge and waits"
    ranks[1].step = 8  # farther than group rank 0's pledge
    look(ranks[1])
    look(ranks[0])
    passed.join(5)
    assert not passed.is_alive()
    assert ranks[0].pledges.target == 8 + LEAD
    assert ranks[0].made_at == []


def test_a_pledge_cannot_appear_behind_a_step_that_has_begun():
    """The step is read and the pledge made under the lock that `begin_step` takes."""
    ranks = ranks_at(5, 5)
    propose(ranks)
    held = ranks[0].pledges._lock
    with held:
        pledging = threading.Thread(target=ranks[0].pledges.look, daemon=True)
        pledging.start()
        pledging.join(0.2)
        assert ranks[0].pledges._pledge is None
        ranks[0].step = 20
    pledging.join(5)
    assert ranks[0].pledges._pledge == 20 + LEAD


def test_a_refusal_of_one_rank_reaches_the_client_and_frees_all():
    notes: dict = {}
    ranks = [Rank(notes, 0, [1, 1]), Rank(notes, 1, [1, 1], refusal="graphs were captured")]
    proposing = propose(ranks)
    proposing.join(5)
    assert isinstance(proposing.result, ControlError)
    assert str(proposing.result) == "group rank 1 refuses: graphs were captured\n  Nothing was changed."
    look(*ranks)
    for rank in ranks:
        rank.pledges.check_free()
        for _ in range(5):
            rank.next_step()
    assert [rank.made_at for rank in ranks] == [[], []]


def test_a_rank_that_does_not_arm_is_named_and_hears_of_the_next_proposal(monkeypatch):
    monkeypatch.setattr(pledges, "ARM_S", 0.1)
    ranks = ranks_at(1, 1)
    proposing = Proposing(ranks[0])
    wait_for(lambda: "topic/now" in ranks[0].store.notes)
    look(ranks[0])
    proposing.join(5)
    assert str(proposing.result) == (
        "group rank 1 did not answer within 0.1 s. Group rank 1 has ended.\n  Nothing was changed."
    )
    monkeypatch.setattr(pledges, "ARM_S", 5.0)
    look(ranks[0])  # it hears that the first one was withdrawn; group rank 1 never heard of it
    again = Proposing(ranks[0])
    wait_for(lambda: ranks[0].store.notes["topic/now"]["number"] == 2)
    for _ in range(6):
        look(*ranks)
        time.sleep(0.02)
    while not all(rank.made_at for rank in ranks):
        for rank in ranks:
            rank.next_step()
    again.join(5)
    assert [rank.made_at for rank in ranks] == [[1 + LEAD]] * 2


def test_a_slow_rank_that_armed_for_an_old_proposal_takes_up_the_new_one():
    ranks = ranks_at(1, 1)
    notes = ranks[0].store.notes
    notes["topic/now"] = {"number": 1, "modes": {}, "digest": DIGEST, "request": ""}
    look(ranks[1])
    notes["topic/now"] = {"number": 2, "modes": {}, "digest": DIGEST, "request": ""}
    look(ranks[1])
    look(ranks[1])
    assert notes["topic/2/armed/1"] == {"refusal": None}


def test_an_idle_engine_is_told_the_step_and_refuses_another_change():
    ranks = ranks_at(3, 3)
    proposing = propose(ranks, wait_s=0.2)
    look(*ranks)
    look(*ranks)
    proposing.join(5)
    assert proposing.result == 3 + LEAD
    with pytest.raises(ControlError, match=r"another change is under way, or waits for the engine's next step\."):
        ranks[0].pledges.propose({}, DIGEST, "", 0.1)


def test_ranks_that_may_still_change_are_no_refusal():
    ranks = ranks_at(3, 3)
    proposing = propose(ranks, wait_s=0.0)
    proposing.join(5)
    assert isinstance(proposing.result, UnsettledError)
    assert str(proposing.result) == (
        "group ranks 0, 1 did not report within 0 s that the change was made. Group rank 1 has ended."
    )


def test_a_lost_rank_ends_the_wait_of_the_others_with_its_name():
    ranks = ranks_at(5, 5, timeout_s=0.2)
    propose(ranks, wait_s=0.1)
    look(ranks[0])
    ranks[0].next_step()
    with pytest.raises(TransportError) as caught:
        ranks[0].next_step()
    assert str(caught.value) == (
        "the ranks could not settle on a step for a change of sites: group rank 0 heard nothing from group rank 1 for"
        " 0.2 s. Group rank 1 has ended."
    )
    assert ranks[0].store.failure is caught.value


@pytest.mark.parametrize("error", [PlanMismatchError("no way"), RuntimeError("no memory")])
def test_a_rank_that_cannot_follow_ends_its_group(error):
    def apply(proposal, step):
        raise error

    ranks = ranks_at(5, 5, apply=apply)
    propose(ranks, wait_s=0.1)
    look(*ranks)
    look(*ranks)
    ranks[0].next_step()
    with pytest.raises(type(error)):
        ranks[0].next_step()
    assert str(error) in str(ranks[0].store.failure)


def test_old_notes_are_removed():
    ranks = ranks_at(1, 1)
    for number in range(1, 6):
        proposing = propose(ranks)
        look(*ranks)
        look(*ranks)
        while not all(len(rank.made_at) == number for rank in ranks):
            for rank in ranks:
                rank.next_step()
        proposing.join(5)
    assert {key.split("/")[1] for key in ranks[0].store.notes} == {"now", "4", "5"}
