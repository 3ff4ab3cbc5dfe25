"""The saved report: everything that a bisection needs to go on, and its answer. Written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from specsync_core.bisect.trials import Record, Trial
from specsync_core.bounded_file import MAX_RECORDING_BYTES, read_bounded
from specsync_core.errors import BisectError
from specsync_core.whole_file import replace_whole

KIND = "specsync-bisect"
VERSION = 1
DEFAULT_PATH = Path("specsync-bisect.json")


class Asked(Record):
    """What a bisection is about: trials of another one say nothing about it."""

    command: tuple[str, ...] = Field(strict=False)
    sites: tuple[str, ...] = Field(strict=False)
    """Slugs of the candidates."""
    expect: str | None = None
    """The path of the expected output."""
    expect_sha256: str | None = None
    directory: str | None = None
    """Where the command runs."""

    def differences(self, other: Asked) -> list[str]:
        """Name what another one asks otherwise."""
        pairs = zip(self.model_dump().items(), other.model_dump().values(), strict=True)
        return [
            f"{name} was {_shown(theirs)} and is {_shown(mine)}" for (name, mine), theirs in pairs if mine != theirs
        ]


class Options(Record):
    """What may change when a bisection is resumed."""

    timeout_s: float | None = None
    runs: int
    confidence: float
    parallel: int


class SetFound(Record):
    """A minimal set, with its runs."""

    sites: tuple[str, ...] = Field(strict=False)
    bad: int
    runs: int
    confirmed: bool


class SetChecked(Record):
    """What was on while everything else was off, with its runs, none of them bad."""

    kept_on: tuple[str, ...] = Field(strict=False)
    good: int
    good_by_counts: int
    bad_rate_under: float
    """At the confidence."""
    status: str


class Answer(Record):
    """The verdict in data; `Report.summary` has it in words."""

    sets: tuple[SetFound, ...] = Field(default=(), strict=False)
    checks: tuple[SetChecked, ...] = Field(default=(), strict=False)
    bad_rate_looked_for: float | None = None


class Report(Record):
    """The file."""

    kind: Literal["specsync-bisect"] = "specsync-bisect"
    version: Literal[1] = 1
    specsync: str
    """The version that made it."""
    asked: Asked
    options: Options
    status: Literal["running", "interrupted", "stopped", "found", "on-is-bad", "off-is-good", "untestable"]
    summary: tuple[str, ...] = Field(default=(), strict=False)
    answer: Answer | None = None
    trials: tuple[Trial, ...] = Field(default=(), strict=False)


def save_report(report: Report, path: Path) -> None:
    """Write the report; an older one is replaced whole, and it outlasts a machine that goes down.

    Raises:
        BisectError: it cannot be written.
    """
    try:
        replace_whole(path, json.dumps(_plain(report), indent=1) + "\n", durable=True)
    except OSError as error:
        raise BisectError(
            f"{path}: the report cannot be written: {error.strerror or error}. Give another place with --report."
        ) from error


def _plain(report: Report) -> Any:
    content = report.model_dump(mode="json")
    for trial in content["trials"]:
        trial["off"] = sorted(trial["off"])  # a set has no order of its own
    return content


def load_report(path: Path, specsync: str) -> Report:
    """Read a report to go on with.

    Raises:
        BisectError: there is none, or it cannot be gone on with; the message says why.
    """
    try:
        content = json.loads(read_bounded(path, MAX_RECORDING_BYTES))
    except FileNotFoundError:
        raise BisectError(f"{path}: there is no report to resume. Leave out --resume to begin.") from None
    except OSError as error:
        raise BisectError(f"{path}: the report cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise BisectError(f"{path}: this is no JSON ({error}), so no report. {_ANEW}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise BisectError(f"{path}: this is no report of `specsync bisect`. {_ANEW}")
    if content.get("version") != VERSION:
        raise BisectError(
            f"{path}: the report has version {content.get('version')!r}; this specsync reads version {VERSION}. {_ANEW}"
        )
    if content.get("specsync") != specsync:
        raise BisectError(
            f"{path}: the report was made by specsync {content.get('specsync')}, and this is {specsync}: their"
            f" sites may differ. {_ANEW}"
        )
    try:
        return Report.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg'][0].lower()}{each['msg'][1:]}" for each in error.errors()
        ]
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise BisectError(f"{path}: the report is damaged: {'; '.join(problems[:3])}{more}. {_ANEW}") from error


_ANEW = "To begin anew, give another --report, or move this file away."


def check_same(report: Report, asked: Asked, path: Path) -> None:
    """Refuse a report of another bisection.

    Raises:
        BisectError: names what differs.
    """
    if differences := asked.differences(report.asked):
        raise BisectError(f"{path}: the report is of another bisection: {'; '.join(differences)}. {_ANEW}")


def trials_to_go_on_with(report: Report, runs: int) -> tuple[Trial, ...]:
    """Return the trials, without those that ended the bisection at an end point: what was wrong may be mended by now.

    They stay as aborted ones, for their numbers are used up. With all off good, more ``runs`` go on from what there is.
    """

    def is_refused(trial: Trial) -> bool:
        if report.status == "untestable":
            return trial.outcome == "untestable"
        if report.status == "on-is-bad":
            return trial.outcome == "bad" and not trial.off
        if report.status == "off-is-good" and runs <= report.options.runs:
            return trial.outcome == "good" and trial.off == frozenset(report.asked.sites)
        return False

    return tuple(
        trial.model_copy(update={"outcome": "aborted", "counts": None, "detail": f"{trial.detail}; tried again"})
        if is_refused(trial)
        else trial
        for trial in report.trials
    )


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    text = " ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    return f"'{text if len(text) <= 100 else text[:97] + '...'}'"
