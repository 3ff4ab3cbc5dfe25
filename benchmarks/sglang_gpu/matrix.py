"""SGLang on two GPUs with CUDA graphs: stock and specsync side by side, taking turns; results as JSON.

    PYTHONPATH=SITE python benchmarks/sglang_gpu/matrix.py OUT [--algorithms dspark,dflash,ngram,eagle]

SITE is where `unpack.sh` put the bundle. For each algorithm two engines live at once and serve rounds in turn, so that
both see the same machine. Two ratios, above 1 where specsync is faster: the median of the turns' ratios of tokens per
second, and that of the medians of a step's time on rank 0, which a machine's hiccups move less. Then the algorithms of
``--faults`` get a rank 1 that goes astray (`FAULTS`), with and without specsync. Every wait has an end, so a hang is a
result, not the end of the matrix. OUT is a folder: ``matrix.json`` is written after each step, logs of the engines lie
beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fleet import ALGORITHMS, Engine, Fleet
from serve import SIZES

STOCK, ALL = {"SGLANG_PLUGINS": "specsync-bench-shim"}, {"SPECSYNC_SITES": "all"}
VARIANTS = {"stock": STOCK, "specsync": ALL, "control": STOCK, "grouped": ALL | {"SPECSYNC_TRANSPORT": "grouped"}}
"""``control`` is stock once more: its ratio says how far two equal engines lie apart. ``grouped`` is specsync over the
engine's own PyNccl."""
FAULTS = {"dspark": ("one draw more from rank 1's default generator", 1.0)}
FAULTS |= {
    "dflash": ("rank 1's logits skewed by 1.5 standard deviations from then on", 0.0),
    "eagle": ("rank 1's logits, the draft model's too, skewed by 1.5 standard deviations from then on", 0.0),
    "ngram": ("rank 1's drafts and their tree are others, and its logits skewed, from then on", 0.0),
}
"""By algorithm, what the shim does to rank 1 at `FAULT_STEP`, and the temperature of the runs."""
FAULT_STEP = 60
FAULT_RUNS = {"clean": ("specsync", 0), "healed": ("specsync", FAULT_STEP), "stock": ("stock", FAULT_STEP)}
"""Variant, and the step of the fault (0: never)."""
ROUND_S = 45.0
HANG_S = 20.0
"""A round of the faulted runs takes one to two seconds."""
FAULT_ROUNDS = 4


@dataclass
class Matrix:
    fleet: Fleet
    options: argparse.Namespace
    deadline: float

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def measure(self, algorithm: str) -> dict[str, Any]:
        """Stock and specsync in turn, each batch size and temperature."""
        variants = variants_of(algorithm, self.options.variants)
        engines = {name: self.fleet.engines[f"{algorithm}-{name}"] for name in variants}
        result: dict[str, Any] = {"started": {name: engine.started for name, engine in engines.items()}, "runs": []}
        if not all(result["started"].values()):
            return result | {"logs": {name: each.log_end() for name, each in engines.items() if not each.started}}
        rounds = self.options.rounds if algorithm == "dspark" else -(-self.options.rounds // 2)
        for temperature in temperatures_of(algorithm, self.options.temperatures):
            for batch in map(int, self.options.batches.split(",")):
                wanted = {"batch": batch, "tokens": self.options.tokens, "temperature": temperature}
                result["runs"].append(self._take_turns(engines, wanted, rounds))
        ranks = {
            name: [{**rank, "stretches": None} for rank in engine.counters()]  # the runs have them
            for name, engine in engines.items()
            if "SPECSYNC_SITES" in VARIANTS[name]
        }
        return result | {"ranks": ranks}

    def _ask(self, engine: Engine, limit_s: float, **wanted: Any) -> dict[str, Any] | None:
        """One round of one engine, while all others are stopped."""
        self.fleet.turn(engine.name)
        time.sleep(0.05)
        return engine.ask(min(limit_s, self.left_s()), **wanted) if self.left_s() > 0 else None

    def _stretches(self, engine: Engine) -> list[dict[str, float]]:
        """How long rank 0's steps took, round by round: one more prefill writes it."""
        self._ask(engine, ROUND_S, batch=1, tokens=2, temperature=0.0)
        ranks = engine.counters()
        return list(ranks[0]["stretches"]) if ranks else []

    def _take_turns(self, engines: dict[str, Engine], wanted: dict[str, Any], rounds: int) -> dict[str, Any]:
        # Compiles, and fills what is empty. One that does not end takes no turns: its late answer would be another's.
        engines = {name: each for name, each in engines.items() if self._ask(each, ROUND_S, **wanted) is not None}
        seen = {name: self._stretches(engine) for name, engine in engines.items()}
        given: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        names = sorted(engines)
        for turn in range(rounds):
            first = turn % len(names)  # each has each place, so none runs behind itself more often than another
            for name in names[first:] + names[:first]:
                if (answer := self._ask(engines[name], ROUND_S, **wanted)) is not None:
                    given[name].append(answer)
        speeds = {name: [round(each["tokens_per_s"], 1) for each in answers] for name, answers in given.items()}
        steps = {name: [each["steps"] for each in answers] for name, answers in given.items()}
        medians = {
            name: [round(each["median_us"], 1) for each in self._stretches(engine)[len(seen[name]) :]]
            for name, engine in engines.items()
        }
        complete = {name: found for name, found in speeds.items() if len(found) == rounds}
        stock = complete.pop("stock", [])
        ratios = {name: paired(found, stock) for name, found in complete.items()} if stock else {}
        step = {name: median(found) for name, found in medians.items() if found}
        theirs = step.pop("stock", None)
        step_ratios = {name: round(theirs / us, 4) for name, us in step.items()} if theirs else {}
        digests = {name: [each["digest"] for each in answers] for name, answers in given.items()}
        run = {**wanted, "ratios": ratios, "step_ratios": step_ratios, "tokens_per_s": speeds}
        run |= {"step_median_us": medians, "steps": steps, "digests": digests}
        print({key: run[key] for key in ("batch", "temperature", "ratios", "step_ratios")}, medians, flush=True)
        return run

    def fault(self, algorithm: str) -> dict[str, Any]:
        """A rank 1 that goes astray: what each variant makes of it, against specsync's own run without the fault."""
        what, temperature = FAULTS[algorithm]
        wanted = {"batch": 8, "tokens": self.options.tokens, "temperature": temperature}
        runs = {name: self._faulted(self.fleet.engines[f"fault-{algorithm}-{name}"], wanted) for name in FAULT_RUNS}
        clean = runs["clean"]["digests"] if runs["clean"]["end"] == "all rounds" else None
        became = {name: outcome(found, clean) for name, found in runs.items() if name != "clean"}
        print(algorithm, became, flush=True)
        return {**wanted, "fault": f"at step {FAULT_STEP}, {what}", "became": became, **runs}

    def _faulted(self, engine: Engine, wanted: dict[str, Any]) -> dict[str, Any]:
        # The first one compiles, and ends before the fault.
        asked = [(90.0, {**wanted, "tokens": 8}), *[(HANG_S, wanted)] * FAULT_ROUNDS]
        answers: list[dict[str, Any] | None] = []
        while engine.started and len(answers) < len(asked) and None not in answers:
            limit_s, what = asked[len(answers)]
            answers.append(self._ask(engine, limit_s, **what))
        end = "did not start" if not engine.started else "all rounds" if None not in answers else "hung"
        if end == "hung" and engine.process.poll() is not None:
            end = "ended by itself"
        if end == "all rounds":
            self._ask(engine, HANG_S, batch=1, tokens=2, temperature=0.0)  # writes the counters
        found = {"end": end, "digests": [each["digest"] for each in answers[1:] if each], "ranks": engine.counters()}
        print({key: found[key] for key in ("end", "digests")}, flush=True)
        return found if end == "all rounds" else found | {"log": engine.log_end()}


def outcome(found: dict[str, Any], clean: list[str] | None) -> str:
    """What became of a faulted run: how it ended, or else its text beside the clean run's, which may be missing."""
    if found["end"] != "all rounds":
        return str(found["end"])
    if clean is None:
        return "no clean run"
    return "right text" if found["digests"] == clean else "wrong text"


def paired(found: list[float], stock: list[float]) -> float:
    """The median of the turns' ratios: in one turn every engine makes the same tokens in the same steps."""
    return round(median(own / theirs for own, theirs in zip(found, stock, strict=True)), 4)


def variants_of(algorithm: str, chosen: str | None) -> dict[str, dict[str, str]]:
    """DSPARK decides most per step: it is measured in every variant, unless some are chosen."""
    if chosen is None and algorithm == "dspark":
        return VARIANTS
    return {name: VARIANTS[name] for name in (chosen or "stock,specsync").split(",")}


def temperatures_of(algorithm: str, given: list[str]) -> list[float]:
    """Those of the algorithm, or what is given for all."""
    named = dict(each.split("=") for each in given if "=" in each)
    return [float(each) for each in named.get(algorithm, "0,1" if named else given[0]).split(",")]


def start(options: argparse.Namespace, algorithms: list[str]) -> Fleet:
    runs = {
        f"{algorithm}-{variant}": (algorithm, {**environ, "SHIM_FAULT_STEP": "0"})
        for algorithm in algorithms
        for variant, environ in variants_of(algorithm, options.variants).items()
    }
    runs |= {
        f"fault-{algorithm}-{name}": (algorithm, {**VARIANTS[variant], "SHIM_FAULT_STEP": str(step)})
        for algorithm in split(options.faults, FAULTS)
        for name, (variant, step) in FAULT_RUNS.items()
    }
    shape = {"size": options.size, "layers": options.layers}
    return Fleet(
        [
            Engine(name, algorithm, environ, 30000 + 1500 * index, options.output, shape)
            for index, (name, (algorithm, environ)) in enumerate(runs.items())
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--algorithms", default="dspark,dflash,ngram,eagle")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the models; see serve.py")
    parser.add_argument("--layers", type=int, help="of the target, instead of the size's own")
    parser.add_argument("--variants", help=f"of {', '.join(VARIANTS)}; all for DSPARK, else the first two")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--temperatures", default=["0,1"], help="or by algorithm: dflash=1 ngram=0,1", nargs="+")
    parser.add_argument("--rounds", type=int, default=10, help="per setting of DSPARK; the others get half")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--faults", default="dspark", help="the algorithms that get one; empty: none")
    parser.add_argument("--start-s", type=float, default=240.0, help="time that all engines have to start")
    parser.add_argument("--limit-s", type=float, default=540.0, help="time that all of it may take")
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        algorithms, faults = split(options.algorithms, ALGORITHMS), split(options.faults, FAULTS)
    except ValueError as error:
        parser.error(str(error))
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "engine": "sglang 0.5.17",
        "machine": machine(),
        "size": options.size,
        "layers": options.layers,
        "algorithms": {},
        "faults": {},
    }
    fleet = start(options, algorithms)
    try:
        fleet.wait_ready(begin + options.start_s)
        matrix = Matrix(fleet, options, begin + options.limit_s)
        for algorithm in algorithms:
            print(f"== {algorithm}", flush=True)
            results["algorithms"][algorithm] = matrix.measure(algorithm)
            write(options.output, results)
        for algorithm in faults:  # last: a hung engine keeps the GPUs busy, also while its processes are stopped
            results["faults"][algorithm] = matrix.fault(algorithm)
            write(options.output, results)
            fleet.end(f"fault-{algorithm}-")
    finally:
        fleet.end()


def split(names: str, known: Iterable[str]) -> list[str]:
    """The names of a comma-separated list.

    Raises:
        ValueError: one of them is not known.
    """
    given = [name for name in names.split(",") if name]
    if unknown := set(given) - set(known):
        raise ValueError(f"unknown algorithms {sorted(unknown)}; known: {', '.join(known)}")
    return given


def write(folder: Path, results: dict[str, Any]) -> None:
    """After each step, since a later one may run out of time."""
    (folder / "matrix.json").write_text(json.dumps(results, indent=1) + "\n")


def machine() -> str:
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
