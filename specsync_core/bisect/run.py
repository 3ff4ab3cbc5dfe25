"""The bisection as an operator runs it: trials as processes, the report after each, an end in order."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specsync_core.bisect.chances import upper_bound
from specsync_core.bisect.core import Bisection, Next
from specsync_core.bisect.evidence import Evidence, read_evidence
from specsync_core.bisect.hitting import Sites
from specsync_core.bisect.judge import Judge, Seen
from specsync_core.bisect.last_words import first_difference, last_line
from specsync_core.bisect.processes import POLL_S, Child, Interrupts, Pool
from specsync_core.bisect.report import Answer, Asked, Options, Report, SetChecked, SetFound, save_report
from specsync_core.bisect.search import Limits, Verdict
from specsync_core.bisect.trials import Trial, policy_of
from specsync_core.bisect.words import Summary, tell_start, tell_state, tell_trial
from specsync_core.errors import BisectError
from specsync_core.registry import Registry, Site

OUTPUT_BYTES = 1 << 28
"""Most that a run's standard output may hold where it is compared."""


@dataclass(frozen=True)
class Task:
    """What is to be found out, and how."""

    asked: Asked
    options: Options
    registry: Registry
    report: Path
    specsync: str

    @property
    def sites(self) -> list[Site]:
        return [self.registry.site(slug) for slug in self.asked.sites]

    @property
    def folder(self) -> Path:
        """Where the runs' output goes; what good ones wrote is removed."""
        return self.report.with_name(f"{self.report.stem}.trials").absolute()


@dataclass
class Run:
    """One session of a bisection.

    Args:
        task: what to find out.
        trials: of earlier sessions.
        say: told a line now and then.
    """

    task: Task
    trials: Sequence[Trial] = ()
    say: Callable[[str], None] = lambda line: None
    signal: int = 0
    """The number of the signal that ended the session early."""
    _running: dict[int, tuple[Child, Next, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = Limits(self.task.options.confidence, self.task.options.runs)
        self.trials = list(self.trials)
        self.bisection = Bisection(self.task.sites, limits, self.trials)
        self.judge = Judge(self.task.options.timeout_s)
        self.judge.learn(self.trials)
        self._number = max((trial.number for trial in self.trials), default=0)
        self._expected = _read_expected(self.task.asked)

    def begin(self) -> None:
        """Save the report once, before hours are spent.

        Raises:
            BisectError: it cannot be written.
        """
        self._save("running")

    def finish(self) -> Report:
        """Run until the answer is there, or a signal comes; the report is saved in any case.

        Raises:
            BisectError: the command cannot be run, sets a policy of its own, or the report cannot be written.
        """
        with Interrupts() as interrupts, Pool(self.task.asked.command, self.task.asked.directory) as pool:
            try:
                self._go_on(pool, interrupts)
            except BaseException:
                self._abort(pool, interrupts)
                self._tell(f"stopped; {tell_state(self.bisection, self.task.options.parallel, self.judge.limit_s)}")
                with contextlib.suppress(BisectError):  # the first error is the one to tell
                    self._save("stopped")
                raise
            self._abort(pool, interrupts)
            self.signal = interrupts.number
        verdict = self.bisection.verdict
        self._remove_empty_folder()
        return self._save("interrupted" if verdict is None else verdict.status)

    def _go_on(self, pool: Pool, interrupts: Interrupts) -> None:
        while self.bisection.verdict is None and not interrupts.count:
            self._start_more(pool)
            for child in pool.take_ended():
                self._take(child)
            time.sleep(POLL_S)

    def _abort(self, pool: Pool, interrupts: Interrupts) -> None:
        """End what still runs: in order, and at once when a second signal comes."""
        if interrupts.count and pool.children:
            self._tell("ending the runs; Ctrl-C again does not wait")
        for child in pool.children:
            child.abort()
        while pool.children:
            if interrupts.count > 1:
                return  # leaving the pool kills
            for child in pool.take_ended():
                _, planned, number = self._running.pop(child.group)
                self.trials = [
                    *self.trials,
                    Trial(
                        number=number, off=planned.off, audited=planned.audited, outcome="aborted", how="interrupt",
                        detail="not left to end", seconds=child.seconds,
                    ),
                ]  # fmt: skip
                shutil.rmtree(child.folder, ignore_errors=True)
            time.sleep(POLL_S)

    # --- one trial --------------------------------------------------------------------------------------

    def _start_more(self, pool: Pool) -> None:
        while len(pool.children) < self.task.options.parallel:
            planned = self.bisection.next([each for _, each, _ in self._running.values()])
            if planned is None:
                return
            self._number += 1
            child = self._start(pool, planned, self._number)
            self._running[child.group] = child, planned, self._number

    def _start(self, pool: Pool, planned: Next, number: int) -> Child:
        folder = self.task.folder / f"{number:04d}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise BisectError(
                f"{folder}: cannot be made: {error.strerror or error}. Give another place with --report."
            ) from error
        mark = str(folder / f"stats-{secrets.token_hex(8)}")
        variables = {
            "SPECSYNC_SITES": policy_of(planned.off, (site.slug for site in self.task.registry.sites), planned.audited),
            "SGLANG_SPEC_TP_SYNC": None,
            "SPECSYNC_STATS_DIR": mark,
            "SPECSYNC_TRIAL": str(number),
        }
        child = pool.start(folder, variables, mark, self.judge.limit_s)
        self._tell(tell_start(number, planned, child.limit_s, self.bisection))
        return child

    def _take(self, child: Child) -> None:
        _, planned, number = self._running.pop(child.group)
        evidence = read_evidence(Path(child.mark), self.task.registry.sites, child.began_at_s)
        self._check_policy(evidence, planned, number)
        code = None if child.timed_out else child.exit_code
        output = self._compared_output(child, code)
        seen = Seen(code, child.seconds, evidence, None if output is None else output == self._expected)
        outcome, how, detail = self.judge.judge(seen, planned.off)
        trial = Trial(
            number=number, off=planned.off, audited=planned.audited, outcome=outcome, how=how, detail=detail,
            seconds=round(child.seconds, 3), counts=evidence.counts,
            said="" if outcome == "good" else self._said(child, output),
        )  # fmt: skip
        if outcome == "good":
            shutil.rmtree(child.folder, ignore_errors=True)
        self.trials = [*self.trials, trial]
        self.judge.learn(self.trials)
        self.bisection.record(trial)
        self._save("running")
        self._tell(tell_trial(trial, self.bisection))
        if self.bisection.verdict is None:
            self.say(f"    {tell_state(self.bisection, self.task.options.parallel, self.judge.limit_s)}")

    def _tell(self, line: str) -> None:
        self.say(f"{time.strftime('%H:%M:%S')} {line}")

    def _check_policy(self, evidence: Evidence, planned: Next, number: int) -> None:
        """Stop when the command did not run what it was told to: all that it shows would be about something else."""
        wanted_off = "audit" if planned.audited else "off"
        for slug in self.task.asked.sites:
            wanted = wanted_off if slug in planned.off else "sync"
            ran = evidence.modes.get(slug, frozenset({wanted}))
            if ran != {wanted}:
                raise BisectError(
                    f"trial {number}: the command ran {slug} in mode {' and '.join(sorted(ran))}, though SPECSYNC_SITES"
                    f" said {wanted}: it sets a policy of its own. Let it take the environment's."
                )

    def _compared_output(self, child: Child, code: int | None) -> bytes | None:
        if self._expected is None or code != 0:
            return None
        with (child.folder / "stdout").open("rb") as file:
            return file.read(OUTPUT_BYTES)

    def _said(self, child: Child, output: bytes | None) -> str:
        if output is not None and self._expected is not None:
            return first_difference(output, self._expected)
        return last_line(child.folder / "stderr")

    # --- the report -------------------------------------------------------------------------------------

    def _save(self, status: Any) -> Report:
        verdict = self.bisection.verdict
        summary = () if verdict is None else tuple(self._summary(verdict).lines())
        report = Report(
            specsync=self.task.specsync, asked=self.task.asked, options=self.task.options, status=status,
            summary=summary, answer=None if verdict is None else self._answer(verdict), trials=tuple(self.trials),
        )  # fmt: skip
        save_report(report, self.task.report)
        return report

    def _summary(self, verdict: Verdict) -> Summary:
        return Summary(self.bisection, verdict, self.judge.is_blind, self.task.folder)

    def _answer(self, verdict: Verdict) -> Answer:
        knowledge = self.bisection.knowledge

        def checked(kept: Sites, off: Sites, status: str) -> SetChecked:
            tally = knowledge.tally(off)
            bound = upper_bound(tally.bad, tally.runs, self.task.options.confidence) if tally.runs else 1.0
            return SetChecked(
                kept_on=tuple(sorted(kept)), good=tally.good, good_by_counts=tally.by_counts, bad_rate_under=bound,
                status=status,
            )  # fmt: skip

        def found(sites: Sites, confirmed: bool) -> SetFound:
            bad, runs = knowledge.own(sites)
            return SetFound(sites=tuple(sorted(sites)), bad=bad, runs=runs, confirmed=confirmed)

        return Answer(
            sets=tuple(found(each.sites, each.confirmed) for each in verdict.found),
            checks=tuple(checked(each.kept, each.off, each.status) for each in verdict.checks if each.off),
            bad_rate_looked_for=verdict.rate,
        )

    def _remove_empty_folder(self) -> None:
        folder = self.task.folder
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def fingerprint(path: Path) -> str:
    """Return the sha256 of the expected output.

    Raises:
        BisectError: it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BisectError(f"--expect: {path} cannot be read: {error.strerror or error}.") from error


def _read_expected(asked: Asked) -> bytes | None:
    return None if asked.expect is None else Path(asked.expect).read_bytes()
