"""Run `engine.py` in an engine's environment, watch its ranks, and say how the run ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.engines.sglang.environment import HERE, python_of

QUIET_S = 10.0
"""A rank that is in another collective than its peer, and for so long, will not come out of it."""
LIMIT_S = 400.0
"""For a run of any kind; machines that run tests are often busy."""


@dataclass(frozen=True)
class Served:
    """One run of the engine."""

    rounds: tuple[list[list[int]], ...]
    """The tokens of each round that was finished, by prompt."""
    end: str
    """``finished``, ``died`` (before its last round), ``hung``, or ``late``: neither ended nor proven to hang."""
    parted: str | None
    """The first collective that the ranks did not enter alike; None where there is none, or nothing was traced."""
    log: str

    def __str__(self) -> str:
        return f"{self.end} after {len(self.rounds)} rounds; ranks part: {self.parted}\n{self.log[-5000:]}"


def serve(
    version: str, arguments: Mapping[str, object], options: Sequence[str], environ: Mapping[str, str], folder: Path
) -> Served:
    """Run the engine to its end, or until its ranks are proven to hang.

    Args:
        arguments: of the engine, beside those that every run has.
        options: of `engine.py`; ``--rounds`` comes last.
        folder: for the log, the traces of the ranks and the round's number; empty.
    """
    rounds = len(options) - 1 - list(options).index("--rounds")
    environ = os.environ | {
        "PYTHONPATH": f"{HERE / 'stubs'}:{HERE / 'shim'}",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all that is run
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
        "GLOO_SOCKET_IFNAME": "lo",
        "SHIM_ROUND": str(folder / "round"),
        **environ,
    }
    command = [str(python_of(version)), "engine.py", json.dumps(dict(arguments)), *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=HERE, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        end = watch(process, folder)
    finally:
        end_session(process)
    text = (folder / "log").read_text(errors="replace")
    lines = [line.removeprefix("ROUND ") for line in text.splitlines() if line.startswith("ROUND ")]
    finished = tuple(json.loads(line) for line in lines)
    end = "died" if end == "finished" and len(finished) < rounds else end
    return Served(finished, end, where_ranks_part(folder), text)


def watch(process: subprocess.Popen[bytes], folder: Path) -> str:
    started = time.monotonic()
    while time.monotonic() - started < LIMIT_S:
        if process.poll() is not None:
            return "finished"
        if stuck_s(folder) > QUIET_S and where_ranks_part(folder) and process.poll() is None:
            return "hung"
        time.sleep(0.5)
    return "late"


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End the engine and its schedulers, which this test started in a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stuck_s(folder: Path) -> float:
    """For how long some rank has been inside one collective."""
    inside = [path for path in traces(folder) if not path.read_text().endswith("\n")]
    return max((time.time() - path.stat().st_mtime for path in inside), default=0.0)


def where_ranks_part(folder: Path) -> str | None:
    """Name the first collective that the ranks did not enter alike; in agreement they enter the same ones, in order."""
    entered = [path.read_text().splitlines() for path in traces(folder)]
    if len(entered) < 2:
        return None
    for number, (first, second) in enumerate(zip(*entered, strict=False), 1):
        if first != second:
            return f"collective {number} is {first} on rank 0, and {second} on rank 1"
    return None


def traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*"))
