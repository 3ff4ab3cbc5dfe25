"""``specsync engines``"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specsync_core.cli.output import JsonOption, print_json, print_table
from specsync_core.cli.plan import detect_platform
from specsync_core.engines.known import ENGINES, Coverage, KnownEngine, coverage, points_of
from specsync_core.manager import PluginManager, load_registry, plugin_manager


def engines(
    version: Annotated[
        str | None, typer.Option("--version", help="Show this version's sites instead of the installed one's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List inference engines, whether they are supported, and who synchronises each site in them."""
    manager = plugin_manager()
    found = [_describe(engine, version, manager) for engine in ENGINES.values()]
    if as_json:
        print_json(found)
        return
    rows = [(each["engine"], each["installed"] or "-", each["support"], each["known"]) for each in found]
    print_table(("engine", "installed", "support", "known versions"), rows)
    for each in found:
        if each["sites"]:
            print(f"\n{each['engine']} {each['version']}, {each['platform']}")
            sites = [(site["site"], site["synced by"], ", ".join(site["targets"]) or "-") for site in each["sites"]]
            print_table(("site", "synced by", "where"), sites)


def _describe(engine: KnownEngine, version: str | None, manager: PluginManager) -> dict[str, Any]:
    installed = engine.installed()
    shown = version or installed
    platform = detect_platform()
    covered: list[Coverage] = []
    if shown is not None and shown in engine.versions:
        covered = coverage(points_of(engine, shown, platform, manager).points, load_registry(manager))
    return {
        "engine": engine.name,
        "installed": installed,
        "support": engine.support(shown) if shown else "not installed",
        "known": f"{engine.versions[0]} to {engine.versions[-1]}, tested {', '.join(engine.tested)}",
        "version": shown,
        "platform": platform,
        "sites": [{"site": each.site, "synced by": str(each), "targets": list(each.targets)} for each in covered],
    }
