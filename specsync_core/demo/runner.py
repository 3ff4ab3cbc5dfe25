"""Runs the story's jobs on worlds of ranks: a fresh world after each stop, and the doctor's word on it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from specsync_core.demo.compare import Agreement, compare_ranks
from specsync_core.demo.config import Job, JobResult, World
from specsync_core.demo.keep import keep_recordings
from specsync_core.demo.options import Setup
from specsync_core.demo.ranks import Stop, run_world
from specsync_core.diagnostics import Diagnosis, diagnose

HANG_AFTER_S = {"cpu": 3.0, "cuda": 10.0}
WARM_UP_STEPS = 4

Working = Callable[[str, int, int], None]
"""Told what is being worked on, the step it is at, and how many there are."""


@dataclass
class Ended:
    """How a job ended, and what its recordings show."""

    job: Job
    ranks: dict[int, JobResult] | None
    """By group rank; None when the job stopped."""
    stop: Stop | None
    diagnosis: Diagnosis | None
    """None for a job without recordings."""
    kept: Path | None = None
    """Where its recordings were kept for `specsync doctor`."""
    agreement: Agreement = field(init=False)
    """Whether all ranks' tokens are the same."""

    def __post_init__(self) -> None:
        self.agreement = compare_ranks(self.ranks) if self.ranks else Agreement(0, 0)

    @property
    def equal(self) -> bool:
        """The job came to its end, and all ranks hold the same tokens."""
        return self.agreement.equal

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Rank 0's output by request."""
        return self.ranks[0].tokens if self.ranks else {}

    @property
    def healed(self) -> dict[str, int]:
        """Values in which a rank differed from rank 0 and was healed, by site; not gates, which agree on a minimum."""
        counts: dict[str, int] = {}
        for result in (self.ranks or {}).values():
            for slug, stats in result.stats.items():
                if stats["mode"] == "sync" and stats["kind"] == "broadcast" and stats["mismatches"]:
                    counts[slug] = counts.get(slug, 0) + stats["mismatches"]
        return counts

    @property
    def step_ms(self) -> float | None:
        """The slower rank's median step, without the first steps, which make buffers."""
        if not self.ranks:
            return None
        return 1e3 * max(median(result.step_s[WARM_UP_STEPS:] or result.step_s) for result in self.ranks.values())

    @property
    def outcome(self) -> str:
        if self.stop is not None:
            return "hung" if self.stop.how == "hang" else "died"
        return "ranks equal" if self.equal else "ranks differ"

    def lines(self) -> list[str]:
        """Say how it ended."""
        diagnosed = list(self.diagnosis.verdict) if self.diagnosis is not None and self.diagnosis.is_finding else []
        if self.stop is None:
            return [f"It finished. All ranks' tokens are {self.agreement.describe()}.", *diagnosed, *self._kept()]
        first = "The ranks hang" if self.stop.how == "hang" else "A rank ended"
        return [
            f"{first}, and {self._how_ended()} Without the recorder one would see no more.",
            *diagnosed,
            *self._traces(),
            *self._kept(),
        ]

    def _kept(self) -> Iterator[str]:
        if self.kept is not None:
            yield f"Its recordings are kept. Read them yourself: specsync doctor {shlex.quote(str(self.kept))}"

    def _how_ended(self) -> str:
        assert self.stop is not None
        if self.stop.how == "hang":
            return f"were ended after {self.stop.waited_s:g} s without a step."
        return "its peers were ended."

    def _traces(self) -> Iterator[str]:
        assert self.stop is not None
        for rank, error in self.stop.errors.items():
            yield f"Rank {rank} raised {shorten(error.strip().splitlines()[-1])}"
        for rank, code in self.stop.exit_codes.items():
            if code not in (None, 0) and rank not in self.stop.errors and (words := last_words(self.stop.logs[rank])):
                yield f"Rank {rank} left this behind: {words}"

    def as_dict(self) -> dict[str, Any]:
        stop = self.stop
        return {
            "sites": self.job.sites,
            "outcome": self.outcome,
            "ranks_equal": self.equal,
            "healed": self.healed,
            "exit_codes": stop.exit_codes if stop else None,
            "errors": stop.errors if stop else {},
            "diagnosis": self.diagnosis.to_dict() if self.diagnosis else None,
            "kept": str(self.kept) if self.kept else None,
        }


class Runner:
    """Runs jobs for one setup.

    Args:
        folder: recordings go here, a directory per job.
        weights: trained weights, as `World` takes them.
        keep_all: keep also the recordings of runs in which nothing was found, where the setup keeps any.
    """

    def __init__(
        self, setup: Setup, folder: Path, working: Working, weights: bytes | None = None, *, keep_all: bool = False
    ) -> None:
        self._setup = setup
        self._folder = folder
        self._working = working
        self._weights = weights
        self._keep_all = keep_all

    def run(self, jobs: Sequence[Job]) -> Generator[Ended, None, None]:
        """Yield the end of each job, in order. After a stop, or where ranks drifted, the rest gets fresh ranks."""
        waiting = list(jobs)
        while waiting:
            self._working("starting ranks", 0, 1)
            with closing(self._world(waiting)) as world:
                for ended in world:
                    waiting.pop(0)
                    yield ended
                    if not ended.equal:
                        break

    def _world(self, jobs: Sequence[Job]) -> Generator[Ended, None, None]:
        setup = self._setup
        steps = {job.name: job.steps for job in jobs}
        world = World(
            setup.options.ranks, setup.device, setup.options.seed, setup.prompts, tuple(jobs),
            weights=self._weights, dumps=setup.options.keep is not None,
        )  # fmt: skip
        ends = run_world(
            world,
            self._folder,
            hang_after_s=HANG_AFTER_S[setup.device],
            on_step=lambda job, step: self._working(job, step, steps[job]),
        )
        with closing(ends):
            for end in ends:
                codes = end.stop.exit_codes if end.stop else None
                diagnosis = diagnose(self._folder / end.job.name, codes) if end.job.recorded else None
                yield Ended(end.job, end.ranks, end.stop, diagnosis, self._keep(end.job, diagnosis))

    def _keep(self, job: Job, diagnosis: Diagnosis | None) -> Path | None:
        directory = self._setup.options.keep
        if directory is None or diagnosis is None or not (diagnosis.is_finding or self._keep_all):
            return None
        return keep_recordings(self._folder / job.name, directory)


def last_words(log: str) -> str:
    """The line of a log that says what went wrong, as gloo, libstdc++ and Python write it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "what()" in line or "enforce" in line.lower() or "Error" in line]
    return shorten((telling or lines or [""])[-1])


def shorten(text: str, length: int = 160) -> str:
    """Cut a native library's message: paths to the file's name, the rest at a length."""
    text = re.sub(r"/\S*/", "", text)
    return text if len(text) <= length else text[: length - 3] + "..."
