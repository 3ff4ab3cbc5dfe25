"""What each rank did when, as bars for a picture. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specsync_core.diagnostics.divergence import Divergence
from specsync_core.diagnostics.progress import RankState
from specsync_core.diagnostics.recording import Header, Record, Recording

MOST_BARS = 400
"""Bars per rank; the newest are kept."""

Kind = Literal["site", "differs", "healed", "wait", "open"]
"""``differs``: the first divergence; ``healed``: the first that a sync healed; ``open``: not left when last seen."""


@dataclass(frozen=True)
class Bar:
    """A stretch of time that one rank spent in a site's call or a marked wait."""

    begin_s: float
    """Wall time."""
    end_s: float
    kind: Kind
    is_wait: bool
    title: str


@dataclass(frozen=True)
class Lane:
    """One rank's bars, oldest first."""

    group_rank: int
    bars: Sequence[Bar]
    left_out: int
    """Older bars that are not shown."""


def lanes(
    recordings: Mapping[int, Recording],
    states: Mapping[int, RankState],
    seen_s: Mapping[int, float],
    divergence: Divergence | None,
    healed: Divergence | None,
) -> list[Lane]:
    """Lay out every rank's recent past.

    Args:
        seen_s: wall time of each rank's dump, if it left one: until then at least it was where it was.
    """
    last_s = [recording.records[-1].wall_s for recording in recordings.values() if recording.records]
    newest_s = max([*last_s, *seen_s.values()], default=0.0)
    marks: list[tuple[Divergence, Kind]] = []
    if healed is not None:
        marks.append((healed, "healed"))
    if divergence is not None:
        marks.append((divergence, "differs"))
    found = []
    for rank, recording in recordings.items():
        wait = states[rank].wait
        until_s = newest_s if wait is None or wait.seconds is None else max(newest_s, wait.since_s + wait.seconds)
        bars = list(_bars(recording, until_s, marks))
        found.append(Lane(rank, bars[-MOST_BARS:], max(0, len(bars) - MOST_BARS)))
    return found


def _bars(recording: Recording, until_s: float, marks: Sequence[tuple[Divergence, Kind]]) -> Iterator[Bar]:
    header = recording.header
    open_records: dict[tuple[str, int, int], Record] = {}
    bars: list[Bar] = []
    for record in recording.records:
        if record.tensor_index:
            continue  # a call is one bar, whatever the number of its tensors
        if record.kind in ("before", "wait-begin"):
            open_records[_key(record)] = record
        elif (begin := open_records.pop(_key(record), None)) is not None:
            bars.append(_bar(header, begin, record.wall_s, marks, is_open=False))
    bars += [_bar(header, begin, until_s, marks, is_open=True) for begin in open_records.values()]
    yield from sorted(bars, key=lambda bar: (bar.begin_s, -bar.end_s))


def _key(record: Record) -> tuple[str, int, int]:
    return ("wait" if record.kind.startswith("wait") else "site"), record.site_number, record.call


def _bar(
    header: Header, begin: Record, end_s: float, marks: Sequence[tuple[Divergence, Kind]], *, is_open: bool
) -> Bar:
    is_wait = begin.kind == "wait-begin"
    what = " ".join(filter(None, (begin.what, begin.detail))) if is_wait else header.slug(begin.site_number)
    call = "" if is_wait else f", call {begin.call}"
    kind: Kind = "open" if is_open else "wait" if is_wait else "site"
    for found, mark in marks:
        if not is_wait and (found.site, found.step) == (what, begin.step) and found.call in (0, begin.call):
            kind = mark
    ending = "not left" if is_open else f"{1e3 * (end_s - begin.wall_s):.2f} ms"
    return Bar(begin.wall_s, max(end_s, begin.wall_s), kind, is_wait, f"{what}{call}, step {begin.step}: {ending}")
