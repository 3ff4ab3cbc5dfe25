"""Run the real engine on two CPU ranks, round after round, and keep what came of it for the table in the docs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.engines.vllm.environment import HERE, environment_path, models_path, python_of

VERSION = "0.32.0"
LIMIT_S = 600.0
"""Time that a run may take; machines that run tests are often busy."""
HANG_S = 60.0
"""Silence in a round that counts as a hang; a round of the size used here takes a few seconds."""
HOT = "T=0.7"

EAGLE = {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFT_MODEL = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}
EAGLE3 = {"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 3}
DFLASH = {"method": "dflash", "model": "dflash", "num_speculative_tokens": 3}
V2 = {"SHIM_TRITON_INTERPRETER": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
ASYNC = {"SHIM_ASYNC": "1"}


@dataclass(frozen=True)
class Setup:
    speculation: dict[str, Any]
    faults: tuple[str, ...]
    """Rounds with a fault, greedy; a clean one comes before, one at `HOT` after."""
    variables: tuple[tuple[str, str], ...] = ()


VERDICTS = ("tok@4", "acc-1@4", "acc+1@4", "draft@4")
SETUPS = {
    "V1, eagle": Setup(EAGLE, (*VERDICTS, "gate@4")),
    "V1, ngram": Setup(NGRAM, ("tok@4", "acc-1@4", "draft@4", "draftlen@4")),
    "V1, draft_model": Setup(DRAFT_MODEL, VERDICTS),
    "V1, eagle3": Setup(EAGLE3, VERDICTS),
    "V1, dflash": Setup(DFLASH, VERDICTS),
    "V1, async, eagle": Setup(EAGLE, VERDICTS, tuple(ASYNC.items())),
    "V2, eagle": Setup(EAGLE, ("tok@4", "acc-1@4", "draft@4", "seed@all"), tuple(V2.items())),
}


@dataclass(frozen=True)
class Round:
    fault: str
    tokens: list[list[int]]
    seconds: float
    steps: int
    differing: int
    """Steps in which the two ranks' models were fed different tokens or positions."""


@dataclass(frozen=True)
class Run:
    rounds: tuple[Round, ...]
    stats: list[dict[str, Any]]
    """What each worker counted, by rank."""
    ended: bool
    """False: it hung, or its time was up, and it was killed."""
    seconds: float
    log: str

    def round(self, fault: str) -> Round:
        return next(found for found in self.rounds if found.fault == fault)

    def count(self, name: str) -> int:
        """Sum one of `SiteStats`' numbers over sites and ranks."""
        return sum(site[name] for worker in self.stats for site in worker["stats"].values())


@cache
def matrix_run(name: str, policy: str) -> Run:
    """Serve all rounds of a setup under a policy, in one engine; a fault that hangs only where it is healed."""
    setup = SETUPS[name]
    faults = [fault for fault in setup.faults if policy == "all" or not fault.startswith("gate")]
    run = serve(setup, policy, ["", *faults, HOT])
    if run.ended:
        keep(name, policy, run)
    return run


def serve(setup: Setup, policy: str, rounds: Sequence[str], **variables: str) -> Run:
    """Start the engine, serve, and end it."""
    environ = os.environ | {
        "PYTHONPATH": str(HERE / "shim"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
        "TORCHDYNAMO_DISABLE": "1",  # the models are tiny: compiling takes longer than running
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "SPECSYNC_SITES": policy,
        "SPECSYNC_TIMEOUT_S": "120",
        **dict(setup.variables),
        **variables,
    }
    command = [str(python_of(VERSION)), "engine.py", str(models_path(VERSION)), json.dumps(setup.speculation)]
    log = environment_path(VERSION) / "last.log"
    started = time.monotonic()
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, "--rounds", json.dumps(list(rounds))],
            cwd=HERE,
            env=environ,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = _wait(process, log)
        finally:
            _kill(process)
    return parse(log.read_text(), ended, time.monotonic() - started)


def _wait(process: subprocess.Popen[bytes], log: Path) -> bool:
    """True when the engine said all that it has to say, or ended by itself; it takes long to shut down."""
    deadline = time.monotonic() + LIMIT_S
    seen, since = 0, time.monotonic()
    while process.poll() is None:
        text = log.read_text()
        if "\nACCEPTED " in text:
            return True
        if len(text) != seen or "\nROUND " not in text:
            seen, since = len(text), time.monotonic()
        if time.monotonic() > deadline or time.monotonic() - since > HANG_S:
            return False
        time.sleep(0.5)
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its workers, too: this test started them all
    process.wait()


def parse(log: str, ended: bool, seconds: float) -> Run:
    """Read what the engine's script printed."""
    said: dict[str, list[Any]] = {"ROUND": [], "STATS": []}
    for line in log.splitlines():
        word, _, rest = line.partition(" ")
        if word in said:
            said[word].append(json.loads(rest))
    return Run(tuple(Round(**values) for values in said["ROUND"]), *(said["STATS"] or [[]]), ended, seconds, log)


def results_path() -> Path:
    return environment_path(VERSION) / "results"


def keep(name: str, policy: str, run: Run) -> None:
    """Write a run down for `tests.engines.vllm.table`."""
    results_path().mkdir(exist_ok=True)
    clean = run.round("").tokens
    rounds = [
        {
            "fault": found.fault,
            "steps": found.steps,
            "differing": found.differing,
            "same": found.tokens == clean,
            "tokens_per_s": sum(map(len, found.tokens)) / found.seconds,
        }
        for found in run.rounds
    ]
    kept = {"setup": name, "policy": policy, "rounds": rounds, "mismatched_calls": run.count("mismatched_calls")}
    file = results_path() / f"{name.replace(', ', '-')}-{policy.replace(':', '-')}.json"
    file.write_text(json.dumps(kept, indent=1))


def keep_hang(name: str, fault: str) -> None:
    """Write down that a round with this fault did not end with every site off."""
    results_path().mkdir(exist_ok=True)
    kept = {"setup": name, "policy": "off", "rounds": [{"fault": fault, "hung": True}]}
    (results_path() / f"{name.replace(', ', '-')}-hang.json").write_text(json.dumps(kept, indent=1))
