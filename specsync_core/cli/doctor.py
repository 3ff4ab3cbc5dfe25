"""``specsync doctor``"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specsync_core.cli.output import JsonOption, UsageError, print_json, writing
from specsync_core.cli.plan import detect_platform
from specsync_core.errors import did_you_mean


def doctor(
    directory: Annotated[
        Path | None,
        typer.Argument(help="The ranks' recordings and dumps: a run's directory, or SPECSYNC_DUMP_DIR."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Instead: check every target in this installed engine, and that it loads specsync, without a start."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the report as one page, with a timeline.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what diverged first in a run that was recorded, or whether an installed engine can be synchronised.

    Exit code 0: nothing was found; 1: a finding; 2: misuse, e.g. a directory without recordings.
    """
    if (directory is None) == (engine is None):
        from specsync_core.engines.known import ENGINES

        raise UsageError(
            "give either a directory of recordings, such as SPECSYNC_DUMP_DIR of the run, or --engine NAME, with"
            f" {' or '.join(ENGINES)}."
        )
    if engine is not None:
        if html is not None:
            raise UsageError("--html goes with a directory of recordings, not with --engine.")
        _examine_engine(engine, as_json)
    if directory is not None:
        _diagnose(directory, html, as_json)


def _diagnose(directory: Path, html: Path | None, as_json: bool) -> None:
    from specsync_core.diagnostics.page import Report, render_page
    from specsync_core.diagnostics.runs import examine_runs

    if not directory.exists():
        raise UsageError(
            f"{directory}: no such directory of recordings. A run writes one where SPECSYNC_DUMP_DIR says."
        )
    runs, older = examine_runs(directory)
    if not any(run.evidence.recordings or run.evidence.notes for run in runs):
        raise UsageError(
            f"no rank-*.specsync or *.dump.json in {directory}: was SPECSYNC_DUMP_DIR set before the start,"
            " on every rank, and is this its directory?"
        )
    if html is not None:
        page = render_page([Report(str(run.path), run.diagnosis, run.evidence) for run in runs])
        with writing("--html", html):
            html.write_text(page, encoding="utf-8")
    if as_json:
        found = [{"path": str(run.path), **run.diagnosis.to_dict()} for run in runs]
        print_json(found[0] if len(found) == 1 else found)
    else:
        for number, run in enumerate(runs):
            if len(runs) > 1:
                print(f"{chr(10) if number else ''}{run.path.name}, global ranks {run.ranks}:")
            print(run.diagnosis.text)
    for path in older:
        print(f"An older run: specsync doctor {path}", file=sys.stderr)
    if any(run.diagnosis.is_finding for run in runs):
        raise typer.Exit(1)


def _examine_engine(name: str, as_json: bool) -> None:
    from specsync_core.engines.known import ENGINES

    if name not in ENGINES:
        raise UsageError(
            f"--engine: unknown engine '{name}'{did_you_mean(name, ENGINES)}. Known: {', '.join(ENGINES)}."
        )
    result = examine_engine(name)
    found = [*result["problems"], *(target["problem"] for target in result["targets"] if target["problem"])]
    if as_json:
        print_json(result)
    else:
        print(f"{result['engine']} {result['version']}: {result['support']}")
        for target in result["targets"]:
            said = target["target"] if target["problem"] is None else " ".join(target["problem"].split())
            print(f"  {'ok     ' if target['problem'] is None else 'PROBLEM'}  {said}")
        for problem in result["problems"]:
            print(f"  PROBLEM  {problem}")
        if missing := sorted(set(re.findall(r"No module named '([^']+)'", "\n".join(found)))):
            print(f"Not installed here: {', '.join(missing)}. Install that first: other problems may come from it.")
        print(f"{len(result['targets'])} targets, {len(found)} problem{'' if len(found) == 1 else 's'}.")
    if found:
        raise typer.Exit(1)


def examine_engine(name: str) -> dict[str, Any]:
    """Import every target of an installed engine, compare its parameters, and see that the engine loads the plugin."""
    from specsync_core.engines.known import known_engine, points_of
    from specsync_core.engines.targets import check_target, targets_of
    from specsync_core.errors import EngineError
    from specsync_core.manager import plugin_manager

    engine = known_engine(name)
    installed = engine.installed()
    if installed is None:
        raise EngineError(
            f"{name} is not installed here. Known versions: {', '.join(engine.versions)}. Run this command of the"
            " environment that the engine is installed in."
        )
    candidates = points_of(engine, installed, detect_platform(), plugin_manager())
    targets = [
        {"target": path, "problem": check_target(path, signature)} for path, signature in targets_of(candidates.points)
    ]
    return {
        "engine": name,
        "version": installed,
        "support": engine.support(installed),
        "targets": targets,
        "problems": [*filter(None, [engine.loading_problem()]), *candidates.problems],
    }
