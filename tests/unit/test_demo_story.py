"""What the story says of its runs' ends, without running any: held or not, the table, the hints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specsync_core.demo.compare import compare_ranks, compare_runs, sample_text
from specsync_core.demo.config import Job, JobResult
from specsync_core.demo.options import Options, prepare
from specsync_core.demo.ranks import Stop
from specsync_core.demo.runner import Ended, last_words, shorten
from specsync_core.demo.story import COST_ROUNDS, Part, Story, _Teller
from specsync_core.diagnostics import Diagnosis

RIGHT, WRONG = {0: [1, 2, 3], 1: [4, 5]}, {0: [1, 9, 3], 1: [4, 5]}
ACCEPT = "dspark-accept-greedy"


def result(tokens: dict[int, list[int]], step_s: float = 0.01, healed: int = 0) -> JobResult:
    stats = {
        ACCEPT: {"mode": "sync", "kind": "broadcast", "calls": 3, "mismatches": healed},
        "dspark-mem": {"mode": "sync", "kind": "consensus", "calls": 1, "mismatches": 1},
        "dspark-plan": {"mode": "audit", "kind": "broadcast", "calls": 3, "mismatches": 1},
    }
    return JobResult(tokens, [step_s] * 8, 2.0, stats, {"auto": "grouped", "group": "group"})


def diagnosis(finding: str = "drift-hang", site: str | None = ACCEPT) -> Diagnosis:
    fields = dict.fromkeys(Diagnosis.__dataclass_fields__)
    found = Diagnosis(**(fields | {"finding": finding, "verdict": ("First divergence: here.",), "waits": {}}))  # type: ignore[arg-type]
    return _At(found, site)  # type: ignore[return-value]


class _At:
    """A diagnosis with a site, whatever its fields."""

    def __init__(self, found: Diagnosis, site: str | None) -> None:
        self.verdict, self.is_finding, self.site = found.verdict, found.is_finding, site

    def to_dict(self) -> dict[str, Any]:
        return {"site": self.site}


def ended(job: Job, *tokens: dict[int, list[int]], found: Any = None, step_s: float = 0.01, healed: int = 0) -> Ended:
    ranks = {rank: result(each, step_s, healed * rank) for rank, each in enumerate(tokens)}
    return Ended(job, ranks, None, found)


def stopped(job: Job, how: Any = "hang", found: Any = None) -> Ended:
    stop = Stop(
        how, {0: 14, 1: 13}, {0: None, 1: -6}, {0: "Traceback\nRuntimeError: reset"}, {0: "", 1: "x\nwhat(): size"}, 4.0
    )
    return Ended(job, None, stop, found if found is not None else diagnosis())


class Silent:
    def working(self, what: str, done: int, total: int) -> None: ...

    def part(self, part: Part) -> None: ...


def tell(options: Options = Options(), **changes: Ended | list[Ended]) -> Story:  # noqa: B008
    """Tell a story whose runs all end as they should, but for those that are given."""
    teller = _Teller(prepare(options), Silent())

    def ends() -> Iterator[Ended]:
        for job in teller.jobs():
            name = job.name.partition(" of ")[0].replace(", ", "_").replace(" ", "_")
            change = changes.get(name)
            if isinstance(change, Ended):
                yield replace_job(change, job)
            elif name in ("sync_off", "natural_sites_init"):
                yield stopped(job)
            else:
                step_s = 0.01 if job.sites == "off" else 0.02
                yield ended(job, RIGHT, RIGHT, step_s=step_s, healed=2)

    teller.tell(ends())
    return teller.story


def replace_job(change: Ended, job: Job) -> Ended:
    return Ended(job, change.ranks, change.stop, change.diagnosis)


JOB = Job("any", "dspark", "all", 8)


def part(story: Story, key: str) -> Part:
    return next(each for each in story.parts if each.key == key)


class TestHeld:
    def test_the_story_as_it_should_be(self) -> None:
        story = tell()
        assert story.held
        assert [each.key for each in story.parts] == ["sync_off", "sync_on", "cost", "natural"]
        assert [each.held for each in story.parts] == [True, True, None, True]
        off = "\n".join(part(story, "sync_off").lines)
        assert "The ranks hang" in off
        assert "First divergence: here." in off
        assert "Rank 0 raised RuntimeError: reset" in off
        assert "Rank 1 left this behind: what(): size" in off
        assert f"{ACCEPT} 2 values" in "\n".join(part(story, "sync_on").lines)

    def test_the_table(self) -> None:
        runs = {run.name: run for run in tell().runs}
        assert (runs["(a) sync off"].outcome, runs["(a) sync off"].steps) == ("hung, diagnosed", 14)
        assert (runs["(b) sync on"].outcome, runs["(b) sync on"].healed) == ("ranks equal", 2)
        assert runs["(b) sync on"].step_ms == pytest.approx(20)

    def test_costs_are_ratios_of_the_same_rounds(self) -> None:
        rows = part(tell(), "cost").data["rows"]
        assert [(row["sites"], row["transport"], row["ratio"]) for row in rows] == [
            ("off", "grouped", 1.0), ("all", "grouped", 2.0), ("all", "group", 2.0),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("change", "key"),
        [
            ({"sync_off": ended(JOB, RIGHT, RIGHT)}, "sync_off"),
            ({"sync_off": stopped(JOB, found=diagnosis("hang", None))}, "sync_off"),
            ({"sync_off": stopped(JOB, found=diagnosis(site="dspark-plan"))}, "sync_off"),
            ({"sync_on": stopped(JOB)}, "sync_on"),
            ({"sync_on": ended(JOB, WRONG, WRONG)}, "sync_on"),
            ({"sync_on": ended(JOB, RIGHT, WRONG)}, "sync_on"),
            ({"plain_decoding": ended(JOB, WRONG, WRONG)}, "sync_on"),
            ({"natural_sync_on": ended(JOB, RIGHT, WRONG)}, "natural"),
            ({"natural_sites_init": ended(JOB, RIGHT, RIGHT)}, "natural"),
        ],
    )
    def test_a_run_that_ends_otherwise(self, change: dict[str, Any], key: str) -> None:
        story = tell(**change)
        assert part(story, key).held is False
        assert not story.held

    def test_silent_divergence_is_a_finding_too(self) -> None:
        assert tell(sync_off=ended(JOB, RIGHT, WRONG, found=diagnosis("silent-divergence"))).held

    def test_a_rank_that_dies_is_diagnosed_as_well(self) -> None:
        story = tell(sync_off=stopped(JOB, how="ended", found=diagnosis("drift-crash")))
        assert story.held
        assert story.runs[0].outcome == "died, diagnosed"

    def test_a_fault_that_changes_nothing_says_so(self) -> None:
        lines = part(tell(sync_off=ended(JOB, RIGHT, RIGHT)), "sync_off").lines
        assert "The fault changed nothing." in lines[-1]

    def test_a_narrow_policy_is_named_where_it_does_not_heal(self) -> None:
        story = tell(Options(sites="dspark-plan"), sync_on=stopped(JOB))
        (hint,) = [line for line in part(story, "sync_on").lines if line.startswith("--sites leaves these off")]
        assert ACCEPT in hint
        assert "dspark-plan" not in hint
        assert "Every site of the algorithm is on" in "\n".join(part(tell(sync_on=stopped(JOB)), "sync_on").lines)

    def test_an_unfaulted_run_that_ends_badly_is_no_story(self) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)without a fault did not end well.*First divergence"):
            tell(unfaulted=stopped(JOB))

    def test_costs_that_could_not_be_measured(self) -> None:
        costs = part(tell(cost=stopped(JOB)), "cost")
        assert costs.data["rows"] == []
        assert "Some of these runs stopped" in costs.lines[-1]


class TestJobs:
    def names(self, options: Options) -> list[str]:
        return [job.name for job in _Teller(prepare(options), Silent()).jobs()]

    def test_no_fault_and_no_temperature_leaves_the_first_part_out(self) -> None:
        assert "sync off" not in self.names(Options(fault="none"))
        assert "sync off" in self.names(Options(fault="none", temperature=0.5))

    def test_plain_decoding_is_compared_where_decoding_is_greedy(self) -> None:
        assert "plain decoding" in self.names(Options())
        assert "plain decoding" not in self.names(Options(temperature=0.5))

    def test_costs_alternate(self) -> None:
        jobs = [job for job in _Teller(prepare(Options()), Silent()).jobs() if job.name.startswith("cost")]
        modes = [(job.sites, job.transport) for job in jobs]
        assert len(jobs) == 3 * COST_ROUNDS == len({job.name for job in jobs})
        assert modes[:6] == [
            ("off", "auto"),
            ("all", "auto"),
            ("all", "group"),
            ("all", "group"),
            ("all", "auto"),
            ("off", "auto"),
        ]
        assert all(not job.recorded and not job.fault and job.generators == "shared" for job in jobs)


class TestCompare:
    def test_ranks_must_hold_the_same_requests_and_lengths(self) -> None:
        assert compare_ranks({0: result(RIGHT), 1: result(RIGHT)}).equal
        assert not compare_ranks({0: result({0: [1]}), 1: result({0: [1, 2]})}).equal
        assert not compare_ranks({0: result({0: [1]}), 1: result({0: [1], 1: [2]})}).equal
        third = compare_ranks({0: result(RIGHT), 1: result(RIGHT), 2: result(WRONG)})
        assert third.first_difference == (0, 1, 2, 9)
        assert third.describe() == "different: request 0, token 1: 2 and 9"
        assert (
            compare_ranks({0: result({0: [1]}), 1: result({0: [2]})}).describe()
            == "different: request 0, token 0: 1 and 2"
        )
        assert compare_ranks({0: result({}), 1: result({})}).describe() == "not comparable: there are none"

    def test_runs_are_compared_as_far_as_both_went(self) -> None:
        agreement = compare_runs({0: [1, 2, 3], 1: [4]}, {0: [1, 2]})
        assert agreement.equal
        assert agreement.describe() == "identical (2 tokens of 1 requests)"
        assert not compare_runs({0: [1]}, {1: [1]}).equal, "nothing in common is not agreement"

    def test_samples_are_readable(self) -> None:
        assert sample_text([b"Hi"], {0: [65, 10, 200], 1: [256 + 66]}) == [("Hi", "A\\n\\xc8"), ("Hi", "B")]


def test_traces_are_cut_to_what_a_person_needs() -> None:
    log = "warming up\nterminate called\n  what():  [enforce fail at /a/b/pair.cc:45] size 10 vs 5\n"
    assert last_words(log) == "what():  [enforce fail at pair.cc:45] size 10 vs 5"
    assert last_words("") == ""
    assert len(shorten("x" * 500)) == 160
