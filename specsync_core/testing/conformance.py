"""`plugin_conformance`: does a plugin keep the rules, shown by making one rank differ at every site.

The algorithm runs on a `FakeEngine`, on ranks that are alike, then on ranks of which one differs in its draft's
logits, its target's, its generator; then with one rank's values changed before each site call. In all of them every
rank must return the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist

from specsync_core.algorithm import Algorithm
from specsync_core.engines.known import ENGINES
from specsync_core.errors import SpecSyncError, did_you_mean
from specsync_core.facts import EngineFacts, Facts
from specsync_core.groups import Group
from specsync_core.manager import GROUP, PluginManager, load_registry
from specsync_core.plan import Plan, resolve_plan
from specsync_core.policy import parse_policy
from specsync_core.policy_file import PolicyFile, PolicyTables
from specsync_core.registry import Registry
from specsync_core.registry_files import BUILTIN_SOURCE
from specsync_core.testing import rules
from specsync_core.testing.engine import NOISE, Scenario, Skew
from specsync_core.testing.points import PLATFORMS, point_problems, points_by_engine
from specsync_core.testing.rules import Violation
from specsync_core.testing.trial import Record, RunTrial, Trial, on_fake_ranks, on_this_group
from specsync_core.testing.watch import Change

NAME = "plugin-under-test"
GREEDY, SAMPLED, MIXED = (0.0,) * 6, (0.9,) * 6, (0.0, 0.9) * 3
SCENARIOS = (
    *(Scenario(temperatures, folded) for folded in (False, True) for temperatures in (GREEDY, SAMPLED, MIXED)),
    *(Scenario(temperatures, simulated_accept_len=1.5) for temperatures in (GREEDY, SAMPLED)),
)
SKEWS = {
    "other draft logits on group rank 1": Skew(draft=NOISE),
    "other target logits on group rank 1": Skew(target=NOISE),
    "another generator on group rank 1": Skew(generator=1),
}


class ConformanceError(AssertionError):
    """A plugin breaks a rule; the message has a line for each rule and site."""


@dataclass
class Report:
    """What was seen of a plugin."""

    declared: tuple[str, ...]
    """The sites that it has to synchronise."""
    calls: dict[str, int] = field(default_factory=dict)
    """By site: calls of the algorithm on one rank, in the scenarios without a difference."""
    captured: set[str] = field(default_factory=set)
    """Sites that were called in a captured function."""
    changed: dict[str, int] = field(default_factory=dict)
    """By site: trials in which its values were changed on a rank."""
    points: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By site: the engines' functions where it is synchronised."""
    trials: int = 0
    violations: list[Violation] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.declared)} sites, {self.trials} trials"]
        for slug in self.declared:
            points = len(self.points.get(slug, ()))
            captured = ", captured" if slug in self.captured else ""
            lines.append(
                f"  {slug}: {self.calls.get(slug, 0)} calls{captured}, changed in {self.changed.get(slug, 0)} trials,"
                f" {points} broadcast points"
            )
        return "\n".join(lines)


def plugin_conformance(plugin: object, *, world_size: int = 2, scenarios: Sequence[Scenario] = SCENARIOS) -> Report:
    """Hold a plugin to the rules (`specsync_core.testing.rules.RULES`).

    Args:
        plugin: a module or object with hooks, or the name of an installed plugin's entry point.
        world_size: ranks; group rank 1 is the one that is made to differ.
        scenarios: what is decoded; by default greedily, sampled and mixed, each eager and folded, and with
            simulated lengths. Fewer are quicker, but see fewer sites.

    Raises:
        ConformanceError: it breaks a rule; a line for each, with the site.
        PluginError, RegistryError: it cannot be loaded at all.
    """
    return _conform(plugin, scenarios, lambda algorithm, plan: on_fake_ranks(algorithm, plan, world_size))


def conformance_on_ranks(
    plugin: object, group: Group, device: torch.device, *, scenarios: Sequence[Scenario] = SCENARIOS
) -> Report:
    """`plugin_conformance` on real ranks, of which this process is one: on CUDA, graphs are really captured.

    Every rank of the group calls it at the same moment, and all return or raise alike. What runs inside a captured
    graph cannot be looked at or changed from the host; there, the results of skewed ranks must show it.

    Args:
        group: of the ranks; its ``cpu_group`` brings the records together. A plugin that breaks a rule may hang its
            peers until the group's own time-out, so begin with `plugin_conformance`.
        device: of this rank.
    """

    def exchange(record: Record) -> list[Record]:
        records: list[Any] = [None] * group.world_size
        dist.all_gather_object(records, record, group=group.cpu_group)
        return records

    return _conform(plugin, scenarios, lambda algorithm, plan: on_this_group(group, algorithm, plan, device, exchange))


def _conform(plugin: object, scenarios: Sequence[Scenario], ways: Callable[[Algorithm, Plan], RunTrial]) -> Report:
    manager, registry = _load(plugin)
    report = Report(_declared(manager, registry))
    report.violations += _policies(manager, registry)
    report.violations += _points(manager, registry, report)
    undeclared = [Violation("declared", "-", problem) for _, problem in manager.algorithm_problems(registry)]
    report.violations += undeclared
    for algorithm in () if undeclared else manager.algorithms().values():
        examine(registry, report, ways(algorithm, full_plan(registry, manager)), scenarios)
    report.violations += _uncovered(report)
    if report.violations:
        lines = dict.fromkeys(map(str, report.violations))
        raise ConformanceError("the plugin breaks a rule:\n  " + "\n  ".join(lines))
    return report


def _load(plugin: object) -> tuple[PluginManager, Registry]:
    manager = PluginManager()
    distribution = "this process"
    if isinstance(plugin, str):
        found = {point.name: point for point in entry_points(group=GROUP)}
        if plugin not in found:
            raise ConformanceError(
                f"no plugin '{plugin}' is installed{did_you_mean(plugin, found)}."
                f" Installed: {', '.join(sorted(found))}."
            )
        point = found[plugin]
        distribution = point.dist.metadata["Name"] if point.dist else distribution
        plugin = point.load()
    manager.register(plugin, NAME, distribution)
    return manager, load_registry(manager)


def _declared(manager: PluginManager, registry: Registry) -> tuple[str, ...]:
    """The plugin's own sites; of a built-in plugin, which brings no registry, those of its algorithm."""
    algorithms = manager.algorithms()
    return tuple(
        site.slug
        for site in registry.sites
        if registry.sources[site.slug] != BUILTIN_SOURCE or site.algorithm in algorithms
    )


def full_plan(registry: Registry, manager: PluginManager) -> Plan:
    """Every site on, over the transport that works on any group; nothing is read from the environment."""
    environ = {"SPECSYNC_SITES": "all", "SPECSYNC_TRANSPORT": "group", "SPECSYNC_COUNTERS": "off"}
    return resolve_plan(registry, environ, PolicyFile("", PolicyTables(), {}), Facts(dp_attention=False), manager)


def _policies(manager: PluginManager, registry: Registry) -> Iterator[Violation]:
    """Ask for a policy on every platform, as the demo and each engine would."""
    asked: list[Facts] = [Facts(platform=platform, model="any/model") for platform in PLATFORMS]
    for engine in ENGINES.values():
        for algorithm in manager.algorithms():
            newest = engine.versions[-1]
            asked.append(EngineFacts(platform="cuda", engine=engine.name, version=newest, algorithm=algorithm))
    for facts in asked:
        for info, text in manager.policies(facts):
            try:
                parse_policy(text, registry, f"on {facts.platform}")
            except SpecSyncError as error:
                yield Violation("policy", "-", f"{info.entry_point}: {error}")


def _points(manager: PluginManager, registry: Registry, report: Report) -> Iterator[Violation]:
    for facts, point in points_by_engine(manager):
        for slug in point.sites:
            report.points[slug] = tuple(dict.fromkeys((*report.points.get(slug, ()), point.target)))
        yield from (Violation("points", *problem) for problem in point_problems(point, facts.engine, registry))


def _uncovered(report: Report) -> Iterator[Violation]:
    if _ended_early(report):
        return
    for slug in report.declared:
        if slug not in report.calls and slug not in report.points:
            yield Violation("covered", slug, "it is declared, and nothing synchronises it")


def _ended_early(report: Report) -> bool:
    """Whether a trial was cut short: what its end did not reach is no evidence against a site."""
    return any(violation.rule in rules.ENDING for violation in report.violations)


def examine(registry: Registry, report: Report, run: RunTrial, scenarios: Sequence[Scenario]) -> None:
    """Run every trial of an algorithm, and add what was seen to the report."""
    examination = _Examination(registry, report, run)
    for scenario in scenarios:
        examination.scenario(scenario)
    examination.conclude()


class _Examination:
    """Goes through the scenarios; what only all of them together show is judged in the end."""

    def __init__(self, registry: Registry, report: Report, run: RunTrial) -> None:
        self._registry = registry
        self._report = report
        self._run = run
        self._folds = False
        self._unseen: set[str] = set()
        """Sites that a GPU captured, where nothing could be looked at or changed."""
        self._obeyed: dict[str, bool] = {}
        """By site: whether changing group rank 0's values ever changed the outcome."""
        self._repeats: dict[str, list[tuple[str, bool]]] = {}
        """By site: an earlier site of the same moment, and whether the call brought what was agreed on there."""

    def scenario(self, scenario: Scenario) -> None:
        self._folds = self._folds or scenario.folded
        base = self._trial(Trial(scenario, captures=True))
        problems = [
            *rules.failures(base, self._registry),
            *rules.held_contracts(base),
            *rules.captured_where_allowed(base, self._registry),
            *rules.agreed_results(base, "ranks that are alike"),
        ]
        self._see(base[0])
        if self._note(problems, scenario):
            return
        for words, skew in SKEWS.items():
            records = self._trial(Trial(scenario, skew))
            if not self._note(rules.failures(records, self._registry), scenario):
                self._note(rules.agreed_results(records, words), scenario)
            for first, second, again in rules.repeats(records[-1]):
                self._repeats.setdefault(second, []).append((first, again))
        self._change_every_site(scenario, base[0])

    def _see(self, record: Record) -> None:
        for call in record.calls:
            self._report.calls[call.slug] = self._report.calls.get(call.slug, 0) + 1
            if call.in_capture:
                self._report.captured.add(call.slug)
                self._unseen |= {call.slug} if not call.own else set()

    def _change_every_site(self, scenario: Scenario, base: Record) -> None:
        first = {call.slug: (index, call) for index, call in reversed(list(enumerate(base.calls)))}
        for index, call in first.values():
            if call.in_capture and not call.own:  # a GPU captures: what changes there would stay in the graph
                continue
            self._report.changed[call.slug] = self._report.changed.get(call.slug, 0) + 1
            change = Change(1, index, "wrong")
            records = self._trial(Trial(scenario, change=change))
            if not self._note(self._blaming(records, call.slug), scenario):
                self._note(rules.healed(records, base, call, change), scenario)
            records = self._trial(Trial(scenario, change=Change(0, index, "moved")))
            failed = any(record.error for record in records)
            follows = not failed and not rules.same_outcome(records[0], base)
            if failed:
                pass  # nothing can be said of what would have followed
            elif follows or scenario.simulated_accept_len is None:  # forced lengths replace the honest verdict
                self._obeyed[call.slug] = self._obeyed.get(call.slug, False) or follows
            cause = f"group rank 0 made to decide otherwise in {call.name}"
            self._note(rules.agreed_results(records, cause, call.slug), scenario)

    def _blaming(self, records: Sequence[Record], slug: str) -> Iterator[Violation]:
        for violation in rules.failures(records, self._registry):
            yield Violation("derived", slug, f"with group rank 1 made wrong before it, {violation.detail}")

    def _trial(self, trial: Trial) -> list[Record]:
        self._report.trials += 1
        return self._run(trial)

    def _note(self, problems: Iterator[Violation] | Sequence[Violation], scenario: Scenario) -> bool:
        """Keep the first violation of each rule at each site; return whether there was any."""
        found = list(problems)
        for violation in found:
            known = {(other.rule, other.site) for other in self._report.violations}
            if (violation.rule, violation.site) not in known:
                words = f"{violation.detail} ({scenario})"
                self._report.violations.append(violation._replace(detail=words))
        return bool(found)

    def conclude(self) -> None:
        """Judge what only several trials show. A gate of captures decides nothing where nothing is folded."""
        if _ended_early(self._report):
            return
        for slug, obeyed in self._obeyed.items():
            if slug in self._unseen:
                continue
            idle = self._registry.site(slug).cause == "memory" and not self._folds
            if not obeyed and not idle and not any(violation.site == slug for violation in self._report.violations):
                words = "other values of group rank 0 change nothing: its own values, or none, are used behind it"
                self._report.violations.append(Violation("obeyed", slug, words))
        for slug, calls in self._repeats.items():
            if slug not in self._unseen and all(again for _, again in calls):
                words = f"every call brings what {calls[0][0]} has agreed on just before"
                self._report.violations.append(Violation("once", slug, words))
