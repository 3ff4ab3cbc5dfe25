"""Bisection on the demo's engine, whose ranks are threads here: faults, counts and sets are those of real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.bisect_trials import DEMO, SMALL, OnThreads, repeat
from benchmarks.demo_on_threads import ThreadEngine, ThreadWire
from specsync_core.bisect.core import Next
from specsync_core.bisect.evidence import read_evidence
from specsync_core.bisect.search import Limits
from specsync_core.demo.config import Job, World
from specsync_core.demo.runner import Ended
from specsync_core.manager import load_registry
from specsync_core.testing import run_fake_ranks
from tests.unit.bisect.oracles import A, B

WORLD = World(2, "cpu", 3, (b"The sun was", b"Down, down"), (), new_tokens=(3, 5), gamma=2, slots=2, config=SMALL)
JOB = Job("once", "dspark", "all", 4, recorded=False)
ACCEPT_FAULT, DRAFT_FAULT = f"{A}:rank=1:step=1:tensor=bonus:add=1", f"{B}:rank=1:from=0:add=1"


@pytest.fixture(autouse=True)
def stats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_STATS_DIR", str(tmp_path / "stats"))


def run(**changes: object) -> Ended:
    return ThreadEngine(WORLD).run(replace(JOB, **changes))


def test_what_ranks_bring_is_what_all_have() -> None:
    def member(group):
        wire, rank = ThreadWire(group), group.rank_in_group
        collectives = wire.collectives(None)
        tensor = torch.tensor([[1.0 + rank, 10.0 * rank]])
        summed, gathered = collectives.all_reduce(tensor, "test"), collectives.all_gather(tensor, "test")
        return summed.tolist(), gathered.tolist(), wire.lead(None)(lambda: f"rank {rank}")

    assert run_fake_ranks(member, 2) == [([[3.0, 10.0]], [[1.0, 0.0, 2.0, 10.0]], "rank 0")] * 2


def test_two_ranks_write_what_one_writes_alone() -> None:
    alone = ThreadEngine(replace(WORLD, ranks=1)).run(JOB)
    together = run()
    assert together.equal
    assert together.tokens == alone.tokens
    assert len({tuple(tokens) for tokens in alone.tokens.values()}) > 1


def test_a_fault_is_healed_and_counted_where_its_site_is_on_and_shows_where_it_is_off() -> None:
    healed = run(fault=ACCEPT_FAULT)
    assert healed.equal
    assert healed.healed == {A: 2}
    assert run(fault=ACCEPT_FAULT, sites=f"all,-{A}").outcome == "ranks differ"
    assert run(sites=f"all,-{A}").equal


def test_ranks_that_have_drifted_apart_are_a_hang_at_once(tmp_path: Path) -> None:
    """No time-out is waited for: it would be 30 seconds. What both had counted is complete."""
    hung = run(fault=DRAFT_FAULT, sites=f"all,-{A},-{B}")
    assert hung.outcome == "hung"
    assert hung.stop is not None
    assert "calls do not match" in hung.stop.errors[0]
    assert "group rank 0 in request broadcast; group rank 1 in tp all-reduce" in hung.stop.errors[0]
    counts = read_evidence(tmp_path / "stats", load_registry().sites, 0.0).counts
    assert counts is not None
    assert (counts.complete, counts.ranks) == (True, 2)


def test_a_mistake_is_no_bad_run() -> None:
    with pytest.raises(AssertionError, match="unknown token"):
        run(sites="dspark-plam")


def test_repetitions_are_no_copies() -> None:
    commands = [OnThreads(DEMO["one culprit"], seed) for seed in range(4)]
    assert len({command.faults for command in commands}) > 1
    assert len({str(command._engine.run(JOB).tokens) for command in commands}) == 4


def test_counts_are_those_that_ranks_wrote() -> None:
    trial = OnThreads(DEMO["one culprit"], 0).trial(1, Next(frozenset(), False, ""), struck=True)
    assert trial.counts is not None
    assert (trial.outcome, trial.counts.complete, trial.counts.ranks) == ("good", True, 2)
    assert A in trial.counts.differed
    assert trial.counts.is_silent("dspark-plan")


@pytest.mark.parametrize(
    ("name", "repeats"),
    [("one culprit", 2), ("two independent culprits", 1), ("a pair that is only bad together", 1)],
)
def test_the_right_sets_are_found(name: str, repeats: int) -> None:
    """At less confidence than the default; ``benchmarks/bisect_trials.py`` makes 100 at the default."""
    *_, done = repeat(name, repeats, Limits(confidence=0.8))
    assert len(done["seeds"]) == repeats
    assert done["bisect"]["wrong"] == {}
    assert ("two" in name) == bool(done["plain halving"]["wrong"])
