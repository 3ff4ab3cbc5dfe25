"""``specsync doctor``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specsync_core.cli.output import JsonOption, UsageError, print_json
from specsync_core.cli.plan import detect_platform


def doctor(
    directory: Annotated[Path | None, typer.Argument(help="A directory with the ranks' recordings.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="Instead: check every target in this installed engine, without starting it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what diverged first in a run that was recorded, or whether an installed engine can be synchronised."""
    if (directory is None) == (engine is None):
        raise UsageError("give either a directory of recordings or --engine NAME.")
    if engine is not None:
        _examine_engine(engine, as_json)
    if directory is not None:
        _diagnose(directory, as_json)


def _diagnose(directory: Path, as_json: bool) -> None:
    from specsync_core.diagnostics import diagnose

    diagnosis = diagnose(directory)
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        print(diagnosis.text)
    if diagnosis.is_finding:
        raise typer.Exit(1)


def _examine_engine(name: str, as_json: bool) -> None:
    result = examine_engine(name)
    if as_json:
        print_json(result)
    else:
        print(f"{result['engine']} {result['version']}: {result['support']}")
        for target in result["targets"]:
            print(f"  {'ok     ' if target['problem'] is None else 'PROBLEM'}  {target['problem'] or target['target']}")
        for problem in result["problems"]:
            print(f"  PROBLEM  {problem}")
        count = len(result["problems"]) + sum(target["problem"] is not None for target in result["targets"])
        print(f"{len(result['targets'])} targets, {count} problem{'' if count == 1 else 's'}.")
    if result["problems"] or any(target["problem"] for target in result["targets"]):
        raise typer.Exit(1)


def examine_engine(name: str) -> dict[str, Any]:
    """Import every target of an installed engine and compare its parameters with the known ones."""
    from specsync_core.engines.known import known_engine, points_of
    from specsync_core.engines.targets import check_target, targets_of
    from specsync_core.errors import EngineError
    from specsync_core.manager import plugin_manager

    engine = known_engine(name)
    installed = engine.installed()
    if installed is None:
        raise EngineError(f"{name} is not installed here. Known versions: {', '.join(engine.versions)}.")
    candidates = points_of(engine, installed, detect_platform(), plugin_manager())
    targets = [
        {"target": path, "problem": check_target(path, signature)} for path, signature in targets_of(candidates.points)
    ]
    return {
        "engine": name,
        "version": installed,
        "support": engine.support(installed),
        "targets": targets,
        "problems": list(candidates.problems),
    }
