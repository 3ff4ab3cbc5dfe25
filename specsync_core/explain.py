"""Why each site is on, and which would do: the smallest set of syncs that the facts of an engine justify.

Two rules. A value that is a pure function of agreed values needs no broadcast; a value that came out of an all-gather
is bit-identical on every rank. What a site decides from follows from its declaration: its cause names the input that
can differ by itself, its phase the sites of its algorithm that it comes after. Of a plugin's site the inputs are not
known, so no fact leaves it out. No torch.

What facts justify is a claim about the running system. The sites that it leaves out belong in mode audit, which proves
or refutes it; nothing here changes a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from specsync_core.errors import PolicyError, did_you_mean
from specsync_core.facts import Facts
from specsync_core.registry import Registry, Site
from specsync_core.registry_files import FIRST_THIRD_PARTY_NUMBER

FACTS: Mapping[str, str] = {
    "gathered-logits": "every rank's logits came out of an all-gather, so they are bit-identical",
    "gathered-confidences": "the same, of what a verify plan is made from",
    "uniform-devices": "all ranks run the same kernels on the same model of device: equal inputs give equal bits",
    "counter-noise": "noise is a pure function of request and position, not of a generator's state",
}
"""What can be known of an engine, in the words of ``--fact``; each is a field of `Facts`."""

KNOWN_OF: Mapping[str, Mapping[str, bool]] = {
    "demo": {
        "gathered-logits": True,
        "gathered-confidences": True,
        "uniform-devices": True,
        "counter-noise": False,
    },
    "vllm": {"gathered-logits": True},
    "sglang": {"gathered-logits": True},
}
"""Facts that were read in an engine's code (vLLM 0.32.0, SGLang 0.5.17: the logits of a vocabulary-parallel head are
gathered on every rank), or that the demo is built by. Devices and seeds are the operator's to know."""

ORDER = ("init", "target", "draft", "plan", "accept", "state")
"""Phases in the order of a step; a decision comes after those of earlier phases."""


@dataclass(frozen=True)
class Input:
    """One thing that a decision is made from, besides the decisions before it."""

    name: str
    agreed: bool
    why: str


@dataclass(frozen=True)
class Explanation:
    """Why a site must be on, or may be off."""

    site: Site
    inputs: tuple[Input, ...]
    parents: tuple[str, ...]
    """Slugs of the sites that it derives from: each is synchronised, or pure like this one."""

    @property
    def needed(self) -> bool:
        """Some input can differ between ranks, whatever was agreed on before."""
        return any(not each.agreed for each in self.inputs)

    @property
    def why(self) -> str:
        """In a sentence."""
        if self.site.kind == "check":
            return "it only compares, and nothing follows from it"
        if self.needed:
            return "; ".join(f"{each.name}: {each.why}" for each in self.inputs if not each.agreed)
        reasons = "; ".join(f"{each.name}: {each.why}" for each in self.inputs)
        return f"a pure function of agreed values ({reasons})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "site": self.site.slug,
            "needed": self.needed,
            "cause": self.site.cause,
            "derives_from": list(self.parents),
            "inputs": [{"name": each.name, "agreed": each.agreed, "why": each.why} for each in self.inputs],
            "why": self.why,
        }


def known_facts(engine: str | None, given: Mapping[str, bool]) -> dict[str, tuple[bool, str]]:
    """Return what is known, with its origin: what was read in the engine's code, overruled by what is given.

    Raises:
        PolicyError: the engine is not known, or a fact has no such name.
    """
    if engine is not None and engine not in KNOWN_OF:
        known = ", ".join(KNOWN_OF)
        raise PolicyError(f"unknown engine '{engine}'{did_you_mean(engine, KNOWN_OF)}. Known: {known}.")
    for name in given:
        if name not in FACTS:
            raise PolicyError(f"unknown fact '{name}'{did_you_mean(name, FACTS)}. Known: {', '.join(FACTS)}.")
    read = {name: (value, f"known of {engine}") for name, value in KNOWN_OF.get(engine or "", {}).items()}
    return read | {name: (value, "given") for name, value in given.items()}


def facts_from(known: Mapping[str, tuple[bool, str]], facts: Facts | None = None) -> Facts:
    """Return `Facts` that hold what is known."""
    base = facts or Facts()
    values = {field.name: getattr(base, field.name) for field in fields(Facts)}
    return Facts(**{**values, **{name.replace("-", "_"): value for name, (value, _) in known.items()}})


def explain(registry: Registry, facts: Facts, algorithm: str | None = None) -> list[Explanation]:
    """Explain every site, or those of one algorithm, in the order of their numbers.

    A fact that is not known counts as false, and so does an input: a decision from nothing known is not agreed.
    """
    chosen = [site for site in registry.sites if algorithm in (None, site.algorithm)]
    return [Explanation(site, _known_inputs(site, facts), tuple(_parents(site, registry))) for site in chosen]


def minimal_sites(explanations: Iterable[Explanation]) -> list[Site]:
    """Return the sites that must stay on."""
    return [each.site for each in explanations if each.needed]


def _parents(site: Site, registry: Registry) -> Iterator[str]:
    if site.phase == "init" or site.kind == "check":
        return
    for other in registry.sites:
        before = ORDER.index(other.phase) < ORDER.index(site.phase)
        if other.algorithm == site.algorithm and other.kind != "check" and (before or _comes_after(site, other)):
            yield other.slug


def _comes_after(site: Site, other: Site) -> bool:
    """A draft is made behind what the step before has accepted."""
    return site.phase == "draft" and other.phase == "accept"


def _known_inputs(site: Site, facts: Facts) -> tuple[Input, ...]:
    if site.kind == "check":
        return ()
    return tuple(_inputs(site, facts)) or (Input("its inputs", False, "the declaration does not tell them"),)


def _inputs(site: Site, facts: Facts) -> Iterator[Input]:
    if site.cause == "memory":
        yield Input("free memory", False, "each device has its own, and no fact makes them equal")
        return
    if site.cause == "host":
        yield Input("the host", False, "clocks, threads and look-ups are each rank's own")
        return
    if site.number >= FIRST_THIRD_PARTY_NUMBER:
        yield Input("its inputs", False, "what a plugin's site is made from is not known, so no fact leaves it out")
        return
    if site.phase == "plan":
        yield _floats("confidences", facts.gathered_confidences, facts)
    elif site.phase != "state":
        yield _floats("logits", facts.gathered_logits, facts)
    if any(spec.name == "hidden_states" for spec in site.tensors):
        yield Input("hidden states", False, "they come out of an all-reduce, whose bits may differ between ranks")
    if site.cause == "rng" and site.phase == "state":
        yield Input("seed", False, "each rank draws its own")
    elif site.cause == "rng":
        agreed = bool(facts.counter_noise)
        how = "counter-based, keyed by request and position" if agreed else "drawn from each rank's own generator"
        yield Input("noise", agreed, how if facts.counter_noise is not None else f"{how}, as far as is known")


def _floats(name: str, gathered: bool | None, facts: Facts) -> Input:
    if not gathered:
        unknown = "not known to be" if gathered is None else "not"
        return Input(name, False, f"{unknown} all-gathered, so their bits may differ between ranks")
    if not facts.uniform_devices:
        unknown = "not known to be" if facts.uniform_devices is None else "not"
        return Input(name, False, f"all-gathered, but the devices are {unknown} alike, so kernels may round otherwise")
    return Input(name, True, "all-gathered, and every rank runs the same kernels on them")


@dataclass(frozen=True)
class Verdict:
    """What counts in mode audit say about a set of sites that was left out."""

    refuted: tuple[str, ...]
    """A line for each site that differed."""
    held: tuple[str, ...]
    """Sites that were compared, without a difference."""
    unseen: tuple[str, ...]
    """Sites that were never called: nothing is known of them."""
    checks: int
    silent: tuple[str, ...] = ()
    """Sites that were called without a comparison, as all are on group rank 0."""
    apart: tuple[str, ...] = ()
    """Sites of the set that were not synchronised in that run. A difference behind them says nothing of the facts."""

    def __str__(self) -> str:
        if self.apart:
            return f"not proven: not run under the prove policy, set sites were not in sync: {', '.join(self.apart)}"
        if self.refuted:
            return "refuted: " + "; ".join(self.refuted)
        if not (self.held or self.silent or self.unseen):
            return "nothing is left out, so there is nothing to prove"
        first = f"{self.checks:,} checks at {len(self.held)} sites that the facts leave out"
        called = f"called, but nothing was compared (group rank 0 never compares): {', '.join(self.silent)}"
        words = [
            f"0 mismatches in {first}" if self.checks else "",
            called if self.silent else "",
            f"not called: {', '.join(self.unseen)}" if self.unseen else "",
        ]
        return ("" if self.checks else "nothing was checked: ") + "; ".join(filter(None, words))


def judge(
    explanations: Iterable[Explanation],
    stats: Mapping[str, Mapping[str, Any]],
    modes: Mapping[str, str] | None = None,
) -> Verdict:
    """Hold the sites that facts leave out against what an audit counted.

    Args:
        stats: `SiteStats.as_dict` by slug, from any rank but group rank 0, whose own values are the ones compared with.
        modes: each site's mode in that run; None trusts that it was made under the prove policy.
    """
    explanations = list(explanations)
    left_out = [each.site.slug for each in explanations if not each.needed and each.site.kind != "check"]
    compared = {slug: int(stats.get(slug, {}).get("compared", 0)) for slug in left_out}
    called = {slug for slug in left_out if stats.get(slug, {}).get("calls")}
    wrong = {slug: count for slug in left_out if (count := int(stats.get(slug, {}).get("mismatches", 0)))}
    return Verdict(
        refuted=tuple(f"{slug} has {n:,} mismatches in {compared[slug]:,} checks" for slug, n in wrong.items()),
        held=tuple(slug for slug in left_out if compared[slug] and slug not in wrong),
        unseen=tuple(slug for slug in left_out if not compared[slug] and slug not in called),
        checks=sum(compared.values()),
        silent=tuple(slug for slug in left_out if not compared[slug] and slug in called),
        apart=tuple(_apart(explanations, modes)),
    )


def _apart(explanations: Iterable[Explanation], modes: Mapping[str, str] | None) -> Iterator[str]:
    for site in minimal_sites(explanations):
        if modes is not None and modes.get(site.slug) != "sync":
            yield site.slug
