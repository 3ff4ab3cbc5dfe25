"""Does `specsync bisect` find the right sets, and in how many runs? On the demo's engine, with injected faults.

    python -m benchmarks.bisect_trials --repeats 100 --out FILE.json          # ranks as threads, beside plain halving
    python -m benchmarks.bisect_trials --demo "one culprit" --out FILE.json   # ranks as processes, once
    python -m benchmarks.bisect_trials --simulate 100 --out FILE.json         # exit codes alone, of simulated commands
    python -m benchmarks.bisect_trials --table FILE.json                      # the table in docs/bisect.md

Every trial of ``--repeats`` and ``--demo`` is a run of the engine under the policy that the bisection asks for, and its
counts are what the ranks wrote. Each repetition has weights, prompts, and faults of its own, drawn from its seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from specsync_core.bisect.core import Bisection, Next
from specsync_core.bisect.evidence import read_evidence
from specsync_core.bisect.search import Limits
from specsync_core.bisect.trials import Trial, policy_of
from specsync_core.demo.config import Job, ModelConfig, World
from specsync_core.manager import load_registry
from tests.unit.bisect.oracles import SCENARIOS, A, B, answer, found_sets, halve, simulated, sites_of

ACCEPT_FAULT = f"{A}:rank=1:step=4:add=1"
TARGET_FAULT = "dspark-target:rank=1:step=0:index=0:add=1"
DRAFT_FAULT = f"{B}:rank=1:from=3:add=1"
STEPS = 12

DRAWN_ACCEPT = f"{A}:rank={{rank}}:step=0:tensor=bonus:add={{add}}"
DRAWN_TARGET = "dspark-target:rank={other}:step=0:index={row}:add={add}"
DRAWN_DRAFT = f"{B}:rank={{rank}}:from=0:add={{add}}"
SMALL = ModelConfig(hidden=32, heads=4, layers=1, mlp=32)
SLOTS = 2


@dataclass(frozen=True)
class Case:
    """A scenario on the demo's engine: algorithm dspark, two ranks, greedy."""

    faults: str
    """On processes, in `STEPS` steps."""
    drawn: str
    """On threads, where a repetition draws a fault's rank, row and size."""
    culprits: tuple[frozenset[str], ...]
    rate: float = 1.0
    """How often a run gets the faults at all."""
    hangs_only: bool = False
    """Bad is a run that hangs or dies; else also one whose ranks end with different tokens."""
    steps: int = 1
    """On threads; as few as show the faults."""
    new_tokens: tuple[int, ...] = (24, 28)


ONE = (ACCEPT_FAULT, DRAWN_ACCEPT, (frozenset({A}),))
DEMO: dict[str, Case] = {
    "one culprit": Case(*ONE),
    "two independent culprits": Case(
        f"{ACCEPT_FAULT};{TARGET_FAULT}",
        f"{DRAWN_ACCEPT};{DRAWN_TARGET}",
        (frozenset({A}), frozenset({"dspark-target"})),
    ),
    "a pair that is only bad together": Case(
        DRAFT_FAULT, DRAWN_DRAFT, (frozenset({A, B}),), hangs_only=True, steps=2, new_tokens=(3,)
    ),
    "a culprit in 50% of the runs": Case(*ONE, rate=0.5),
    "a culprit in 10% of the runs": Case(*ONE, rate=0.1),
    "none": Case("", "", ()),
}


class Command:
    """The command of a bisection: one run of the demo's engine for each trial, bad where its faults show.

    Args:
        seed: of the coin that says whether a run gets the faults.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.coin = random.Random(seed)
        self.registry = load_registry()
        self._stats = Path(os.environ["SPECSYNC_STATS_DIR"])

    def run(self, number: int, planned: Next) -> Trial:
        return self.trial(number, planned, self.coin.random() < self.case.rate)

    def trial(self, number: int, planned: Next, struck: bool) -> Trial:
        shutil.rmtree(self._stats, ignore_errors=True)
        policy = policy_of(planned.off, (site.slug for site in self.registry.sites), planned.audited)
        began_s, began = time.time(), time.monotonic()
        outcome = self.outcome(policy, struck)
        bad = outcome in ("hung", "died") or (outcome == "ranks differ" and not self.case.hangs_only)
        return Trial(
            number=number, off=planned.off, audited=planned.audited, outcome="bad" if bad else "good", detail=outcome,
            seconds=round(time.monotonic() - began, 2),
            counts=read_evidence(self._stats, self.registry.sites, began_s).counts,
        )  # fmt: skip

    def outcome(self, policy: str, struck: bool) -> str:
        """Run the engine once; return `specsync_core.demo.runner.Ended.outcome`."""
        raise NotImplementedError


class OnProcesses(Command):
    """Ranks are forked from a server that has imported torch once."""

    def outcome(self, policy: str, struck: bool) -> str:
        from specsync_core.demo.once import run_once
        from specsync_core.demo.options import Options, prepare

        setup = prepare(Options(fault=self.case.faults if struck and self.case.faults else "none", steps=STEPS))
        return run_once(setup, policy, lambda what, done, total: None).outcome


class OnThreads(Command):
    """Ranks are threads. The seed draws the weights, the prompts and what the faults do."""

    def __init__(self, case: Case, seed: int) -> None:
        from benchmarks.demo_on_threads import ThreadEngine
        from specsync_core.demo.options import read_prompts

        super().__init__(case, seed)
        rank = self.coin.randrange(2)
        self.faults = case.drawn.format(
            rank=rank, other=self.coin.choice((rank, 1 - rank)), row=self.coin.randrange(SLOTS),
            add=self.coin.randint(1, 9),
        )  # fmt: skip
        prompts = tuple(prompt[:8] for prompt in self.coin.sample(read_prompts(None), SLOTS))
        self._engine = ThreadEngine(
            World(2, "cpu", seed, prompts, (), new_tokens=case.new_tokens, gamma=2, slots=SLOTS, config=SMALL)
        )

    def outcome(self, policy: str, struck: bool) -> str:
        faults = self.faults if struck else ""
        # What auto takes on the CPU after its self-test.
        job = Job("once", "dspark", policy, self.case.steps, fault=faults, transport="grouped", recorded=False)
        return self._engine.run(job).outcome


KINDS = ("bisect", "plain halving")


def repeat(name: str, repeats: int, limits: Limits, earlier: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Bisect on threads, and halve, until there are so many repetitions; yield all that was found after each.

    A seed whose faults do not show with all sites off is passed over: it is not the scenario's.

    Args:
        earlier: what an earlier call yielded last; its repetitions are not made again.
    """
    case, sites = DEMO[name], sites_of(load_registry(), "dspark")
    all_off = Next(frozenset(site.slug for site in sites), False, "")
    done = earlier or {"seeds": [], **{kind: {"runs": [], "wrong": {}} for kind in KINDS}}
    for seed in count(max(done["seeds"], default=-1) + 1):
        if len(done["seeds"]) >= repeats:
            return
        command = OnThreads(case, seed)
        if case.culprits and command.trial(1, all_off, struck=True).outcome == "good":
            continue
        bisection = Bisection(sites, limits)
        found = found_sets(answer(bisection, command.run))
        ends = (found, len(bisection.knowledge.trials)), halve(sites, command.run)
        for kind, (sets, runs) in zip(KINDS, ends, strict=True):
            done[kind]["runs"].append(runs)
            if sets != set(case.culprits):
                done[kind]["wrong"][str(seed)] = sorted(sorted(each) for each in sets)
        done["seeds"].append(seed)
        yield done


def simulate(name: str, repeats: int, limits: Limits) -> dict[str, Any]:
    """Bisect simulated commands that leave no counts, one for each seed."""
    oracle, sites = SCENARIOS[name], sites_of(load_registry(), "dspark")
    done: dict[str, Any] = {"runs": [], "wrong": {}}
    for seed in range(repeats):
        bisection = Bisection(sites, limits)
        sets = found_sets(answer(bisection, simulated(oracle, seed)))
        done["runs"].append(len(bisection.knowledge.trials))
        if sets != set(oracle.culprits):
            done["wrong"][str(seed)] = sorted(sorted(each) for each in sets)
    return done


def run_demo(name: str, seed: int, limits: Limits) -> dict[str, Any]:
    """Bisect the demo on processes once; returns what was found and every trial."""
    case = DEMO[name]
    bisection = Bisection(sites_of(load_registry(), "dspark"), limits)
    verdict = answer(bisection, OnProcesses(case, seed).run)
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


def table(results: dict[str, Any]) -> str:
    """The table of docs/bisect.md."""
    lines = [
        "| scenario | bisect | plain halving | bisect by exit codes alone, simulated | bisect on processes, once |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, entry in results["threads"].items():
        real = results["demo"][name]
        cells = [
            *(_cell(entry[kind]) for kind in KINDS),
            _cell(results["simulated"][name]),
            f"{'right' if real['right'] else 'WRONG'}, {real['trials']} runs",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(done: dict[str, Any]) -> str:
    runs = done["runs"]
    mean, median = statistics.mean(runs), statistics.median(runs)
    return f"{len(runs) - len(done['wrong'])} of {len(runs)} right, {mean:.0f} runs (median {median:.0f})"


def _written(results: dict[str, Any]) -> str:
    """JSON with a trial, or a list of numbers, on each line."""
    records = {name: entry["record"] for name, entry in results.get("demo", {}).items()}
    shown = {name: {**entry, "record": f"@{name}@"} for name, entry in results.get("demo", {}).items()}
    text = json.dumps({**results, **({"demo": shown} if shown else {})}, indent=1)
    text = re.sub(r"\[[\d\s,]+\]", lambda numbers: json.dumps(json.loads(numbers[0])), text)
    for name, trials in records.items():
        lines = ",\n".join(f"    {json.dumps(trial)}" for trial in trials)
        text = text.replace(f'"@{name}@"', f"[\n{lines}\n   ]")
    return text + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", choices=DEMO, help="bisect the demo on processes, once, in this scenario")
    parser.add_argument("--repeats", type=int, help="bisect the demo on threads until there are so many repetitions")
    parser.add_argument("--simulate", type=int, help="bisect simulated commands so often")
    parser.add_argument("--only", choices=DEMO, help="repeat and simulate in this scenario alone")
    parser.add_argument("--table", type=Path, help="print this file's table")
    parser.add_argument("--out", type=Path, help="add the results to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--confidence", type=float, default=0.99)
    given = parser.parse_args(arguments)
    if given.table:
        print(table(json.loads(given.table.read_text())))
        return
    logging.disable(logging.WARNING)  # each run would warn of its faults and of its policy
    limits = Limits(given.confidence, given.runs)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPECSYNC_STATS_DIR"] = f"{folder}/stats"
        for _ in _fill(results := _read(given.out), given, limits):
            if given.out:
                given.out.write_text(_written(results))


def _fill(results: dict[str, Any], given: argparse.Namespace, limits: Limits) -> Iterator[None]:
    """Add what was asked for; yields where there is something new."""
    names = [given.only] if given.only else list(DEMO)
    if given.demo:
        results.setdefault("demo", {})[given.demo] = run_demo(given.demo, given.seed, limits)
        yield
    for name in names if given.simulate else ():
        results.setdefault("simulated", {})[name] = simulate(name, given.simulate, limits)
        yield
    for name in names if given.repeats else ():
        threads = results.setdefault("threads", {})
        for done in repeat(name, given.repeats, limits, threads.get(name)):
            threads[name] = done
            print(f"{name}: {_cell(done['bisect'])}", file=sys.stderr)
            results["date"] = time.strftime("%Y-%m-%d")
            results["limits"] = {"confidence": limits.confidence, "runs": limits.runs}
            yield


def _read(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path and path.exists() else {}


if __name__ == "__main__":
    main()
