"""Tokens per second with and without sync, in alternating runs of the engine, and what leading saves the other ranks.

    python -m tests.engines.vllm.overhead --runs 3 --date 2026-11-30

Prints a line for each run and writes ``benchmarks/results/vllm-overhead-DATE.json``. On CPU a broadcast costs more, and
a step far more, than on the GPUs that people serve with: the ratios hold for the machine that the file names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from datetime import date
from statistics import median
from typing import Any

from tests.engines.vllm.environment import NEWEST, ROOT
from tests.engines.vllm.matrix import SETUPS
from tests.engines.vllm.serving import Run, serve

WARM_UP, ROUNDS = 1, 4
COMPILING = 5
"""The first look-ups, which compile what they run."""
ROWS = "all,-vllm-draft-lead"
POLICIES = {
    "V1, eagle": ("off", "all"),
    "V1, ngram": ("off", "all", ROWS),
    "V1, suffix": ("off", "all", ROWS),
}
LONG = {"max_len": 1024, "prompt_times": 16}
"""Prompts of about 400 tokens, so that there is something to look up in."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3, help="runs of each policy, in turns")
    parser.add_argument("--date", type=date.fromisoformat, default=date.today())
    parser.add_argument("--setup", action="append", choices=list(POLICIES), help="default: all")
    given = parser.parse_args()
    speeds, lookups = {}, {}
    for name in given.setup or POLICIES:
        policies = POLICIES[name]
        found: dict[str, list[Run]] = {policy: [] for policy in policies}
        for _ in range(given.runs):
            for policy in policies:
                run = serve(SETUPS[name], policy, [""] * (WARM_UP + ROUNDS), **LONG)
                assert run.ended, run.log[-4000:]
                found[policy].append(run)
                print(f"{name}, {policy}: {tokens_per_s(run):.1f} tokens/s", flush=True)
        speeds[name] = {policy: _summary([tokens_per_s(run) for run in runs]) for policy, runs in found.items()}
        if ROWS in policies:
            lookups[name] = {policy: lookup_us(runs) for policy, runs in found.items()}
    kept = {**_origin(given.date, given.runs), "tokens_per_s": speeds, "lookup_us_per_step": lookups}
    path = ROOT / "benchmarks" / "results" / f"vllm-overhead-{given.date}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def tokens_per_s(run: Run) -> float:
    return median(found.tokens_per_s for found in run.rounds[WARM_UP:])


def lookup_us(runs: list[Run]) -> list[float]:
    """Time that a rank spends on looking drafts up, per step in which group rank 0 does: medians of runs, by rank."""
    shares = []
    for run in runs:
        steady = [worker["proposing_s"][COMPILING:] for worker in run.stats]
        shares.append([sum(of_rank) / len(steady[0]) * 1e6 for of_rank in steady])
    return [round(median(of_rank), 1) for of_rank in zip(*shares, strict=True)]


def _summary(runs: list[float]) -> dict[str, Any]:
    return {"median": round(median(runs), 2), "runs": [round(run, 2) for run in runs]}


def _origin(day: date, runs: int) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "command": f"python -m tests.engines.vllm.overhead --runs {runs}",
        "date": str(day),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, CPU only",
        "commit": commit.stdout.strip(),
        "vllm": NEWEST,
        "ranks": 2,
        "rounds_per_run": ROUNDS,
    }


if __name__ == "__main__":
    main()
