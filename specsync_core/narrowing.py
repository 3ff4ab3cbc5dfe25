"""What an operator is told when a plan synchronises less than everything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsync_core.plan import SitePlan

WIDTH = 110


def narrowing_warning(sites: Iterable[SitePlan], advice: Sequence[str]) -> str | None:
    """Return how many and which sites are not synchronised, why, what that risks, and what to do; None if all are."""
    planned = list(sites)
    narrowed = [site for site in planned if site.mode.value != "sync"]
    if not narrowed:
        return None
    modes = {site.mode.value for site in narrowed}
    lines = [f"the plan is narrower than 'all': {len(narrowed)} of {len(planned)} sites are not synchronised."]
    lines += advice
    lines += _which(narrowed)
    if "off" in modes:
        lines.append(
            "At a site that is off, ranks may decide differently; the group then hangs, or its KV caches drift apart"
            " and the text is wrong, without a message."
        )
    if "audit" in modes:
        lines.append("At a site in audit, ranks are compared and differences counted, but not healed.")
    lines.append(_way_out(narrowed, modes))
    return "\n".join(
        [
            lines[0],
            *(
                fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
                for line in lines[1:]
            ),
        ]
    )


def _which(narrowed: Sequence[SitePlan]) -> list[str]:
    """One line for each mode and reason, in the order of the sites."""
    slugs: dict[tuple[str, str], list[str]] = {}
    for site in narrowed:
        slugs.setdefault((site.mode.value, site.mode.origin), []).append(site.site.slug)
    return [f"{mode} by {origin}: {', '.join(members)}" for (mode, origin), members in slugs.items()]


def _way_out(narrowed: Sequence[SitePlan], modes: Collection[str]) -> str:
    published = any(site.mode.origin.startswith("SGLANG_SPEC_TP_SYNC") for site in narrowed)
    act = "Unset SGLANG_SPEC_TP_SYNC and set" if published else "Set"
    watch = "; to compare every site and change no value, set SPECSYNC_SITES=all:audit" if "off" in modes else ""
    return f"{act} SPECSYNC_SITES=all to synchronise everything{watch}. See `specsync plan` for every site."
