"""What a request means under the plan in force: which sites get another mode, which stay, and why. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specsync_core.errors import ControlError, PolicyError, did_you_mean
from specsync_core.plan import Plan
from specsync_core.policy import MODES, Mode, Policy, parse_policy, split_policy

ORIGIN = "specsync ctl"
CONSENSUS = (
    "a host agreement stays as it was at the start: ranks branch on it, and a gate of the start-up is decided already"
)


@dataclass(frozen=True)
class Change:
    """What a request changes."""

    modes: Mapping[str, Mode]
    """By slug, the sites that get another mode."""
    kept: Mapping[str, str]
    """By slug, the sites that a preset or an algorithm in the policy would change, and that stay, with the reason."""


def whole_policy(text: str, plan: Plan, fixed: Mapping[str, str]) -> Change:
    """Read a policy as ``SPECSYNC_SITES`` would be: a site that it does not select is off.

    Args:
        fixed: further sites that cannot change while this engine runs, by slug, with the reason.

    Raises:
        PolicyError: the policy cannot be understood.
        ControlError: it is empty, or it names a site that has to stay.
    """
    if not any(split_policy(text)):
        raise ControlError("the policy is empty. Write 'off' to turn every site off that can be.")
    chosen = _parse(text, plan)
    wanted: dict[str, Mode] = {slug: chosen[slug].mode if slug in chosen else "off" for slug in plan.sites}
    return _change(wanted, text, plan, fixed)


def some_sites(words: str, mode: str, plan: Plan, fixed: Mapping[str, str]) -> Change:
    """Give the sites that some words of a policy name one mode, and leave all others alone.

    Args:
        words: slugs, numbers, presets, algorithms, comma-separated; without modes and removals.

    Raises:
        PolicyError, ControlError: as `whole_policy`; a mode is unknown.
    """
    tokens = list(split_policy(words))
    if wrong := [token for token in tokens if token.startswith("-") or ":" in token]:
        raise ControlError(f"'{wrong[0][:60]}' is no name of sites. Give names here, and one mode for them.")
    if not tokens:
        raise ControlError("no site is named. List the sites with `specsync sites`.")
    known = next((one for one in MODES if one == mode.strip().lower()), None)
    if known is None:
        raise ControlError(f"unknown mode {mode[:40]!r}{did_you_mean(mode, MODES)}. Modes: {', '.join(MODES)}.")
    named = _parse(words, plan)
    return _change({slug: known for slug in plan.sites if slug in named}, words, plan, fixed)


def _parse(text: str, plan: Plan) -> Policy:
    try:
        return parse_policy(text, plan.registry, ORIGIN, plan.presets)
    except PolicyError as error:
        raise PolicyError(f"{error}\n  Sites: {', '.join(plan.sites)}.") from None


def _change(wanted: Mapping[str, Mode], text: str, plan: Plan, fixed: Mapping[str, str]) -> Change:
    different = {slug: mode for slug, mode in wanted.items() if mode != plan.mode(slug)}
    named = _named(text, plan)
    kept = {slug: reason for slug in different if (reason := _why_fixed(slug, plan, fixed)) is not None}
    refused = [f"{slug} stays {plan.mode(slug)}: {reason}." for slug, reason in kept.items() if slug in named]
    if refused:
        raise ControlError("\n".join(refused) + "\n  Leave it out, and it stays as it is.")
    return Change({slug: mode for slug, mode in different.items() if slug not in kept}, kept)


def _why_fixed(slug: str, plan: Plan, fixed: Mapping[str, str]) -> str | None:
    return CONSENSUS if plan[slug].site.kind == "consensus" else fixed.get(slug)


def _named(text: str, plan: Plan) -> set[str]:
    """The sites that a policy names one by one."""
    words = (token.removeprefix("-").partition(":")[0] for token in split_policy(text))
    found = (plan.registry.words.get(word.lstrip("0") if word.isdecimal() else word) for word in words)
    return {named.name for named in found if named is not None and named.what == "site"}
