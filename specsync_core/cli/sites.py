"""``specsync sites``"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specsync_core.cli.output import JsonOption, UsageError, print_json, print_table
from specsync_core.errors import did_you_mean
from specsync_core.manager import load_registry, plugin_manager
from specsync_core.registry import Registry, Site


def sites(
    algorithm: Annotated[str | None, typer.Option(help="Only the sites of this algorithm.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the sites, and the other words that a policy may use."""
    registry = load_registry(plugin_manager())
    if algorithm is not None and algorithm.lower() not in registry.algorithms:
        hint = did_you_mean(algorithm.lower(), registry.algorithms)
        raise UsageError(f"unknown algorithm '{algorithm}'{hint}. Known: {', '.join(registry.algorithms)}.")
    shown = [site for site in registry.sites if algorithm is None or site.algorithm == algorithm.lower()]
    if as_json:
        print_json(_as_json(registry, shown))
        return
    rows = [(str(site.number), site.slug, site.phase, site.cause, site.summary) for site in shown]
    print_table(("no", "site", "phase", "cause", "what is decided"), rows)
    if algorithm is None:
        _print_words(registry)


def _print_words(registry: Registry) -> None:
    print()
    counts = {name: len(registry.preset_sites(name)) for name in registry.presets}
    presets = [(name, str(counts[name]), preset.summary) for name, preset in sorted(registry.presets.items())]
    print_table(("preset", "sites", "what it selects"), presets)
    if registry.handles:
        print()
        handles = [
            (str(handle.number or ""), handle.name, handle.status, f"{handle.summary}: {', '.join(handle.sites)}")
            for handle in registry.handles.values()
        ]
        print_table(("no", "handle", "status", "what it selects"), handles)


def _as_json(registry: Registry, shown: list[Site]) -> dict[str, Any]:
    return {
        "sites": [{**site.model_dump(mode="json"), "source": registry.sources[site.slug]} for site in shown],
        "presets": {
            name: {"summary": preset.summary, "sites": _slugs(registry, name)}
            for name, preset in sorted(registry.presets.items())
        },
        "handles": {
            name: handle.model_dump(mode="json", exclude={"name"}) for name, handle in registry.handles.items()
        },
    }


def _slugs(registry: Registry, preset: str) -> list[str]:
    selected = registry.preset_sites(preset)
    return [site.slug for site in registry.sites if site in selected]
