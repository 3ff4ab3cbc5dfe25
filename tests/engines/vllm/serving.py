"""Run the real engine on two CPU ranks, round after round, and read what it said."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.engines.vllm.environment import HERE, NEWEST, environment, models_path

LIMIT_S = 600.0
"""Time that a run may take; machines that run tests are often busy."""
HANG_S = 60.0
"""Silence in a round that counts as a hang; a round of the size used here takes a few seconds, in the V2 runner ten."""
V2 = {"SHIM_TRITON_INTERPRETER": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
ASYNC = {"SHIM_ASYNC": "1"}


@dataclass(frozen=True)
class Setup:
    speculation: dict[str, Any]
    faults: tuple[str, ...]
    """Rounds with a fault."""
    variables: dict[str, str] = field(default_factory=dict)
    target: str = "target"
    tokens: int = 24

    @property
    def is_v2(self) -> bool:
        return V2.items() <= self.variables.items()


@dataclass(frozen=True)
class Round:
    fault: str
    tokens: list[list[int]]
    seconds: float
    steps: int
    differing: int
    """Steps in which the two ranks' models were fed different tokens or positions."""
    decisions: int
    """Calls at specsync's sites in which rank 1 differed: healed under sync, only counted under audit."""

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


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

    def mismatched_calls(self, site: str) -> int:
        return sum(worker["stats"].get(site, {}).get("mismatched_calls", 0) for worker in self.stats)


def serve(
    setup: Setup,
    policy: str,
    rounds: Sequence[str],
    *,
    version: str = NEWEST,
    fork: bool = True,
    max_len: int = 512,
    prompt_times: int = 1,
    hang_s: float = HANG_S,
    **variables: str,
) -> Run:
    """Start the engine, serve, and end it.

    Args:
        fork: start it from a process that has imported the engine already.
        prompt_times: how often each prompt is repeated.
        hang_s: silence in a round that counts as a hang.
    """
    own = {"SPECSYNC_SITES": policy, "SPECSYNC_TIMEOUT_S": "120", **setup.variables, **variables}
    job = {
        "model": str(models_path(version) / setup.target),
        "speculation": _with_paths(setup.speculation, models_path(version)),
        "rounds": list(rounds),
        "tokens": setup.tokens,
        "max_len": max_len,
        "prompt_times": prompt_times,
        "environ": own,
        "log": str(environment(version).path / "last.log"),
    }
    log = Path(job["log"])
    log.unlink(missing_ok=True)
    started = time.monotonic()
    if fork:
        group, lives = _forked(version, setup.is_v2, job)
    else:
        group, lives = _started(version, own, job)
    try:
        ended = _wait(lives, log, hang_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)  # its workers, too: all of them were started here
        while lives():
            time.sleep(0.05)
    return parse(log.read_text(), ended, time.monotonic() - started)


def _with_paths(speculation: dict[str, Any], models: Path) -> dict[str, Any]:
    """The heads and draft models are sharded as the target is."""
    model = {"model": str(models / speculation["model"])} if "model" in speculation else {}
    looks_up = speculation["method"] in ("ngram", "ngram_gpu", "suffix")
    return speculation | model | ({} if looks_up else {"draft_tensor_parallel_size": 2})


def environ_of(version: str) -> dict[str, str]:
    """The environment variables of an engine on two CPU ranks."""
    return os.environ | {
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
        "PATH": f"{environment(version).path / 'bin'}:{os.environ['PATH']}",
    }


Lives = Callable[[], bool]
"""Asks whether the engine's process is there; one that has ended is reaped."""


def _started(version: str, own: dict[str, str], job: dict[str, Any]) -> tuple[int, Lives]:
    with Path(job["log"]).open("w") as sink:
        process = subprocess.Popen(
            [str(environment(version).python), "engine.py", json.dumps(job)],
            cwd=HERE,
            env=environ_of(version) | own,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process.pid, lambda: process.poll() is None


def _forked(version: str, is_v2: bool, job: dict[str, Any]) -> tuple[int, Lives]:
    server = _server(version, is_v2)
    assert server.stdin is not None
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    pid = _answer(server, "FORKED")
    return pid, lambda: Path(f"/proc/{pid}").exists()


@cache
def _server(version: str, is_v2: bool) -> subprocess.Popen[str]:
    """The process that has imported the engine; it ends when the tests do."""
    with (environment(version).path / "server.log").open("w") as sink:
        server = subprocess.Popen(
            [str(environment(version).python), "engine.py", "--serve"],
            cwd=HERE,
            env=environ_of(version) | (V2 if is_v2 else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
        )
    atexit.register(server.kill)
    _answer(server, "READY")
    return server


def _answer(server: subprocess.Popen[str], word: str) -> int:
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith(f"{word} "):
            return int(line.split()[1])
    raise AssertionError(f"the engine's server ended before it said {word}: see server.log in its environment")


def _wait(lives: Lives, log: Path, hang_s: float) -> bool:
    """True when the engine said all that it has to say, or ended by itself; it takes long to shut down."""
    deadline = time.monotonic() + LIMIT_S
    seen, since = 0, time.monotonic()
    while lives():
        text = log.read_text() if log.exists() else ""
        if "\nACCEPTED " in text:
            return True
        if len(text) != seen or "\nROUND " not in text:
            seen, since = len(text), time.monotonic()
        if time.monotonic() > deadline or time.monotonic() - since > hang_s:
            return False
        time.sleep(0.2)
    return True


def parse(log: str, ended: bool, seconds: float) -> Run:
    """Read what the engine's script printed."""
    said: dict[str, list[Any]] = {"ROUND": [], "STATS": []}
    for line in log.splitlines():
        word, _, rest = line.partition(" ")
        if word in said:
            said[word].append(json.loads(rest))
    return Run(tuple(Round(**values) for values in said["ROUND"]), *(said["STATS"] or [[]]), ended, seconds, log)
