"""``specsync bisect``"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import specsync_core
from specsync_core.cli.output import JsonOption, UsageError, print_json

if TYPE_CHECKING:
    from specsync_core.bisect.report import Asked, Options, Report
    from specsync_core.bisect.run import Run
    from specsync_core.bisect.trials import Trial
    from specsync_core.registry import Registry

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""The first word that is no option begins the command, whose options are its own."""

UNSURE = 3
"""Exit code where sets were found, and --runs was too few to be as sure as asked for."""

DEFAULT_RUNS, DEFAULT_CONFIDENCE, DEFAULT_PARALLEL = 60, 0.99, 1


def bisect(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND ARGS...",
            help="A program that loads the plugin, and ends: 0 is good.",
            show_default=False,
        ),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="The candidates, as a policy: 'all' (default), 'dspark', 'rng,-dspark-plan' ...")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a run hangs. Default: 600, then three times the longest good run."),
    ] = None,
    runs: Annotated[int | None, typer.Option(help=f"Most runs of one set of sites. Default: {DEFAULT_RUNS}.")] = None,
    confidence: Annotated[
        float | None, typer.Option(help=f"Of the answer, 0.5 to 0.9999. Default: {DEFAULT_CONFIDENCE}.")
    ] = None,
    parallel: Annotated[int | None, typer.Option(help=f"Runs at the same time. Default: {DEFAULT_PARALLEL}.")] = None,
    expect: Annotated[Path | None, typer.Option(help="The standard output that a good run has, to the byte.")] = None,
    report: Annotated[Path, typer.Option(help="Where the report is kept.")] = Path("specsync-bisect.json"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the report, whose command it takes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest sets of sites that must be on, by running a command again and again.

    A run is good when it ends with 0; it is bad when it fails, hangs, or prints
    something else than --expect. With all sites on it must be good, and with
    the candidates off bad. How often it is bad does not matter: each verdict
    rests on as many runs as its confidence needs. A run gets SPECSYNC_SITES,
    SPECSYNC_STATS_DIR and SPECSYNC_TRIAL, a number that is new in every run,
    for ports. Ctrl-C ends all runs and saves the report; --resume goes on.

    Examples:

      specsync bisect -- specsync demo --steps 16

      specsync bisect --sites vllm --timeout 300 -- python serve_and_load.py

      specsync bisect --sites rng --expect clean.txt --parallel 2 -- ./run.sh

      specsync bisect --resume

    Exit code 0: every minimal set was found. 1: an end point is not so, or
    cannot be tested. 2: usage. 3: the sets found are not as sure as asked
    for. 128 and the signal's number, as 130 after Ctrl-C: interrupted.
    """
    from contextlib import ExitStack

    from specsync_core.bisect.lock import hold
    from specsync_core.bisect.run import Run, Task
    from specsync_core.errors import BisectError
    from specsync_core.manager import load_registry, plugin_manager

    registry = load_registry(plugin_manager())
    with ExitStack() as held:
        try:
            given = _Given(command or [], sites, timeout, runs, confidence, parallel, expect, report, resume, registry)
            held.enter_context(hold(report))
            asked, options, trials = given.settle()
            task = Task(asked, options, registry, report, specsync_core.__version__)
            session = Run(task, trials, lambda line: print(line, file=sys.stderr, flush=True))
            session.begin()
        except BisectError as error:
            raise UsageError(str(error)) from error
        _warn_of_environment()
        end = session.finish()
    _show(end, report, session, as_json)


class _Given:
    """The options as given, and what they come to with those of a report that is resumed."""

    def __init__(
        self,
        command: Sequence[str],
        sites: str | None,
        timeout: float | None,
        runs: int | None,
        confidence: float | None,
        parallel: int | None,
        expect: Path | None,
        report: Path,
        resume: bool,
        registry: Registry,
    ) -> None:
        self.command = list(command)
        self.sites, self.expect, self.registry = sites, expect, registry
        self.options = {"timeout_s": timeout, "runs": runs, "confidence": confidence, "parallel": parallel}
        self.report, self.resume = report, resume

    def settle(self) -> tuple[Asked, Options, tuple[Trial, ...]]:
        """Check everything before anything runs."""
        from specsync_core.bisect.report import check_same, load_report, trials_to_go_on_with

        if not self.resume:
            if self.report.exists():
                raise UsageError(
                    f"{self.report} is there already. Go on from it with --resume, or give another --report."
                )
            return self._asked(None), self._options(None), ()
        old = load_report(self.report, specsync_core.__version__)
        asked, options = self._asked(old), self._options(old)
        check_same(old, asked, self.report)
        return asked, options, trials_to_go_on_with(old, options.runs)

    def _asked(self, old: Report | None) -> Asked:
        from specsync_core.bisect.report import Asked
        from specsync_core.bisect.run import fingerprint

        command = self.command or (list(old.asked.command) if old else [])
        if not command:
            raise UsageError("give a command behind `--`, e.g. `specsync bisect -- python serve_and_load.py`.")
        directory = (old.asked.directory if old else None) or str(Path.cwd())
        if not Path(directory).is_dir():
            raise UsageError(f"{directory}: the command ran in this directory, which is gone. Begin anew elsewhere.")
        program = os.path.join(directory, command[0]) if os.sep in command[0] else command[0]
        if shutil.which(program) is None:
            raise UsageError(f"{command[0]}: there is no such program. Give one and its arguments behind `--`.")
        expect = self.expect or (Path(old.asked.expect) if old and old.asked.expect else None)
        slugs = (
            old.asked.sites if old and self.sites is None else self._slugs("all" if self.sites is None else self.sites)
        )
        return Asked(
            command=tuple(command),
            sites=tuple(slugs),
            expect=None if expect is None else str(expect.absolute()),
            expect_sha256=None if expect is None else fingerprint(expect),
            directory=directory,
        )

    def _slugs(self, text: str) -> list[str]:
        """The candidates; a check of derived state decides nothing, so nothing can be told by turning it off."""
        from specsync_core.errors import PolicyError
        from specsync_core.policy import parse_sites

        if ":" in text:
            raise UsageError(f"--sites: '{text}' gives a mode; candidates have none, each run turns them on and off.")
        try:
            named = parse_sites(text, self.registry, "--sites")
        except PolicyError as error:
            raise UsageError(str(error)) from error
        slugs = [site.slug for site in self.registry.sites if site in named and site.kind != "check"]
        if not slugs:
            only = " but checks, which change nothing" if named else ""
            raise UsageError(f"--sites: '{text}' selects no site{only}. List the sites with `specsync sites`.")
        return slugs

    def _options(self, old: Report | None) -> Options:
        from specsync_core.bisect.report import Options

        defaults = old.options if old else Options(
            runs=DEFAULT_RUNS, confidence=DEFAULT_CONFIDENCE, parallel=DEFAULT_PARALLEL
        )  # fmt: skip
        given = {name: value for name, value in self.options.items() if value is not None}
        options = defaults.model_copy(update=given)
        if options.timeout_s is not None and not 0 < options.timeout_s < float("inf"):
            raise UsageError(f"--timeout takes seconds above 0, not {options.timeout_s:g}.")
        if options.runs < 1:
            raise UsageError(f"--runs takes 1 or more, not {options.runs}.")
        if not 0.5 <= options.confidence <= 0.9999:
            raise UsageError(f"--confidence takes 0.5 to 0.9999, not {options.confidence:g}.")
        if options.parallel < 1:
            raise UsageError(f"--parallel takes 1 or more, not {options.parallel}.")
        return options


def _warn_of_environment() -> None:
    from specsync_core.settings import read_environment

    if (sites := read_environment().sites) is not None:
        print(f"note: {sites.origin}={sites.value!r} of this shell is replaced in every run.", file=sys.stderr)


def _show(end: Report, path: Path, session: Run, as_json: bool) -> None:
    if as_json:
        print_json(end.model_dump(mode="json"))
    elif end.summary:
        print("\n".join(end.summary))
    if end.status == "interrupted":
        again = "specsync bisect --resume"
        if path.absolute() != Path("specsync-bisect.json").absolute():
            again += f" --report {shlex.quote(str(path))}"
        print(f"interrupted; every run was ended. To go on: {again}", file=sys.stderr)
        raise typer.Exit(128 + session.signal)
    print(f"report: {path}", file=sys.stderr)
    if end.status != "found":
        raise typer.Exit(1)
    if session.bisection.verdict is not None and not session.bisection.verdict.sure:
        raise typer.Exit(UNSURE)
