"""The demo's story: ranks disagree and hang, the hang is diagnosed, the same fault is healed, and what that costs.

No torch here: ranks are processes of their own (`specsync_core.demo.ranks`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from specsync_core.demo.compare import compare_runs, sample_text
from specsync_core.demo.config import Job, World
from specsync_core.demo.options import Setup
from specsync_core.demo.ranks import recordings_folder, warm_up
from specsync_core.demo.runner import Ended, Runner
from specsync_core.policy import parse_sites

COST_ROUNDS, COST_STEPS = 3, 16


class Reporter(Protocol):
    """Hears how the story goes on."""

    def working(self, what: str, done: int, total: int) -> None:
        """A run or a training is at step ``done`` of ``total``."""
        ...

    def part(self, part: Part) -> None:
        """A part of the story has been told."""
        ...


@dataclass
class Part:
    """One part of the story, for people and for JSON."""

    key: str
    title: str
    lines: list[str]
    held: bool | None
    """Whether it went as the story says; None for a part that claims nothing."""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One row of the table at the end."""

    name: str
    sites: str
    outcome: str
    steps: int
    tokens_per_step: float | None
    healed: int | None
    step_ms: float | None


@dataclass
class Story:
    """Everything that was seen."""

    parts: list[Part] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    samples: list[tuple[str, str]] = field(default_factory=list)
    """Prompt and continuation."""
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        return all(part.held is not False for part in self.parts)


def tell(setup: Setup, reporter: Reporter) -> Story:
    """Run the whole story. Every process has ended and every file is gone when this returns or raises."""
    begin = time.monotonic()
    teller = _Teller(setup, reporter)
    weights = teller.train() if setup.options.train else None
    reporter.working("starting ranks", 0, 1)
    warm_up(World(setup.options.ranks, setup.device, setup.options.seed, (), ()))
    with recordings_folder() as folder:
        runner = Runner(setup, folder, reporter.working, weights)
        with closing(runner.run(teller.jobs())) as ends:
            teller.tell(ends)
    teller.story.seconds = time.monotonic() - begin
    return teller.story


class _Teller:
    """Knows the jobs, and what each one's end means."""

    def __init__(self, setup: Setup, reporter: Reporter) -> None:
        self.setup = setup
        self.options = setup.options
        self.reporter = reporter
        self.story = Story()
        fault = f"fault {setup.fault_text}" if setup.faults else "no injected fault"
        self.what = fault if self.options.temperature <= 0 else f"{fault}, temperature {self.options.temperature:g}"
        warm = self.options.temperature or 1.0
        self.unsynced = self._job("sync off", "off", fault=setup.fault_text)
        self.reference = self._job("unfaulted", "all")
        self.plain = self._job("plain decoding", "off", algorithm=None)
        self.synced = self._job("sync on", self.options.sites, fault=setup.fault_text)
        self.costs = self._cost_jobs()
        self.warm_synced = self._job("natural, sync on", "all", temperature=warm)
        self.warm_init = self._job("natural, sites init", "init", temperature=warm)

    def _job(self, name: str, sites: str, **changes: Any) -> Job:
        defaults: dict[str, Any] = {
            "algorithm": self.setup.algorithm.name,
            "steps": self.options.steps,
            "temperature": self.options.temperature,
            "transport": self.setup.transport,
            "folded": self.options.folded,
        }
        return Job(name=name, sites=sites, **(defaults | changes))

    def _cost_jobs(self) -> list[Job]:
        """The same work by turns: sync off, on, and on with a broadcast per tensor."""
        modes = [("off", self.setup.transport), (self.options.sites, self.setup.transport)]
        if self.setup.transport != "group":
            modes.append((self.options.sites, "group"))
        turns = [modes if number % 2 == 0 else modes[::-1] for number in range(COST_ROUNDS)]
        return [
            self._job(
                f"cost of {sites} by {transport}, round {number + 1}", sites, transport=transport,
                steps=COST_STEPS, generators="shared", recorded=False,
            )
            for number, turn in enumerate(turns)
            for sites, transport in turn
        ]  # fmt: skip

    def jobs(self) -> list[Job]:
        return [
            *([self.unsynced] if self._diverges else []),
            self.reference,
            *([self.plain] if self._is_greedy else []),
            self.synced,
            *self.costs,
            self.warm_synced,
            self.warm_init,
        ]

    @property
    def _is_greedy(self) -> bool:
        return self.options.temperature <= 0

    @property
    def _diverges(self) -> bool:
        return bool(self.setup.faults) or not self._is_greedy

    def train(self) -> bytes:
        from specsync_core.demo.training import trained_weights

        def report(model: str, step: int, loss: float) -> None:
            self.reporter.working(f"training the {model}, loss {loss:.2f}", step, self.options.train)

        world = World(self.options.ranks, self.setup.device, self.options.seed, (), ())
        return trained_weights(world, self.setup.algorithm.draft_kind, self.options.train, report)

    def tell(self, ends: Iterator[Ended]) -> None:
        """Take the jobs' ends in their order, and tell each part as soon as its runs have ended."""
        if self._diverges:
            self._tell_sync_off(next(ends))
        reference = next(ends)
        if not reference.equal:
            raise RuntimeError("the run without a fault did not end well:\n" + "\n".join(reference.lines()))
        self._add_run("unfaulted", reference)
        self.story.samples = sample_text(self.setup.prompts, reference.tokens)
        plain = next(ends) if self._is_greedy else None
        self._tell_sync_on(next(ends), reference, plain)
        self._tell_cost([next(ends) for _ in self.costs])
        self._tell_natural(next(ends), next(ends))

    def _tell_sync_off(self, ended: Ended) -> None:
        diagnosis = ended.diagnosis
        held = diagnosis is not None and diagnosis.is_finding and diagnosis.site is not None
        expected = {fault.site.slug for fault in self.setup.faults}
        if held and self._is_greedy:
            held = diagnosis is not None and diagnosis.site in expected
        lines = ended.lines()
        if ended.equal:
            lines += ["The fault changed nothing." + _unfired(ended) + " Try another --fault, --steps or --seed."]
        self._tell("sync_off", f"(a) Sync off, {self.what}", lines, held, ended.as_dict())
        self._add_run("(a) sync off", ended)

    def _tell_sync_on(self, ended: Ended, reference: Ended, plain: Ended | None) -> None:
        same = compare_runs(ended.tokens, reference.tokens)
        lines = ended.lines()
        if ended.ranks is not None:
            lines = [
                f"It finished. All ranks' tokens are {ended.agreement.describe()}.",
                f"Against the unfaulted run they are {same.describe()}.",
                f"Healed: {_counts(ended.healed) or 'nothing, for nothing differed'}.{_unfired(ended)}",
            ]
        held = ended.equal and same.equal
        data = ended.as_dict() | {"equals_unfaulted": same.equal}
        if not held:
            lines.append(self._narrow_hint())
        if plain is not None:
            greedy = compare_runs(reference.tokens, plain.tokens)
            lines.append(f"Unfaulted, speculative and plain greedy tokens of the target are {greedy.describe()}.")
            held, data["equals_plain"] = held and greedy.equal, greedy.equal
        self._tell("sync_on", f"(b) Sync on ({self.options.sites}), {self.what}", lines, held, data)
        self._add_run("(b) sync on", ended)
        if plain is not None:
            self._add_run("plain decoding", plain)

    def _narrow_hint(self) -> str:
        on = parse_sites(self.options.sites, self.setup.registry, "--sites")
        mine = [site for site in self.setup.registry.sites if site.algorithm == self.setup.algorithm.name]
        off = [site.slug for site in mine if site not in on]
        if not off:
            return "Every site of the algorithm is on: a value was changed behind its sync, or a rank was lost."
        return f"--sites leaves these off, so nothing heals them: {', '.join(off)}."

    def _tell_cost(self, ends: Sequence[Ended]) -> None:
        times: dict[tuple[str, str], list[float]] = {}
        used: dict[tuple[str, str], str] = {}
        for ended in ends:
            mode = (ended.job.sites, ended.job.transport)
            if ended.ranks and ended.step_ms is not None:
                times.setdefault(mode, []).append(ended.step_ms)
                used[mode] = ended.ranks[0].transports.get(ended.job.transport, "-")
        off = times.get(("off", self.setup.transport), [])
        rows = [
            {
                "sites": mode[0],
                "transport": used[mode],
                "step_ms": round(median(each), 3),
                "ratio": round(median(each) / median(off), 3),
            }
            for mode, each in times.items()
            if len(each) == len(off) == COST_ROUNDS
        ]
        lines = [_cost_line(row) for row in rows]
        lines.append(
            f"Medians of {COST_ROUNDS} alternating rounds of {COST_STEPS} steps; the slower rank's."
            " A busy machine moves them."
        )
        if len(rows) < len(self.costs) // COST_ROUNDS:
            lines.append("Some of these runs stopped: under this policy the ranks do not stay together.")
        self._tell("cost", "(c) Cost per step", lines, None, {"rows": rows})

    def _tell_natural(self, synced: Ended, init: Ended) -> None:
        lines = [
            f"With every site on: {sum(synced.healed.values())} values differed and were healed."
            f" All ranks' tokens are {synced.agreement.describe()}.",
            "With the preset init alone, each rank keeps its own draws:",
            *init.lines(),
        ]
        differs = init.diagnosis is not None and init.diagnosis.is_finding
        title = f"(d) No fault, temperature {synced.job.temperature:g}, a generator of its own on each rank"
        data = {"all": synced.as_dict(), "init": init.as_dict()}
        self._tell("natural", title, lines, synced.equal and differs, data)
        self._add_run("(d) natural, sync on", synced)
        self._add_run("(d) natural, init only", init)

    def _tell(self, key: str, title: str, lines: list[str], held: bool | None, data: dict[str, Any]) -> None:
        part = Part(key, title, lines, held, data)
        self.story.parts.append(part)
        self.reporter.part(part)

    def _add_run(self, name: str, ended: Ended) -> None:
        outcome = ended.outcome + (", diagnosed" if ended.stop and ended.diagnosis and ended.diagnosis.site else "")
        if ended.ranks is None:
            steps = max(ended.stop.steps.values()) if ended.stop else 0
            self.story.runs.append(Run(name, ended.job.sites, outcome, steps, None, None, None))
            return
        first = ended.ranks[0]
        healed = sum(ended.healed.values())
        self.story.runs.append(
            Run(name, ended.job.sites, outcome, len(first.step_s), first.tokens_per_step, healed, ended.step_ms)
        )


def _counts(healed: dict[str, int]) -> str:
    return ", ".join(f"{slug} {count} value{'s' if count > 1 else ''}" for slug, count in healed.items())


def _unfired(ended: Ended) -> str:
    reasons = [reason for result in (ended.ranks or {}).values() for reason in result.unfired]
    return "".join(f" A fault never struck: {reason}." for reason in reasons)


def _cost_line(row: dict[str, Any]) -> str:
    sites = "sync off" if row["sites"] == "off" else f"sync on ({row['sites']}), transport {row['transport']}"
    return f"{sites}: {row['step_ms']:.1f} ms, {row['ratio']:.2f} of off"
