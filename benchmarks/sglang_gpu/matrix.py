"""SGLang on two GPUs with CUDA graphs: stock and specsync side by side, taking turns; results as JSON.

    PYTHONPATH=SITE python benchmarks/sglang_gpu/matrix.py OUT.json [--algorithms dspark,dflash,ngram,eagle]

SITE is where `unpack.sh` put the bundle. For each algorithm two engines live at once and serve rounds in turn, so that
both see the same machine; the ratio is that of the medians. Then both get the fault that hangs stock SGLang: one draw
more on rank 1. Runs end when their time is up, so a hang is a result, not the end of the matrix.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
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
VARIANTS = {"stock": {"SGLANG_PLUGINS": "specsync-bench-shim"}, "specsync": {"SPECSYNC_SITES": "all"}}
START_S, ROUND_S = 240.0, 60.0


class Engine:
    """One running engine, and what it answered."""

    def __init__(self, algorithm: str, environ: dict[str, str], port: int, folder: Path) -> None:
        arguments = {**ALGORITHMS[algorithm], "port": port}
        stats = folder / "stats"
        stats.mkdir(parents=True)
        self.stats_folder, self.log = stats, folder / "log"
        paths = (HERE / "shim", HERE / "stubs", os.environ.get("PYTHONPATH", ""))
        self._log = self.log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve.py"), json.dumps(arguments), str(folder / "models")],
            env=os.environ
            | {
                "PYTHONPATH": ":".join(map(str, paths)),
                "SHIM_ALGORITHM": algorithm.upper(),
                "SHIM_STATS": str(stats),
                "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            }
            | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def ask(self, **wanted: Any) -> dict[str, Any] | None:
        """Serve one round; None when it did not end in time."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(wanted) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer(ROUND_S)

    def answer(self, limit_s: float) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + limit_s
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

    def stats(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.stats_folder.glob("rank-*.json"))]

    def end(self) -> str:
        """End this engine's own processes; return the end of its log."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        return self.log.read_text(errors="replace")[-1500:]


def measure(algorithm: str, batches: list[int], rounds: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Stock and specsync in turn, each batch size and temperature."""
    engines = {
        name: Engine(algorithm, {**environ, "SHIM_DRAW_STEP": "0"}, 31000 + 1500 * index, folder / name)
        for index, (name, environ) in enumerate(VARIANTS.items())
    }
    started = {name: engine.answer(START_S) for name, engine in engines.items()}
    result: dict[str, Any] = {"started": started, "runs": []}
    if all(started.values()):
        for temperature in (0.0, 1.0):
            for batch in batches:
                wanted = {"batch": batch, "tokens": tokens, "temperature": temperature}
                result["runs"].append(take_turns(engines, wanted, rounds))
        engines["specsync"].ask(batch=1, tokens=2, temperature=0.0)  # one more prefill writes the counters
        result["ranks"] = engines["specsync"].stats()
    result["logs"] = {name: log for name, engine in engines.items() if (log := engine.end()) and not started[name]}
    return result


def take_turns(engines: dict[str, Engine], wanted: dict[str, Any], rounds: int) -> dict[str, Any]:
    for engine in engines.values():
        engine.ask(**wanted)  # compiles, and fills what is empty
    answers: dict[str, list[dict[str, Any] | None]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name in sorted(engines, reverse=bool(turn % 2)):
            answers[name].append(engines[name].ask(**wanted))
    speeds = {name: [each["tokens_per_s"] for each in given if each] for name, given in answers.items()}
    complete = all(len(found) == rounds for found in speeds.values())
    ratio = median(speeds["specsync"]) / median(speeds["stock"]) if complete else None
    digests = {name: [each and each["digest"] for each in given] for name, given in answers.items()}
    return {**wanted, "tokens_per_s": speeds, "ratio": ratio, "digests": digests}


def fault(algorithm: str, tokens: int, folder: Path) -> dict[str, Any]:
    """One extra draw on rank 1: what each variant makes of it, against specsync's own run without the fault."""
    runs = {"clean": ("specsync", "0"), "specsync": ("specsync", "60"), "stock": ("stock", "60")}
    result: dict[str, Any] = {}
    for index, (name, (variant, step)) in enumerate(runs.items()):
        engine = Engine(algorithm, {**VARIANTS[variant], "SHIM_DRAW_STEP": step}, 36000 + 1500 * index, folder / name)
        started = engine.answer(START_S)
        rounds = [engine.ask(batch=8, tokens=tokens, temperature=1.0) for _ in range(4)] if started else []
        engine.ask(batch=1, tokens=2, temperature=0.0) if all(rounds) else None
        digests = [each and each["digest"] for each in rounds]
        result[name] = {"started": bool(started), "digests": digests, "hung": not all(rounds), "ranks": engine.stats()}
        log = engine.end()
        if not started:
            result[name]["log"] = log
    result["healed"] = bool(result["clean"]["digests"]) and result["clean"]["digests"] == result["specsync"]["digests"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--algorithms", default="dspark,dflash,ngram,eagle")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--parts", default="measure,fault")
    options = parser.parse_args()
    results: dict[str, Any] = {"engine": "sglang 0.5.17", "machine": machine(), "algorithms": {}}
    batches = [int(batch) for batch in options.batches.split(",")]
    for algorithm in options.algorithms.split(","):
        found = results["algorithms"][algorithm] = {}
        with tempfile.TemporaryDirectory() as folder:
            if "measure" in options.parts:
                found["measure"] = measure(algorithm, batches, options.rounds, options.tokens, Path(folder) / "measure")
            if "fault" in options.parts and algorithm == "dspark":
                found["fault"] = fault(algorithm, options.tokens, Path(folder) / "fault")
        options.output.write_text(json.dumps(results, indent=1))  # after each: a later one may run out of time
        print(f"{algorithm}: {json.dumps(summary(found))}", flush=True)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    runs = found.get("measure", {}).get("runs", [])
    ratios = {f"T={run['temperature']:g} batch {run['batch']}": run["ratio"] for run in runs}
    return {"ratios": ratios, "healed": found.get("fault", {}).get("healed")}


def machine() -> str:
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
