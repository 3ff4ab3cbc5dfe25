"""A decode step with and without sync, in alternating runs of the engine, and what leading saves the other ranks.

    python -m tests.engines.vllm.overhead --runs 3 --date 2026-11-30

Prints a line for each run and writes ``benchmarks/results/vllm-overhead-DATE.json``. On CPU a broadcast costs more, and
a step far more, than on the GPUs that people serve with: the ratios hold for the machine that the file names. Steps of
the tiny models of the tests take 4 ms, most of it Python; those of ``wide`` what its weights take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.engines.vllm.environment import HERE, NEWEST, ROOT, environment, models_path
from tests.engines.vllm.matrix import SETUPS
from tests.engines.vllm.serving import Run, Setup, serve

WARM_UP, ROUNDS = 2, 12
COMPILING = 5
"""The first look-ups and steps, which compile what they run."""
DECODE_TOKENS = 64
"""A step that is fed more has a prefill in it. How prefills are cut depends on when requests arrive, which moves a
round's tokens per second by a fifth, and a shape that is new compiles for a third of a second."""
ROWS = "all,-vllm-draft-lead"
WIDE = ", wide"
"""Of a setup that serves the larger target."""
AGAIN = "off once more"
"""As ``off``: its ratio says how far two equal engines lie apart."""
POLICIES = {
    "V1, eagle": ("off", "all", AGAIN),
    "V1, ngram": ("off", "all", AGAIN, ROWS),
    "V1, suffix": ("off", "all", AGAIN, ROWS),
    f"V1, ngram{WIDE}": ("off", "all", AGAIN),
    f"V1, suffix{WIDE}": ("off", "all", AGAIN),
}
LONG = {"max_len": 1024, "prompt_times": 16}
"""Prompts of about 400 tokens, so that there is something to look up in."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3, help="runs of each policy, in turns")
    parser.add_argument("--date", type=date.fromisoformat, default=date.today())
    parser.add_argument("--setup", action="append", choices=list(POLICIES), help="default: all")
    given = parser.parse_args()
    speeds, steps, lookups = {}, {}, {}
    for name in given.setup or POLICIES:
        policies = POLICIES[name]
        found: dict[str, list[Run]] = {policy: [] for policy in policies}
        for _ in range(given.runs):
            for policy in policies:
                run = serve(setup_of(name), policy.split()[0], [""] * (WARM_UP + ROUNDS), **LONG)
                assert run.ended, run.log[-4000:]
                found[policy].append(run)
                print(f"{name}, {policy}: {decode_ms(run):.2f} ms, {tokens_per_s(run):.1f} tokens/s", flush=True)
        speeds[name] = {policy: _summary([tokens_per_s(run) for run in runs]) for policy, runs in found.items()}
        steps[name] = {policy: _summary([decode_ms(run) for run in runs]) for policy, runs in found.items()}
        if ROWS in policies:
            lookups[name] = {policy: lookup_us(runs) for policy, runs in found.items()}
    kept = {
        **_origin(given.date, given.runs),
        "tokens_per_s": speeds,
        "decode_ms": steps,
        "lookup_us_per_step": lookups,
    }
    path = ROOT / "benchmarks" / "results" / f"vllm-overhead-{given.date}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def setup_of(name: str) -> Setup:
    """The setup of the tests, or the same with the larger target, which is made when it is absent."""
    setup = SETUPS[name.removesuffix(WIDE)]
    if not name.endswith(WIDE):
        return setup
    models = models_path(NEWEST)
    if not (models / "wide" / "model.safetensors").exists():
        python = str(environment(NEWEST).python)
        subprocess.run([python, str(HERE / "models.py"), str(models), "wide"], check=True)
    return replace(setup, target="wide")


def tokens_per_s(run: Run) -> float:
    return median(found.tokens_per_s for found in run.rounds[WARM_UP:])


def decode_ms(run: Run) -> float:
    """The median time from one decode step's begin to the next one's, on group rank 0."""
    begun = run.stats[0]["begun"]
    both = [(early, late) for early, late in pairwise(begun) if max(early[1], late[1]) <= DECODE_TOKENS]
    return median(late - early for (early, _), (late, _) in both[COMPILING:]) * 1e3


def lookup_us(runs: list[Run]) -> list[float]:
    """Time that a rank spends on looking drafts up, per step in which group rank 0 does: medians of runs, by rank."""
    shares = []
    for run in runs:
        steady = [worker["proposing_s"][COMPILING:] for worker in run.stats]
        shares.append([sum(of_rank) / len(steady[0]) * 1e6 for of_rank in steady])
    return [round(median(of_rank), 1) for of_rank in zip(*shares, strict=True)]


def all_reduce() -> str:
    """What vLLM's CPU ranks reduce over on this processor: gloo makes a step several times as long."""
    return "shared memory (AVX-512)" if "avx512f" in Path("/proc/cpuinfo").read_text() else "gloo"


def _summary(runs: list[float]) -> dict[str, Any]:
    return {"median": round(median(runs), 3), "runs": [round(run, 3) for run in runs]}


def _origin(day: date, runs: int) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "command": f"python -m tests.engines.vllm.overhead --runs {runs}",
        "date": str(day),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, CPU only, vLLM's all-reduce over {all_reduce()}",
        "commit": commit.stdout.strip(),
        "vllm": NEWEST,
        "ranks": 2,
        "rounds_per_run": ROUNDS,
    }


if __name__ == "__main__":
    main()
