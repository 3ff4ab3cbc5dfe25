"""Every site of the published fix and of EAGLE, with every kind of fault, in every mode: what does the doctor say?

It has to name the site and the rank, or to say that it cannot; it accuses nobody in clean runs; and no run outlasts
its time. The demo engine runs for real, on pairs of gloo ranks, several pairs at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from specsync_core import load_registry
from specsync_core.diagnostics import Diagnosis, diagnose, parse_faults
from specsync_core.errors import PolicyError
from tests.distributed import matrix_world as world
from tests.distributed.matrix_world import FAULT_STEP, PLACES, RANKS, CaseJob, Mode, Place, Setting, make_job

CASE_S = 40.0
"""No run takes longer, whatever happens in it."""
HOST_S = 120.0
"""A host imports torch and everything else before its first run."""
STUCK_S = 0.4
AT_ONCE = 4
KINDS = {"value": "", "delay": "delay=120", "drop": "drop", "exit": "exit=3"}
CONSENSUS = {"dspark-mem", "dflash-mem", "eagle-ngram-corpus"}
MEASURED = {"dspark-mem", "dflash-mem"}


@dataclass(frozen=True)
class Case:
    place: Place
    kind: str
    mode: Mode

    @property
    def name(self) -> str:
        return f"{self.place.site}-{self.kind}-{self.mode}"

    @property
    def job(self) -> CaseJob:
        act = KINDS[self.kind] or self.place.change
        when = "" if self.place.is_start else f":step={FAULT_STEP}"
        return make_job(self.name, self.place.setting, self.mode, f"{self.place.site}:rank=1{when}:{act}")

    def is_as_it_should_be(self, found: Diagnosis, codes: dict[int, int | None]) -> bool:
        """Whether the verdict names the site and the rank, or says why there is nothing to name."""
        return {"value": self._value, "delay": self._delay, "drop": self._drop, "exit": self._exit}[self.kind](
            found, codes
        )

    def _value(self, found: Diagnosis, codes: dict[int, int | None]) -> bool:
        site = self.place.site
        if site in MEASURED and self.mode != "sync":
            # A measurement is no decision: it is named when ranks went different ways by it, and listed otherwise.
            listed = f"{site} 1; first {site}, step 0, call 1: value[0] is 0.001 on rank 1" in found.text
            named = site in found.headline if found.is_finding else found.headline.startswith("No divergence: 0 mism")
            return listed and named
        if self.mode == "sync" and site in CONSENSUS:
            return found.finding == "clean" and found.agreed.get(site, 0) >= 1 and done(codes)
        if self.mode == "sync":
            healed = found.finding == "healed" and found.healed.get(site, 0) >= 1 and found.divergence is None
            return healed and self._names(found) and done(codes)
        return found.divergence is not None and self._names(found)

    def _names(self, found: Diagnosis) -> bool:
        step = (0,) if self.place.is_start else (FAULT_STEP,)
        first = found.divergence or found.first_healed
        assert first is not None
        is_named = self.place.site in found.headline and "rank 1" in found.headline.lower()
        return is_named and (first.site, first.odd_ranks) == (self.place.site, (1,)) and first.step in step

    def _delay(self, found: Diagnosis, codes: dict[int, int | None]) -> bool:
        return found.finding == "hang" and found.divergence is None and self._is_behind(found)

    def _is_behind(self, found: Diagnosis) -> bool:
        missing = found.behind_at.get(1)
        named = self.place.site in found.headline and found.headline.startswith("Rank 1 ")
        return named and set(found.behind_at) == {1} and missing is not None and missing.site == self.place.site

    def _drop(self, found: Diagnosis, codes: dict[int, int | None]) -> bool:
        if self.mode == "off":  # nothing is synchronised there that could be left out
            return found.finding == "clean" and found.comparisons > 0 and done(codes)
        first = found.divergence
        return first is not None and first.kind == "skip" and self._names(found)

    def _exit(self, found: Diagnosis, codes: dict[int, int | None]) -> bool:
        is_dead = found.finding == "dead-rank" and found.dead_ranks == (1,) and codes.get(1) == 3
        return is_dead and "exited with code 3" in found.headline and self._is_behind(found)


def done(codes: dict[int, int | None]) -> bool:
    return list(codes.values()) == [0] * RANKS


CASES = [
    Case(place, kind, mode)
    for place in PLACES
    for kind in KINDS
    for mode in ("sync", "audit", "off")
    if not (kind == "drop" and place.site in CONSENSUS)
]


@dataclass
class Running:
    case: Case
    begun_s: float
    codes: dict[int, int | None] = field(default_factory=lambda: dict.fromkeys(range(RANKS)))
    pids: list[int] = field(default_factory=list)
    looked_s: float = 0.0


class Hosts:
    """Processes that fork the ranks, and what became of each run."""

    def __init__(self, folder: Path, count: int) -> None:
        context = get_context("spawn")
        self.folder = folder
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=world.host, args=(theirs, str(folder)), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()

    def run(self, cases: list[Case]) -> dict[str, tuple[bool, str]]:
        """Run all cases, as many at once as there are hosts; by name, whether the verdict was right, and its text."""
        waiting, results = cases[::-1], {}
        running: dict[Connection, Running | None] = dict.fromkeys(self.pipes)
        while waiting or any(running.values()):
            for pipe, now in running.items():
                if now is None and waiting:
                    case = waiting.pop()
                    pipe.send((case.name, [case.job]))
                    running[pipe] = Running(case, time.monotonic())
                elif now is not None and (ended := self._look(pipe, now)) is not None:
                    results[now.case.name] = ended
                    running[pipe] = None
            time.sleep(0.01)
        return results

    def _look(self, pipe: Connection, now: Running) -> tuple[bool, str] | None:
        while pipe.poll():
            kind, name, *content = pipe.recv()
            if name == now.case.name and kind == "pids":
                now.pids, now.begun_s = content[0], time.monotonic()
            elif name == now.case.name:
                now.codes[content[0]] = content[1]
        age_s = time.monotonic() - now.begun_s - (0 if now.pids else HOST_S)
        has_ended = None not in now.codes.values()
        if not has_ended and (age_s < 0.5 or age_s - now.looked_s < 0.3):
            return None
        now.looked_s = age_s
        living = {rank: code for rank, code in now.codes.items() if code is not None}
        with suppress(FileNotFoundError, ValueError):
            found = diagnose(self.folder / now.case.name, living, hang_after_s=STUCK_S)
            if now.case.is_as_it_should_be(found, now.codes):
                end(now)
                return True, found.text
            if has_ended or age_s > CASE_S:
                end(now)
                return False, f"{now.codes}\n{found.text}\n{self._logs(now)}"
        return (False, "no recording") if has_ended or age_s > CASE_S else None

    def _logs(self, now: Running) -> str:
        logs = (self.folder / f"{now.case.name}.{rank}.log" for rank in range(RANKS))
        return "\n".join(log.read_text()[-1500:] for log in logs if log.exists())


def end(now: Running) -> None:
    """End the ranks that still live: a delayed one, and one that waits for it."""
    for pid, (rank, code) in zip(now.pids, sorted(now.codes.items()), strict=False):
        if code is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                assert rank < RANKS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[bool, str]]]:
    hosts = Hosts(tmp_path_factory.mktemp("matrix"), AT_ONCE)
    try:
        yield hosts.run(CASES)
    finally:
        hosts.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_verdict_names_site_and_rank_or_says_that_it_cannot(
    case: Case, results: dict[str, tuple[bool, str]]
) -> None:
    is_right, text = results[case.name]
    assert is_right, text


@pytest.mark.parametrize("site", sorted(CONSENSUS))
def test_an_agreement_cannot_be_dropped(site: str) -> None:
    with pytest.raises(PolicyError, match="only a broadcast can be dropped"):
        parse_faults(f"{site}:rank=1:drop", load_registry(), "test")


def clean_jobs() -> list[CaseJob]:
    """200 runs that differ in algorithm, mode, prompts and draws; ranks with generators of their own are healed."""
    settings = [place.setting for place in PLACES if place.setting.probe is None]
    modes: tuple[Mode, ...] = ("sync", "audit", "off")
    jobs = []
    for number in range(200):
        setting: Setting = settings[number % len(settings)]
        mode = modes[number // len(settings) % 3]
        own = "per-rank" if mode == "sync" and number % 2 else "shared"
        jobs.append(make_job(f"clean-{number}", setting, mode, number=number, generators=own, steps=2))
    return jobs


@pytest.mark.timeout(300)
def test_nobody_is_accused_in_200_clean_runs(tmp_path: Path) -> None:
    jobs, folder = clean_jobs(), tmp_path / "clean"
    folder.mkdir()
    hosts = Hosts(folder, 1)
    try:
        hosts.pipes[0].send(("clean", jobs))
        codes: dict[int, int] = {}
        deadline = time.monotonic() + 240
        while len(codes) < RANKS and time.monotonic() < deadline:
            if hosts.pipes[0].poll(1.0):
                kind, _, *content = hosts.pipes[0].recv()
                if kind == "ended":
                    codes[content[0]] = content[1]
    finally:
        hosts.close()
    assert codes == dict.fromkeys(range(RANKS), 0)
    for job in jobs:
        found = diagnose(folder / job.name)
        assert not found.is_finding, found.text
        assert found.comparisons > 0
        assert found.divergence is None
        if job.generators == "shared":
            assert (
                found.headline == f"No divergence: 0 mismatches in {found.comparisons:,} comparisons at declared sites."
            )
