"""The matrix: setups, their faults, and one run of each under a policy, kept for the table in the docs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal

from tests.engines.vllm.environment import NEWEST, OLDEST, environment
from tests.engines.vllm.serving import ASYNC, V2, Run, Setup, serve

HOT = "T=0.7"
GATE = "gate@4"
COUNT = "count@4"
FATAL = (GATE, COUNT)
"""Faults after which the ranks enter different collectives: without sync the round does not come to an end."""
EAGLE = {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NGRAM_GPU = NGRAM | {"method": "ngram_gpu"}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
DRAFT_MODEL = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}
EAGLE3 = {"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
DFLASH = {"method": "dflash", "model": "dflash", "num_speculative_tokens": 3}

VERDICTS = ("tok@4", "acc-1@4", "acc+1@4", "draft@4")
REJECTED = ("tok@4", "acc+1@4", "draft@4")
"""For drafts of which the target accepts none: there is nothing to take away."""
ROWS = ("tok@4", "acc-1@4", "draft@4", "draftlen@4")
COUNTED = ("tok@4", "acc-1@5", "acc+1@5", "draft@4", COUNT)
"""Where ranks trim what was scheduled to what is valid: whatever differs gives them other shapes in the next step."""
BRIEF = ("tok@2", "draft@2")
"""For the V2 runner under Triton's interpreter, which is slow."""
SEED = f"seed@all {HOT}"
SETUPS = {
    "V1, ngram": Setup(NGRAM, ROWS),
    "V1, ngram_gpu": Setup(NGRAM_GPU, COUNTED),
    "V1, suffix": Setup(SUFFIX, ROWS),
    "V1, draft_model": Setup(DRAFT_MODEL, VERDICTS),
    "V1, eagle": Setup(EAGLE, (*VERDICTS, GATE)),
    "V1, eagle3": Setup(EAGLE3, VERDICTS),
    "V1, mtp": Setup(MTP, VERDICTS, target="mimo"),
    "V1, dflash": Setup(DFLASH, REJECTED),
    "V1, async, eagle": Setup(EAGLE, (*VERDICTS, GATE), ASYNC),
    "V1, async, ngram_gpu": Setup(NGRAM_GPU, COUNTED, ASYNC),
    "V1, async, draft_model": Setup(DRAFT_MODEL, VERDICTS, ASYNC),
    "V1, async, eagle3": Setup(EAGLE3, VERDICTS, ASYNC),
    "V1, async, mtp": Setup(MTP, VERDICTS, ASYNC, target="mimo"),
    "V1, async, dflash": Setup(DFLASH, REJECTED, ASYNC),
    "V2, ngram": Setup(NGRAM, BRIEF, V2, tokens=8),
    "V2, draft_model": Setup(DRAFT_MODEL, BRIEF, V2, tokens=20),
    "V2, eagle3": Setup(EAGLE3, BRIEF, V2, target="deep", tokens=8),
    "V2, mtp": Setup(MTP, BRIEF, V2, target="mimo", tokens=8),
    "V2, dflash": Setup(DFLASH, BRIEF, V2, tokens=8),
    "V2, eagle": Setup(EAGLE, (*VERDICTS, SEED), V2, tokens=12),
    "V2, async, eagle": Setup(EAGLE, (*VERDICTS, SEED), V2 | ASYNC, tokens=12),
    "V2, async, draft_model": Setup(DRAFT_MODEL, BRIEF, V2 | ASYNC, tokens=20),
    "V2, async, eagle3": Setup(EAGLE3, BRIEF, V2 | ASYNC, target="deep", tokens=8),
    "V2, async, mtp": Setup(MTP, BRIEF, V2 | ASYNC, target="mimo", tokens=8),
    "V2, async, dflash": Setup(DFLASH, BRIEF, V2 | ASYNC, tokens=8),
}


@cache
def matrix_run(name: str, policy: str) -> Run:
    """Serve all rounds of a setup under a policy, in one engine; a fault that hangs only where it is healed."""
    setup = SETUPS[name]
    faults = [fault for fault in setup.faults if fault != SEED and (policy == "all" or fault not in FATAL)]
    last = [SEED] if SEED in setup.faults else []  # what it shifts stays shifted
    run = serve(setup, policy, ["", *faults, HOT, *last])
    if run.ended:
        keep(name, policy, run)
    return run


def results_path() -> Path:
    path = environment(NEWEST).path / "results"
    path.mkdir(exist_ok=True)
    return path


def keep(name: str, policy: str, run: Run) -> None:
    """Write a run down for `tests.engines.vllm.page`."""
    _write(name, policy.replace(":", "-"), {"setup": name, "policy": policy, "rounds": _summary(run)})


def keep_oldest(name: str, runs: dict[str, Run]) -> None:
    """Write runs of the oldest version down."""
    for policy, run in runs.items():
        setup = f"{OLDEST}: {name}"
        _write(
            f"{OLDEST}-{name}", policy.replace(":", "-"), {"setup": setup, "policy": policy, "rounds": _summary(run)}
        )


def _summary(run: Run) -> list[dict[str, object]]:
    clean = run.round("").tokens
    return [
        {
            "fault": found.fault,
            "steps": found.steps,
            "differing": found.differing,
            "decisions": found.decisions,
            "same": found.tokens == clean,
        }
        for found in run.rounds
    ]


def keep_fatal(name: str, fault: str, how: Literal["hung", "died"]) -> None:
    """Write down what became of the engine in a round with this fault and every site off."""
    _write(name, how, {"setup": name, "policy": "off", "rounds": [{"fault": fault, how: True}]})


def _write(name: str, what: str, kept: dict[str, object]) -> None:
    (results_path() / f"{name.replace(', ', '-')}-{what}.json").write_text(json.dumps(kept, indent=1))
