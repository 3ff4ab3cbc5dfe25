"""``specsync plugins``"""

from __future__ import annotations

import sys
from dataclasses import asdict

import typer

from specsync_core.cli.output import JsonOption, print_json, print_table
from specsync_core.manager import PluginManager
from specsync_core.settings import disabled_plugins


def plugins(as_json: JsonOption = False) -> None:
    """List the installed plugins: where they come from, and the hooks that they implement."""
    manager = PluginManager(keep_going=True)
    manager.load(disabled_plugins())
    found = manager.plugins()
    if as_json:
        print_json([asdict(info) for info in found])
    else:
        rows = [(info.name, info.distribution, info.version, info.status, ", ".join(info.hooks)) for info in found]
        print_table(("plugin", "distribution", "version", "status", "hooks"), rows)
    for problem in manager.problems:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
    if manager.problems:
        raise typer.Exit(1)
