"""``specsync demo``"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsync_core.cli.output import JsonOption, UsageError, print_json, print_table
from specsync_core.settings import read_environment, trial_number, unused_settings

if TYPE_CHECKING:
    from rich.progress import Progress

    from specsync_core.demo.options import Setup
    from specsync_core.demo.story import Part, Story


def demo(
    algorithm: Annotated[
        str, typer.Option(help="Speculative algorithm: dspark, dflash, eagle, or a plugin's.")
    ] = "dspark",
    ranks: Annotated[int, typer.Option(help="Tensor-parallel ranks, each a process: 2, 4 or 8.")] = 2,
    sites: Annotated[str, typer.Option(help="Policy of the part with sync on, e.g. 'all,-dspark-plan'.")] = "all",
    fault: Annotated[
        str | None,
        typer.Option(
            help="Fault on purpose, e.g. 'dspark-accept-greedy:rank=1:step=8:add=1'; 'none' injects none."
            " Default: the accepted length on rank 1 grows by one at step 8; where a GPU accepts inside a graph"
            " (--folded, DSpark, greedy), its plan is cut to one token from there on."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps of each run.")] = 32,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 decodes greedily.")] = 0.0,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, a GPU per rank).")] = "cpu",
    prompts: Annotated[Path | None, typer.Option(help="UTF-8 text, a prompt a line. Default: a few that ship.")] = None,
    train: Annotated[
        int, typer.Option(help="First fit target and draft on the text that ships, so many steps each.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights and generators.")] = 0,
    transport: Annotated[str, typer.Option(help="How decisions travel: auto, group, grouped or one-shot.")] = "auto",
    folded: Annotated[bool, typer.Option("--folded", help="Draft and accept as captured graphs do.")] = False,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="One run under SPECSYNC_SITES (else --sites), and no story: 0 when all ranks' tokens are equal."
            " Under `specsync bisect` this goes without saying.",
        ),
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Keep recordings and dumps of runs that went wrong, with --once of every run, for `specsync doctor`.",
            envvar="SPECSYNC_DUMP_DIR",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Watch tensor-parallel ranks disagree, hang, be diagnosed, and then be kept in agreement.

    Exit code 0: the story held; 1: it did not, e.g. under a policy that is too narrow; 2: usage.
    """
    from specsync_core.demo.options import DemoError, Options, prepare
    from specsync_core.demo.story import tell
    from specsync_core.errors import PolicyError

    options = Options(
        algorithm, ranks, sites, fault, steps, temperature, device, prompts, train, seed, transport, folded, keep
    )
    if "SPECSYNC_FAULTS" in unused_settings():
        print("specsync: the demo does not read SPECSYNC_FAULTS; its faults are given by --fault.", file=sys.stderr)
    try:
        setup = prepare(options)
    except (DemoError, PolicyError) as error:
        raise UsageError(str(error)) from error
    if once or trial_number() is not None:
        _run_once(setup, as_json)
        return
    with _ending_in_order(), _Screen(show_parts=not as_json) as screen:
        story = tell(setup, screen)
    if as_json:
        print_json(_as_data(story, options, setup.fault_text))
    else:
        _print_end(story, trained=train > 0)
    if not story.held:
        raise typer.Exit(1)


def _run_once(setup: Setup, as_json: bool) -> None:
    """Print what was generated, as a hash, and whether all ranks generated it."""
    from specsync_core.demo.once import digest, run_once

    named = read_environment().sites
    with _ending_in_order(), _Screen(show_parts=False) as screen:
        ended = run_once(setup, setup.options.sites if named is None else named.value, screen.working)
    if as_json:
        print_json({**ended.as_dict(), "tokens": digest(ended.tokens)})
    else:
        print(f"tokens {digest(ended.tokens)}")
        print("\n".join(ended.lines()), file=sys.stderr)
    if not ended.equal:
        raise typer.Exit(1)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Turn requests to end into an exception, so that ranks are ended and files removed."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Screen:
    """Progress on stderr while ranks run; each part on stdout as soon as it is told."""

    def __init__(self, show_parts: bool) -> None:
        self._show_parts = show_parts
        self._progress: Progress | None = None

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def working(self, what: str, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = _new_progress()
            self._progress.start()
            self._progress.add_task(what, total=total)
        self._progress.update(self._progress.task_ids[0], description=what, completed=done, total=total)

    def part(self, part: Part) -> None:
        self._stop()
        if self._show_parts:
            mark = {True: "held", False: "DID NOT HOLD", None: ""}[part.held]
            print(f"\n{part.title}{f'  [{mark}]' if mark else ''}")
            for line in part.lines:
                print(f"    {line}")

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _new_progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print_end(story: Story, trained: bool) -> None:
    print()
    rows = [
        (
            run.name,
            run.sites,
            str(run.steps),
            _or_dash(run.tokens_per_step, ".2f"),
            _or_dash(run.step_ms, ".1f"),
            _or_dash(run.healed, "d"),
            run.outcome,
        )
        for run in story.runs
    ]
    print_table(("run", "sites", "steps", "tokens/step", "ms/step", "healed", "outcome"), rows)
    hint = "" if trained else " (untrained weights make noise; --train 100 makes it resemble English)"
    print(f"\nGenerated by the unfaulted run{hint}:")
    for prompt, text in story.samples:
        print(f"    {prompt}|{text}")
    print(f"\n{'The story held' if story.held else 'The story did NOT hold'}, in {story.seconds:.0f} s.")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _as_data(story: Story, options: object, fault: str) -> dict[str, object]:
    from dataclasses import asdict

    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {
        "held": story.held,
        "seconds": round(story.seconds, 2),
        "options": {**given, "fault": fault},
        "parts": {part.key: _part_as_data(part) for part in story.parts},
        "runs": [asdict(run) for run in story.runs],
        "samples": [{"prompt": prompt, "text": text} for prompt, text in story.samples],
    }


def _part_as_data(part: Part) -> dict[str, object]:
    return {"title": part.title, "held": part.held, "lines": part.lines, **part.data}
