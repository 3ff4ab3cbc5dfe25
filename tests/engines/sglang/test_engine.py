"""The real engine on two CPU ranks, rank 1 skewed: a deadlock or wrong text without specsync, right text with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cache

import pytest

from tests.engines.sglang.environment import HERE, is_built, python_of

VERSION = "0.5.17"
START_S = 400.0
"""Time that a run that works may take; machines that run tests are often busy."""


@dataclass(frozen=True)
class Served:
    """One run of the engine."""

    rounds: tuple[str, ...]
    """The tokens of each round, as JSON."""
    seconds: float
    ended: bool
    """False: it was still running when its time was up, and was killed."""
    log: str


@dataclass(frozen=True)
class Setup:
    arguments: tuple[tuple[str, object], ...]
    temperature: float = 0.0
    tokens: int = 24
    rounds: int = 2


NGRAM = (
    ("speculative_algorithm", "NGRAM"),
    ("speculative_num_draft_tokens", 4),
    ("speculative_ngram_max_bfs_breadth", 1),
    ("speculative_ngram_min_bfs_breadth", 1),
)
DSPARK = (("speculative_algorithm", "DSPARK"), ("speculative_draft_model_path", "dspark"))
DFLASH = (
    ("speculative_algorithm", "DFLASH"),
    ("speculative_draft_model_path", "dflash"),
    ("dtype", "bfloat16"),
)
EAGLE = (
    ("speculative_algorithm", "EAGLE"),
    ("speculative_draft_model_path", "eagle"),
    ("speculative_num_steps", 3),
    ("speculative_eagle_topk", 2),
    ("speculative_num_draft_tokens", 6),
    ("speculative_draft_attention_backend", "torch_native"),
)
SETUPS = {
    "ngram": Setup(NGRAM),
    "dspark, T=0": Setup(DSPARK),
    "dspark, T=1": Setup(DSPARK, temperature=1.0),
    "dflash": Setup(DFLASH),
    "eagle": Setup(EAGLE, tokens=12, rounds=1),  # the interpreter is slow on trees
}
each = pytest.mark.parametrize("name", SETUPS)
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_built(VERSION), reason=f"no environment of sglang {VERSION}: run `make test-engines`"),
]


def serve(setup: Setup, *, policy: str | None, skew: float, limit_s: float) -> Served:
    """Run the engine. ``policy`` None leaves the plugin out; ``skew`` is in standard deviations of rank 1's logits."""
    environ = os.environ | {
        "PYTHONPATH": f"{HERE / 'stubs'}:{HERE / 'shim'}",
        "TRITON_INTERPRET": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
        "GLOO_SOCKET_IFNAME": "lo",
        "SHIM_SKEW": str(skew),
        **({"SGLANG_PLUGINS": "specsync-test-shim"} if policy is None else {"SPECSYNC_SITES": policy}),
    }
    options = [f"--{key}={getattr(setup, key)}" for key in ("rounds", "tokens", "temperature")]
    command = [str(python_of(VERSION)), "engine.py", json.dumps(dict(setup.arguments)), *options]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=HERE,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=limit_s)
        ended = True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its schedulers, too: this test started them all
        log, _ = process.communicate()
        ended = False
    rounds = tuple(line.removeprefix("ROUND ") for line in log.splitlines() if line.startswith("ROUND "))
    return Served(rounds, time.monotonic() - started, ended, log)


@cache
def clean(name: str) -> Served:
    served = serve(SETUPS[name], policy=None, skew=0.0, limit_s=START_S)
    assert len(served.rounds) == SETUPS[name].rounds, served.log[-4000:]
    return served


@each
def test_without_specsync_the_skewed_engine_hangs_or_answers_wrongly(name, record_property):
    right = clean(name)
    skewed = serve(SETUPS[name], policy=None, skew=1.5, limit_s=2 * right.seconds + 20)
    what = "wrong text" if skewed.ended else f"hung after {len(skewed.rounds)} rounds"
    record_property("setup", name)
    record_property("without specsync", what)
    assert skewed.rounds != right.rounds


@each
def test_with_specsync_the_skewed_engine_gives_the_clean_runs_tokens(name, record_property):
    right = clean(name)
    healed = serve(SETUPS[name], policy="all", skew=1.5, limit_s=START_S)
    assert healed.rounds == right.rounds, healed.log[-4000:]
    record_property("setup", name)
    record_property("with specsync", "tokens of the clean run")
    assert "hooks proven on 2 ranks" in healed.log
