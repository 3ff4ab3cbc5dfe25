"""A bisection in words: a line for each trial, and the summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from specsync_core.bisect.chances import upper_bound
from specsync_core.bisect.core import Bisection, Next
from specsync_core.bisect.hitting import Sites
from specsync_core.bisect.search import Check, Found, Verdict, noise_runs
from specsync_core.bisect.trials import Trial

MOST_NAMED = 4
"""Sites that a line names; of more it gives the number."""


def name_off(off: Sites, bisection: Bisection) -> str:
    """Say which sites are off, as briefly as can be."""
    candidates = bisection.knowledge.candidates
    if not off:
        return "all sites on"
    if off == candidates:
        return f"all {len(off)} candidate sites off" if len(off) > 1 else f"{listed(off)} off"
    if len(off) <= MOST_NAMED:
        return f"{listed(off)} off"
    if len(kept := candidates - off) <= MOST_NAMED:
        return f"all candidate sites off but {listed(kept)}"
    return f"{len(off)} of {len(candidates)} candidate sites off"


def listed(slugs: Iterable[str]) -> str:
    """``a, b and c``."""
    names = sorted(slugs)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def tell_start(number: int, planned: Next, limit_s: float, bisection: Bisection) -> str:
    """One line about a trial that begins."""
    what = _what(planned.off, planned.audited, bisection)
    return f"trial {number}: {what}: started, at most {_duration(limit_s)}"


def _what(off: Sites, audited: bool, bisection: Bisection) -> str:
    name = name_off(off, bisection)
    return f"{name.removesuffix(' off')} only audited" if audited else name


def tell_trial(trial: Trial, bisection: Bisection) -> str:
    """One line about a trial that has ended."""
    what = _what(trial.off, trial.audited, bisection)
    line = f"trial {trial.number}: {what}: {trial.outcome} ({trial.detail}, {_duration(trial.seconds)})"
    if trial.counts is not None and trial.counts.differed:
        shown = [*trial.counts.differed[:MOST_NAMED]]
        more = len(trial.counts.differed) - len(shown)
        line += f"; ranks differed first at {', '.join(shown)}{f' and {more} more' if more else ''}"
    return line


def tell_state(bisection: Bisection, parallel: int, limit_s: float) -> str:
    """What is known so far, what is being looked at, and how long it may take.

    Args:
        limit_s: what a run may take: the price of a bad one as long as there was none, for it may hang.
    """
    search = bisection.search
    known = [listed(each.sites) for each in search.found]
    parts = [f"known to matter: {'; '.join(known)}"] if known else []
    parts.append(f"now {search.stage}")
    if search.narrowed and len(search.narrowed) <= MOST_NAMED:
        parts.append(f"suspects: {listed(search.narrowed)}")
    parts += _time_left(bisection, parallel, limit_s)
    return "; ".join(parts)


def _time_left(bisection: Bisection, parallel: int, limit_s: float) -> Iterator[str]:
    if not (rests := bisection.expected_left()):
        return
    good_s, bad_s = _mean(bisection, "good", limit_s), _mean(bisection, "bad", limit_s)
    runs = [good + bad for good, bad in rests]
    seconds = [(good * good_s + bad * bad_s) / min(parallel, max(1, good + bad)) for good, bad in rests]
    more = f"{min(runs)} to {max(runs)} more runs" if min(runs) < max(runs) else _count(max(runs), "more run")
    yield f"about {more}, {_durations(min(seconds), max(seconds))}"


def _durations(least_s: float, most_s: float) -> str:
    """``2 to 4 min``; where they do not differ as they are shown, ``4 min``."""
    least, most = _duration(least_s), _duration(most_s)
    if least == most:
        return most
    number, unit = least.split()
    return f"{number} to {most}" if most.endswith(f" {unit}") else f"{least} to {most}"


def _mean(bisection: Bisection, outcome: str, unseen_s: float) -> float:
    taken = [trial.seconds for trial in bisection.knowledge.trials if trial.outcome == outcome]
    return sum(taken) / len(taken) if taken else unseen_s


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Summary:
    """The answer in sentences."""

    def __init__(
        self, bisection: Bisection, verdict: Verdict, is_blind: bool = False, folder: Path | None = None
    ) -> None:
        self._folder = folder
        self._bisection = bisection
        self._knowledge = bisection.knowledge
        self._verdict = verdict
        self._is_blind = is_blind
        self._confidence = bisection.limits.confidence

    def lines(self) -> list[str]:
        tell = {
            "found": self._found,
            "on-is-bad": self._on_is_bad,
            "off-is-good": self._off_is_good,
            "untestable": self._untestable,
        }
        return [self._totals(), *tell[self._verdict.status](), *self._evidence(), *self._warnings()]

    def _totals(self) -> str:
        trials = [trial for trial in self._knowledge.trials if trial.outcome != "aborted"]
        kinds = [
            f"{count} {kind}"
            for kind in ("good", "bad", "untestable")
            if (count := sum(trial.outcome == kind for trial in trials))
        ]
        seconds = sum(trial.seconds for trial in trials)
        sets = {"found": f"{_count(len(self._verdict.found), 'minimal set')} of sites found"}
        head = sets.get(self._verdict.status, "No answer")
        if self._verdict.status == "off-is-good":
            head = "No site was seen to matter"
        return (
            f"{head}, in {_count(len(trials), 'run')} ({', '.join(kinds) or 'none'}; {_duration(seconds)} of running)."
        )

    # --- found ---

    def _found(self) -> Iterator[str]:
        single = len(self._verdict.found) == 1 and len(self._verdict.found[0].sites) == 1
        checks = list(self._verdict.checks)
        for found in self._verdict.found:
            line = self._set(found)
            if single and checks:
                line += f"; {self._check(checks.pop(), 'it')}"
            yield f"{line}."
            yield from self._reservations(found)
        for check in checks:
            text = self._check(check, listed(check.kept))
            yield f"{text[0].upper()}{text[1:]}."
        yield from self._sureness()
        yield self._noise()

    def _sureness(self) -> Iterator[str]:
        if not self._verdict.sure:
            yield (
                f"So not everything here is {_percent(self._confidence)} sure: the bounds above say how sure it is."
                " Raise --runs and add --resume for more."
            )
            return
        assert self._verdict.rate is not None
        yield (
            f"Error rate: at most {_percent(1 - self._confidence)} that a set named here does not matter, or that one"
            f" is missing which is bad in {_percent(self._verdict.rate)} of its runs or more."
        )

    def _noise(self) -> str:
        """How often runs are bad that no set found explains: the sets were compared with these."""
        on_bad, on_runs = self._knowledge.own(frozenset())
        bad, runs = noise_runs(self._knowledge, self._verdict.checks)
        more = f", and {bad - on_bad} of {runs - on_runs} with only the above on" if runs > on_runs else ""
        return f"Noise: all on, {on_bad} of {_count(on_runs, 'run')} bad{more}{self._bound(bad, runs)}."

    def _set(self, found: Found) -> str:
        bad, runs = self._knowledge.own(found.sites)
        name = listed(found.sites)
        audited = [trial for trial in self._knowledge.trials if trial.audited and trial.outcome == "bad"]
        alone = [trial for trial in audited if trial.blamed == found.sites != trial.off]
        checks = sum(sum(trial.counts.checks.values()) for trial in alone if trial.counts)
        counted = (
            f"in {len(alone)} of {_count(len(audited), 'bad run')} with more sites only audited, ranks differed there"
            f" and nowhere else ({checks:,} checks)"
        )
        if runs:
            return f"With {name} off, {self._bad_of(bad, runs, found.sites)}{f', and {counted}' if alone else ''}"
        it = "it" if len(found.sites) == 1 else "them"
        return f"With {name} off, runs are bad, by counts alone: {counted}, so no run with {it} off was needed"

    def _reservations(self, found: Found) -> Iterator[str]:
        if not found.confirmed:
            yield (
                f"For {listed(found.sites)} that is not yet {_percent(self._confidence)} sure; --runs"
                f" {self._bisection.limits.runs} allowed no more."
            )

    def _check(self, check: Check, kept: str) -> str:
        it = "them" if len(check.kept) > 1 and kept == "it" else kept
        if not check.off:
            return f"with {it} on, no other candidate is left to be off"
        if check.status == "untestable":
            return f"with everything else off and {it} on, the command fails before its first sync, so nothing is known"
        tally = self._knowledge.tally(check.off)
        text = f"with everything else off and {it} on, {tally.bad} of {tally.runs}{self._bound(tally.bad, tally.runs)}"
        if tally.bad:
            text += "; put down to noise, which is as rare"
        if tally.by_counts:
            text += (
                f"; {tally.by_counts} of these by counts: no rank differed there, so they did not need to be off"
                if tally.by_counts < tally.good
                else "; all by counts alone: no rank differed there, so no run with them off was needed"
            )
        if check.status == "capped":
            text += f"; --runs {self._bisection.limits.runs} allowed no more"
        return text

    def _bound(self, bad: int, runs: int) -> str:
        if not runs:
            return ""
        bound = upper_bound(bad, runs, self._confidence)
        return f" ({_percent(self._confidence)} that the bad rate is under {_percent(bound, up=True)})"

    def _bad_of(self, bad: int, runs: int, sites: Sites) -> str:
        hows = {trial.how for trial in self._knowledge.trials if trial.off == sites and trial.outcome == "bad"}
        verbs = {"time-out": ("hang", "hangs"), "exit": ("fail", "fails"), "output": ("differ", "differs")}
        many, one = verbs.get(next(iter(hows)), ("are bad", "is bad")) if len(hows) == 1 else ("are bad", "is bad")
        return f"{bad} of {runs} {'run' if runs == 1 else 'runs'} {one if runs == 1 else many}"

    # --- no answer ---

    def _on_is_bad(self) -> Iterator[str]:
        bad, runs = self._knowledge.own(frozenset())
        yield (
            f"With all sites on, {self._bad_of(bad, runs, frozenset())}, and all of them should be good: no site heals"
            f" this. {self._last_words(frozenset())}"
        )

    def _off_is_good(self) -> Iterator[str]:
        candidates = self._knowledge.candidates
        bad, runs = self._knowledge.own(candidates)
        tally = self._knowledge.tally(candidates)
        counted = f", and {tally.by_counts} more count as such, for no rank differed in them" if tally.by_counts else ""
        are = "run is" if runs == 1 else "runs are"
        yield (
            f"With {name_off(candidates, self._bisection)}, {bad} of {runs} {are} bad{counted}, and it should be"
            f" bad: none of these sites was seen to matter{self._bound(tally.bad, tally.runs)}. Where it is rarer than"
            " that, raise --runs; where it is not one of these sites, widen --sites; and `specsync doctor` looks at the"
            " transport."
        )

    def _untestable(self) -> Iterator[str]:
        sites = self._verdict.sites
        yield (
            f"With {name_off(sites, self._bisection)}, the command fails before its first sync, so it cannot be tested."
            f" {self._last_words(sites)}"
        )

    def _last_words(self, sites: Sites) -> str:
        ended = [
            trial for trial in self._knowledge.trials if trial.off == sites and trial.outcome in ("bad", "untestable")
        ]
        if not ended:
            return ""
        last = ended[-1]
        text = f"Last: {last.detail}{f': {last.said}' if last.said else ''}."
        if self._folder is not None:
            text += f" Its output is in {self._folder / f'{last.number:04d}'}."
        return f"{text} Where it needs longer, raise --timeout." if last.how == "time-out" else text

    # --- evidence ---

    def _evidence(self) -> Iterator[str]:
        healed = [t.counts for t in self._knowledge.trials if not t.off and t.counts and t.counts.compared]
        if not healed:
            return
        called = {slug for counts in healed for slug in counts.checks} & self._knowledge.candidates
        differed = self._bisection.suspicion.sorted({s for c in healed for s in c.mismatches} & called)
        silent = sorted(slug for slug in called if all(c.is_silent(slug) for c in healed))
        checks = sum(counts.checks.get(slug, 0) for counts in healed for slug in silent)
        runs = _count(len(healed), "run")
        if differed:
            places = ", ".join(differed)
            yield f"Counts, {runs} with all on: ranks differed, and were healed, at {places} (the most telling first)."
        else:
            yield f"Counts, {runs} with all on: ranks differed nowhere."
        if silent:
            yield f"They never differed in {checks:,} checks at {', '.join(silent)}."
        unused = len(self._knowledge.candidates - called)
        if unused:
            yield f"The command never called the {'other ' if called else ''}{_count(unused, 'candidate site')}."

    def _warnings(self) -> Iterator[str]:
        if (doubted := self._knowledge.doubted) is not None:
            yield (
                f"Counts were left out of account: with {name_off(doubted, self._bisection)} runs are bad, though where"
                " they were on no rank ever differed. What differs there is not compared."
            )
        if self._is_blind:
            yield (
                "No run left counts: the command did not sync anything, or its ranks could not write. A failure could"
                " not be told from a failed start, and every failure counts as bad."
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _percent(share: float, up: bool = False) -> str:
    """Whole percents; below ten one decimal, where there is one. ``up`` never understates."""
    scale = 1 if share >= 0.1 else 10
    value = 100.0 * share * scale
    rounded = (math.ceil(value - 1e-9) if up else round(value)) / scale
    return f"{rounded:g}%"


def shown_command(command: Sequence[str]) -> str:
    """The command as one would type it."""
    import shlex

    return shlex.join(command)
