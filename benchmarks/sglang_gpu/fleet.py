"""Engines side by side on one machine: started together, they serve in turns while the others are stopped."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dspark": {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "dspark"},
    "dflash": {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "dflash"},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
    "eagle": {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": "eagle",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
}
LOG_END = 3000


class Engine:
    """One running engine, and what it answered.

    Args:
        name: of its folder and log.
        algorithm: key of `ALGORITHMS`.
        environ: what this variant sets.
        port: first of the ports that it may take.
        folder: of logs, models and counters.
        shape: of the models: ``size``, a key of ``SIZES`` in `serve.py`, and ``layers``, which may be None.
    """

    def __init__(
        self, name: str, algorithm: str, environ: dict[str, str], port: int, folder: Path, shape: dict[str, Any]
    ) -> None:
        self.name = name
        home = folder / name
        self._stats = home / "stats"
        self._stats.mkdir(parents=True)
        self._log_path = folder / f"{name}.log"
        self._log = self._log_path.open("w")
        paths = (HERE / "shim", HERE / "stubs", os.environ.get("PYTHONPATH", ""))
        given = {**ALGORITHMS[algorithm], "port": port, "shape": shape}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve.py"), json.dumps(given), str(home)],
            env=os.environ
            | {
                "PYTHONPATH": ":".join(map(str, paths)),
                "SHIM_ALGORITHM": algorithm.upper(),
                "SHIM_STATS": str(self._stats),
                "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            }
            | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.started: dict[str, Any] | None = None

    def wait_ready(self, deadline: float) -> bool:
        self.started = self._answer(deadline)
        return self.started is not None

    def ask(self, limit_s: float, **wanted: Any) -> dict[str, Any] | None:
        """Serve one round; None when it did not end within ``limit_s``, or the engine has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(wanted) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._answer(time.monotonic() + limit_s)

    def _answer(self, deadline: float) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0 and selector.select(left):
                line = self.process.stdout.readline()
                if line.startswith("ANSWER "):
                    return dict(json.loads(line.removeprefix("ANSWER ")))
                if not line:
                    return None
                self._log.write(line)
        return None

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def counters(self) -> list[dict[str, Any]]:
        """What each rank counted by its latest prefill."""
        return [json.loads(path.read_text()) for path in sorted(self._stats.glob("rank-*.json"))]

    def log_end(self) -> str:
        self._log.flush()
        return self._log_path.read_text(errors="replace")[-LOG_END:]

    def end(self) -> None:
        """End this engine's processes, all of which it started itself."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._log.close()


class Fleet:
    """Engines by name; `turn` lets one or some of them run and stops the others."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = {engine.name: engine for engine in engines}

    def wait_ready(self, deadline: float) -> None:
        for engine in self.engines.values():
            ready = engine.wait_ready(deadline)
            print(f"{engine.name}: {engine.started if ready else 'did not start'}", flush=True)
            if not ready:
                print(engine.log_end(), flush=True)

    def turn(self, *names: str) -> list[Engine]:
        for engine in self.engines.values():
            engine.signal(signal.SIGCONT if engine.name in names else signal.SIGSTOP)
        return [self.engines[name] for name in names]

    def end(self, prefix: str = "") -> None:
        """End the engines whose names begin so."""
        for name in [name for name in self.engines if name.startswith(prefix)]:
            self.engines.pop(name).end()
