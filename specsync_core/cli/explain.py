"""What ``specsync plan --explain`` and ``--minimal`` show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specsync_core.bounded_file import MAX_TEXT_BYTES, read_bounded
from specsync_core.cli.output import UsageError, print_json, print_table
from specsync_core.errors import PolicyError, did_you_mean
from specsync_core.explain import (
    FACTS,
    Explanation,
    Verdict,
    explain,
    facts_from,
    judge,
    known_facts,
    minimal_sites,
)
from specsync_core.facts import EngineFacts, Facts
from specsync_core.manager import PluginManager, load_registry
from specsync_core.plan import Plan

YES, NO = ("yes", "true", "1", "on"), ("no", "false", "0", "off")
Known = dict[str, tuple[bool, str]]


def read_facts(engine: str | None, words: list[str]) -> Known:
    """Read ``--fact NAME`` and ``--fact NAME=no``.

    Raises:
        UsageError: a fact, a value or the engine is not known.
    """
    given: dict[str, bool] = {}
    for word in words:
        name, _, value = word.partition("=")
        answer = value.strip().lower() or "yes"
        if answer not in (*YES, *NO):
            raise UsageError(f"--fact {word}: '{value}' is neither yes nor no.")
        fact = name.strip().lower().replace("_", "-")
        if given.setdefault(fact, answer in YES) != (answer in YES):
            raise UsageError(f"--fact {fact}: it is both stated and denied. Give it once.")
    try:
        return known_facts(engine, given)
    except PolicyError as error:
        raise UsageError(str(error)) from error


def decided_in(engine: str | None, algorithm: str | None, facts: Facts, manager: PluginManager) -> set[str] | None:
    """Return the slugs that a broadcast point of any known version of the engine names; None where none is asked for.

    Args:
        algorithm: as the engine calls it, such as ``ngram``, or a registry's; None is all.

    Raises:
        UsageError: no point names a site for it. Another engine's sites would turn all of this one's off.
    """
    from specsync_core.engines.known import ENGINES  # not before it is needed: the command has to begin quickly

    if engine is None or engine not in ENGINES:
        return None
    found = _point_sites(engine, algorithm, facts, manager)
    if not found and algorithm is not None:
        registry = load_registry(manager)
        found = {
            slug for slug in _point_sites(engine, None, facts, manager) if registry.site(slug).algorithm == algorithm
        }
    if not found:
        raise UsageError(
            f"--engine {engine} --algorithm {algorithm}: no broadcast point of {engine} belongs to that algorithm."
            f" Leave --algorithm out for all of its sites (`specsync plan --explain --engine {engine}`)."
        )
    return found


def _point_sites(engine: str, algorithm: str | None, facts: Facts, manager: PluginManager) -> set[str]:
    from specsync_core.engines.known import ENGINES

    of_versions = [
        EngineFacts(facts.platform, facts.model, facts.dp_attention, engine=engine, version=each, algorithm=algorithm)
        for each in ENGINES[engine].versions
    ]
    return {slug for each in of_versions for point in manager.broadcast_points(each) for slug in point.sites}


def explanations(
    plan: Plan, known: Known, algorithm: str | None, site: str | None, decided: set[str] | None = None
) -> list[Explanation]:
    """Explain the sites that were asked for.

    Args:
        decided: `decided_in` the engine that was asked for; None is every site, or those of the algorithm.

    Raises:
        UsageError: there is no such algorithm or site, or the engine does not decide there.
    """
    registry = plan.registry
    if decided is None and algorithm is not None and algorithm not in registry.algorithms:
        hint = did_you_mean(algorithm, registry.algorithms)
        raise UsageError(f"unknown algorithm '{algorithm}'{hint}. Known: {', '.join(registry.algorithms)}.")
    found = explain(registry, facts_from(known, plan.facts), algorithm if decided is None else None)
    found = [each for each in found if decided is None or each.site.slug in decided]
    chosen = [each for each in found if site is None or each.site.slug == registry.site(site).slug]
    if not chosen:
        raise UsageError(f"{site} is not among the sites that were asked for: {_slugs(found)}.")
    return chosen


def _slugs(found: list[Explanation]) -> str:
    return ", ".join(each.site.slug for each in found)


def show_explanations(plan: Plan, found: list[Explanation], known: Known, as_json: bool) -> None:
    """Print for every site why it is on, or may be off."""
    if as_json:
        sites = [each.as_dict() | {"mode": plan.mode(each.site)} for each in found]
        print_json({"facts": _facts_json(known), "sites": sites})
        return
    needed = {each.site.slug for each in explain(plan.registry, facts_from(known, plan.facts)) if each.needed}
    rows = [
        (
            each.site.slug,
            plan.mode(each.site),
            "must be on" if each.needed else "may be off",
            each.site.cause,
            f"{each.why}. {_parents(plan, each, needed)}",
        )
        for each in found
    ]
    if len(rows) == 1:
        names = ("site", "mode", "under these facts", "cause", "why")
        print_table((), list(zip(names, rows[0], strict=True)))
    else:
        print_table(("site", "mode", "may it be off?", "cause", "why"), rows)
    print()
    _print_facts(known)


def _parents(plan: Plan, each: Explanation, needed: set[str]) -> str:
    """What a site derives from, and whether that is agreed under the plan in force."""
    if not each.parents:
        return "It derives from no other site."
    apart = [slug for slug in each.parents if slug in needed and plan.mode(slug) != "sync"]
    state = f"not agreed in this plan: {', '.join(apart)}" if apart else "all agreed: synchronised, or pure"
    return f"It derives from {', '.join(each.parents)} ({state})."


def show_minimal(found: list[Explanation], known: Known, whole: str | None, stats: list[Path], as_json: bool) -> bool:
    """Print the smallest set that the facts justify, and how to prove it.

    Args:
        whole: the policy's word for all of ``found``; None names each one.

    Returns: whether an audit refuted the set, or was not made under the prove policy.
    """
    needed = minimal_sites(found)
    policy = ",".join(site.slug for site in needed) or "none"
    left_out = [each.site.slug for each in found if not each.needed]
    compared = [f"{slug}:audit" for slug in ([whole] if whole else left_out)]
    proof = ",".join([*compared, *(site.slug for site in needed)])
    verdicts = {path.name: judge(found, *read_stats(path)) for path in _files(stats)}
    refuted = any(verdict.refuted or verdict.apart for verdict in verdicts.values())
    if as_json:
        print_json(
            {
                "facts": _facts_json(known),
                "policy": policy,
                "proof": proof,
                "left_out": left_out,
                "audits": {name: _verdict_json(verdict) for name, verdict in verdicts.items()},
            }
        )
        return refuted
    print(f"The facts justify {len(needed)} of {len(found)} sites. Nothing was changed: it is a claim, to be proven.")
    print(f"  left out   {', '.join(left_out) or '-'}")
    print(f"  1. prove   SPECSYNC_SITES={proof}")
    print("             These sites are synchronised, the others compared; one mismatch there refutes the facts.")
    print(f"  2. narrow  SPECSYNC_SITES={policy}")
    for name, verdict in verdicts.items():
        print(f"  audit {name}: {verdict}")
    print()
    _print_facts(known)
    return refuted


def _files(paths: list[Path]) -> list[Path]:
    """The files that were named, and those in the directories that were."""
    found = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if paths and not found:
        raise UsageError(f"--audit {paths[0]}: it holds no counts. Run with SPECSYNC_STATS_DIR={paths[0]} first.")
    return found


def read_stats(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the counts of one rank, as ``SPECSYNC_STATS_DIR`` keeps them: its stats, and its modes, by slug.

    Raises:
        UsageError: the file cannot be read, or is not such a file.
    """
    try:
        document = json.loads(read_bounded(path, MAX_TEXT_BYTES))
        if not isinstance(document, dict) or not {"version", "stats", "modes"} <= set(document):
            raise ValueError("it is no file of SPECSYNC_STATS_DIR, which has version, stats and modes")
        stats = {slug: counted for slug, counted in document["stats"].items() if isinstance(counted, dict)}
        return stats, dict(document["modes"])
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"--audit {path}: no counts can be read from it: {error}") from error


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "verdict": str(verdict),
        "refuted": list(verdict.refuted),
        "held": list(verdict.held),
        "not_called": list(verdict.unseen),
        "not_compared": list(verdict.silent),
        "not_in_sync": list(verdict.apart),
        "checks": verdict.checks,
    }


def _facts_json(known: Known) -> dict[str, Any]:
    return {
        name: {"value": known[name][0], "origin": known[name][1]} if name in known else {"value": None, "origin": None}
        for name in FACTS
    }


def _print_facts(known: Known) -> None:
    def row(name: str) -> tuple[str, str, str, str]:
        value, origin = known.get(name, (None, "not known, so taken as no"))
        return name, {True: "yes", False: "no", None: "-"}[value], origin, FACTS[name]

    print_table(("fact", "value", "origin", "meaning"), [row(name) for name in FACTS])
