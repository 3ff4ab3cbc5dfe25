"""Tokens per second with and without sync, in alternating runs of the engine.

    python -m tests.engines.vllm.overhead --runs 3

Prints a line for each run, and the ratio of the medians for each setup. On CPU a broadcast costs more, and a step far
more, than on the GPUs that people serve with: the ratio is an upper bound of nothing but this machine.
"""

from __future__ import annotations

import argparse
from statistics import median

from tests.engines.vllm.serving import SETUPS, serve

WARM_UP, ROUNDS = 1, 6
POLICIES = ("off", "all")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs for each setup")
    parser.add_argument("--setup", action="append", choices=list(SETUPS), help="default: V1 with eagle and ngram")
    given = parser.parse_args()
    for name in given.setup or ["V1, eagle", "V1, ngram"]:
        speeds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for _ in range(given.runs):
            for policy in POLICIES:
                speeds[policy].append(_tokens_per_s(name, policy))
                print(f"{name}, {policy}: {speeds[policy][-1]:.1f} tokens/s", flush=True)
        off, on = (median(speeds[policy]) for policy in POLICIES)
        print(f"{name}: {on:.1f} with sync, {off:.1f} without, ratio {on / off:.3f}", flush=True)


def _tokens_per_s(name: str, policy: str) -> float:
    run = serve(SETUPS[name], policy, [""] * (WARM_UP + ROUNDS))
    assert run.ended, run.log[-4000:]
    warm = run.rounds[WARM_UP:]
    return median(sum(map(len, found.tokens)) / found.seconds for found in warm)


if __name__ == "__main__":
    main()
