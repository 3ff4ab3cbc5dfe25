"""Does `specsync bisect` find the right sets, and in how many runs? Against simulated commands, and the demo's engine.

    python -m benchmarks.bisect_trials --demo "one culprit" --out FILE.json   # real ranks with injected faults, once
    python -m benchmarks.bisect_trials --repeats 100 --out FILE.json          # simulated, beside plain halving
    python -m benchmarks.bisect_trials --table FILE.json                      # the table in docs/bisect.md

``--demo`` runs the demo's engine on two ranks of this machine for every trial, and keeps the trials. Simulated
repetitions know the culprits, draw whether they strike, and take counts as the demo's trials showed them where the
file holds such trials.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specsync_core.bisect.core import Bisection, Next
from specsync_core.bisect.evidence import read_evidence
from specsync_core.bisect.search import Limits
from specsync_core.bisect.trials import Counts, Trial, policy_of
from specsync_core.manager import load_registry
from tests.unit.bisect.oracles import CALLED, SCENARIOS, A, B, Oracle, answer, found_sets, halve, sites_of

ACCEPT_FAULT = f"{A}:rank=1:step=4:add=1"
TARGET_FAULT = "dspark-target:rank=1:step=0:index=0:add=1"
DRAFT_FAULT = f"{B}:rank=1:from=3:add=1"
STEPS = 12


@dataclass(frozen=True)
class DemoCase:
    """A scenario on the demo's engine: algorithm dspark, two ranks, greedy."""

    faults: str
    culprits: tuple[frozenset[str], ...]
    rate: float = 1.0
    """How often a run gets the faults at all."""
    hangs_only: bool = False
    """Bad is a run that hangs or dies; else also one whose ranks end with different tokens."""


DEMO: dict[str, DemoCase] = {
    "one culprit": DemoCase(ACCEPT_FAULT, (frozenset({A}),)),
    "two independent culprits": DemoCase(
        f"{ACCEPT_FAULT};{TARGET_FAULT}", (frozenset({A}), frozenset({"dspark-target"}))
    ),
    "a pair that is only bad together": DemoCase(DRAFT_FAULT, (frozenset({A, B}),), hangs_only=True),
    "a culprit in 50% of the runs": DemoCase(ACCEPT_FAULT, (frozenset({A}),), rate=0.5),
    "a culprit in 10% of the runs": DemoCase(ACCEPT_FAULT, (frozenset({A}),), rate=0.1),
    "none": DemoCase("", ()),
}


class DemoEngine:
    """Runs the demo's engine for each trial: ranks are forked from a server that has imported torch once."""

    def __init__(self, case: DemoCase, seed: int) -> None:
        self._case = case
        self._chance = random.Random(seed)
        self._registry = load_registry()
        self._stats = Path(os.environ["SPECSYNC_STATS_DIR"])

    def run(self, number: int, planned: Next) -> Trial:
        from specsync_core.demo.once import run_once
        from specsync_core.demo.options import Options, prepare

        struck = self._chance.random() < self._case.rate
        setup = prepare(Options(fault=self._case.faults if struck and self._case.faults else "none", steps=STEPS))
        shutil.rmtree(self._stats, ignore_errors=True)
        policy = policy_of(planned.off, (site.slug for site in self._registry.sites), planned.audited)
        began_s, began = time.time(), time.monotonic()
        ended = run_once(setup, policy, lambda what, done, total: None)
        bad = ended.stop is not None if self._case.hangs_only else not ended.equal
        evidence = read_evidence(self._stats, self._registry.sites, began_s)
        trial = Trial(
            number=number, off=planned.off, audited=planned.audited, outcome="bad" if bad else "good",
            detail=ended.outcome, seconds=round(time.monotonic() - began, 2), counts=evidence.counts,
        )  # fmt: skip
        print(f"  {number}: {len(planned.off)} off{', audited' * planned.audited}: {ended.outcome}", file=sys.stderr)
        return trial


def run_demo(name: str, seed: int, limits: Limits) -> dict[str, Any]:
    """Bisect the demo's engine once; returns what was found and every trial."""
    case = DEMO[name]
    bisection = Bisection(sites_of(load_registry(), "dspark"), limits)
    engine = DemoEngine(case, seed)
    verdict = answer(bisection, engine.run)
    found = found_sets(verdict)
    return {
        "right": found == set(case.culprits),
        "found": [sorted(each) for each in found],
        "status": verdict.status,
        "trials": len(bisection.knowledge.trials),
        "bad": sum(trial.outcome == "bad" for trial in bisection.knowledge.trials),
        "seconds": round(sum(trial.seconds for trial in bisection.knowledge.trials), 1),
        "limits": {"confidence": limits.confidence, "runs": limits.runs},
        "record": [_plain(trial) for trial in bisection.knowledge.trials],
    }


def _plain(trial: Trial) -> dict[str, Any]:
    counts = trial.counts
    return {
        "off": sorted(trial.off),
        "audited": trial.audited,
        "outcome": trial.outcome,
        "detail": trial.detail,
        "differed": [] if counts is None else list(counts.differed),
        "complete": counts is not None and counts.complete,
    }


@dataclass(frozen=True)
class Drawn(Oracle):
    """An oracle whose counts are drawn from trials of the demo: which sites differed besides the culprits."""

    records: tuple[dict[str, Any], ...] = ()

    def run(self, number: int, off: frozenset[str], audited: bool, chance: random.Random) -> Trial:
        trial = super().run(number, off, audited, chance)
        alike = [
            record
            for record in self.records
            if record["complete"] and (record["outcome"], record["audited"]) == (trial.outcome, audited)
        ]
        if not alike or trial.counts is None:
            return trial.model_copy(update={"counts": None})
        record = chance.choice(alike)
        culprits = frozenset().union(*self.culprits)
        compared = [slug for slug in CALLED if audited or slug not in off]
        wake = [slug for slug in record["differed"] if slug in compared and slug not in culprits]
        struck = [slug for slug in trial.counts.differed if slug in culprits]
        differed = (*struck, *wake)
        counts = Counts(
            checks=dict.fromkeys(compared, 100), mismatches=dict.fromkeys(differed, 1), differed=differed,
            complete=True, ranks=2, first_call_s=1.0,
        )  # fmt: skip
        return trial.model_copy(update={"counts": counts})


def repeat(oracle: Oracle, repeats: int, limits: Limits) -> dict[str, Any]:
    """Bisect simulated commands, one for each seed."""
    sites = sites_of(load_registry(), "dspark")
    trials, right = [], 0
    for seed in range(repeats):
        chance = random.Random(seed)
        bisection = Bisection(sites, limits)
        verdict = answer(bisection, partial(_run, oracle, chance))
        right += found_sets(verdict) == set(oracle.culprits)
        trials.append(len(bisection.knowledge.trials))
    return {"right": right, "of": repeats, "trials_mean": round(statistics.mean(trials), 1), "trials_max": max(trials)}


def _run(oracle: Oracle, chance: random.Random, number: int, planned: Next) -> Trial:
    return oracle.run(number, planned.off, planned.audited, chance)


def repeat_halving(oracle: Oracle, repeats: int) -> dict[str, Any]:
    sites = sites_of(load_registry(), "dspark")
    ends = [halve(sites, oracle, seed) for seed in range(repeats)]
    return {
        "right": sum(found == set(oracle.culprits) for found, _ in ends),
        "of": repeats,
        "trials_mean": round(statistics.mean(runs for _, runs in ends), 1),
    }


def simulate_all(repeats: int, demo: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Every scenario: by exit codes alone, with counts, with counts as the demo's, and plain halving."""
    results = {}
    for name, oracle in SCENARIOS.items():
        entry = {
            "exit codes alone": repeat(oracle, repeats, limits),
            "with counts": repeat(replace(oracle, counted=True), repeats, limits),
            "plain halving": repeat_halving(oracle, repeats),
        }
        if name in demo:
            case = DEMO[name]
            drawn = Drawn(case.culprits, case.rate, counted=True, records=tuple(demo[name]["record"]))
            entry["with the demo's counts"] = repeat(drawn, repeats, limits)
        results[name] = entry
        print(name, json.dumps(entry), file=sys.stderr, flush=True)
    return results


def table(results: dict[str, Any]) -> str:
    """The table of docs/bisect.md."""
    kinds = ("exit codes alone", "with counts", "with the demo's counts", "plain halving")
    lines = [
        f"| scenario | {' | '.join(kinds)} | on the demo's ranks |",
        f"| --- |{' --- |' * (len(kinds) + 1)}",
    ]
    for name, entry in results["simulated"].items():
        cells = [
            f"{entry[kind]['right']} of {entry[kind]['of']} right, {entry[kind]['trials_mean']:.0f} runs"
            if kind in entry
            else "-"
            for kind in kinds
        ]
        real = results.get("demo", {}).get(name)
        shown = f"{'right' if real['right'] else 'WRONG'}, {real['trials']} runs" if real else "-"
        lines.append(f"| {name} | {' | '.join(cells)} | {shown} |")
    return "\n".join(lines)


def _written(results: dict[str, Any]) -> str:
    """JSON with a trial on each line."""
    records = {name: entry["record"] for name, entry in results.get("demo", {}).items()}
    shown = {name: {**entry, "record": f"@{name}@"} for name, entry in results.get("demo", {}).items()}
    text = json.dumps({**results, **({"demo": shown} if shown else {})}, indent=1)
    for name, trials in records.items():
        lines = ",\n".join(f"    {json.dumps(trial)}" for trial in trials)
        text = text.replace(f'"@{name}@"', f"[\n{lines}\n   ]")
    return text + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", choices=DEMO, help="bisect the demo's engine in this scenario")
    parser.add_argument("--repeats", type=int, help="simulate so many repetitions of every scenario")
    parser.add_argument("--table", type=Path, help="print this file's table")
    parser.add_argument("--out", type=Path, help="add the results to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--confidence", type=float, default=0.99)
    given = parser.parse_args(arguments)
    if given.table:
        print(table(json.loads(given.table.read_text())))
        return
    results = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    limits = Limits(given.confidence, given.runs)
    if given.demo:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SPECSYNC_STATS_DIR"] = f"{folder}/stats"
            results.setdefault("demo", {})[given.demo] = run_demo(given.demo, given.seed, limits)
    if given.repeats:
        results["date"] = time.strftime("%Y-%m-%d")
        results["limits"] = {"confidence": limits.confidence, "runs": limits.runs}
        results["simulated"] = simulate_all(given.repeats, results.get("demo", {}), limits)
    if given.out:
        given.out.write_text(_written(results))


if __name__ == "__main__":
    main()
