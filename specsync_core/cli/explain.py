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
from specsync_core.plan import Plan

YES, NO = ("yes", "true", "1", "on"), ("no", "false", "0", "off")
Known = dict[str, tuple[bool, str]]


def read_facts(engine: str | None, words: list[str]) -> Known:
    """Read ``--fact NAME`` and ``--fact NAME=no``.

    Raises:
        UsageError: a fact, a value or the engine is not known.
    """
    given = {}
    for word in words:
        name, _, value = word.partition("=")
        answer = value.strip().lower() or "yes"
        if answer not in (*YES, *NO):
            raise UsageError(f"--fact {word}: '{value}' is neither yes nor no.")
        given[name.strip().lower().replace("_", "-")] = answer in YES
    try:
        return known_facts(engine, given)
    except PolicyError as error:
        raise UsageError(str(error)) from error


def explanations(plan: Plan, known: Known, algorithm: str | None, site: str | None) -> list[Explanation]:
    """Explain the sites that were asked for.

    Raises:
        UsageError: there is no such algorithm or site.
    """
    registry = plan.registry
    if algorithm is not None and algorithm not in registry.algorithms:
        hint = did_you_mean(algorithm, registry.algorithms)
        raise UsageError(f"unknown algorithm '{algorithm}'{hint}. Known: {', '.join(registry.algorithms)}.")
    found = explain(registry, facts_from(known, plan.facts), algorithm)
    return [each for each in found if site is None or each.site.slug == registry.site(site).slug]


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


def show_minimal(
    found: list[Explanation], known: Known, algorithm: str | None, stats: list[Path], as_json: bool
) -> bool:
    """Print the smallest set that the facts justify, and how to prove it; return whether an audit refuted it."""
    needed = minimal_sites(found)
    policy = ",".join(site.slug for site in needed) or "none"
    whole = algorithm or "all"
    proof = ",".join([f"{whole}:audit", *(site.slug for site in needed)])
    left_out = [each.site.slug for each in found if not each.needed]
    verdicts = {path.name: judge(found, read_stats(path)) for path in _files(stats)}
    refuted = any(verdict.refuted for verdict in verdicts.values())
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


def read_stats(path: Path) -> dict[str, Any]:
    """Read the counts of one rank, as ``SPECSYNC_STATS_DIR`` keeps them, or as ``stats()`` gives them.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        document = json.loads(read_bounded(path, MAX_TEXT_BYTES))
        stats = document.get("stats", document.get("sites", document))
        return {slug: counted for slug, counted in stats.items() if isinstance(counted, dict)}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"--audit {path}: no counts can be read from it: {error}") from error


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "refuted": list(verdict.refuted),
        "held": list(verdict.held),
        "not_called": list(verdict.unseen),
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
