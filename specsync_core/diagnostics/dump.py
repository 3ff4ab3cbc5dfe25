"""A dump: what one rank knows at one moment, as versioned JSON that says what its own fields mean. No torch.

The recording (`specsync_core.diagnostics.recording`) is a binary ring that a crash leaves behind; a dump holds the
ring's records, and what only the living process knows: counters, Python stacks, generators. Either is enough for
the doctor.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specsync_core.bounded_file import MAX_RECORDING_BYTES, read_bounded
from specsync_core.diagnostics.recording import (
    CAPTURING,
    FAILED,
    HAS_VALUES,
    KIND_NAMES,
    SKIPPED,
    Record,
    Recording,
    RecordingError,
    StrPath,
    parse_header,
)
from specsync_core.whole_file import replace_whole

FORMAT, VERSION = "specsync-dump", 1
SUFFIX = ".dump.json"
MOST_FRAMES, MOST_THREADS = 48, 64

ABOUT = {
    "format": f"always {FORMAT}",
    "version": "of this format; a reader refuses others",
    "reason": "why this rank wrote it",
    "written_s": "wall time, seconds since the epoch",
    "header": "who wrote it: group rank, global ranks of the group's members, plan digest, run, process, versions; and"
    " the sites by number: slug, kind, names of their tensors, cause",
    "inside": "what the rank was inside of, outermost first: waits that the engine marked, and a site's call",
    "last": "the newest record, in words",
    "dropped_records": "how many records the ring had overwritten: an earlier divergence would not be seen in it",
    "columns": "the names of a record's fields; a record has no time zone, no units but seconds",
    "records": "what the ring held, oldest first, a row for each; rows are as wide as columns",
    "kinds": "before: own values before the sync; after: what everything is derived from; wait-begin, wait-end: of the"
    " engine's own waits, `call` numbers them and payload is what and which, with a zero byte between; raised: an"
    " exception left the site's call, payload is its type; closed: the end",
    "flags": f"added up: {HAS_VALUES} has values, {CAPTURING} inside a graph capture, {FAILED} left by an exception,"
    f" {SKIPPED} this rank left the sync out",
    "payload": "the first bytes of the tensor, little endian, in hexadecimal; crc32 is of all its bytes",
    "stats": "counters by site (specsync_core.counters.SiteStats); null where they could not be read in time",
    "stacks": "Python frames by thread, innermost last: file, line, function",
    "generators": "seeds and states of this process's generators now; header has them as of the start",
}
_COLUMNS = (
    *("sequence", "kind", "flags", "tensor_index", "tensor_count", "site_number", "step", "call", "wall_s"),
    *("monotonic_s", "dtype", "ndim", "dims", "numel", "crc32", "payload"),
)


@dataclass(frozen=True)
class Dump:
    """What a dump adds to the rank's recording."""

    path: Path
    reason: str
    written_s: float
    recording: Recording
    inside: tuple[str, ...] = ()
    stats: Mapping[str, Any] | None = None
    """By slug, `SiteStats` as a dict."""
    stacks: Mapping[str, list[str]] = field(default_factory=dict)
    generators: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_stall(self) -> bool:
        """It was written because this rank, or a peer, did not get on."""
        return "no progress" in self.reason

    def stacks_of(self, thread: str) -> list[str]:
        """The frames of the thread with this name, outermost first; nothing when there is none."""
        return next((lines for name, lines in self.stacks.items() if name.startswith(f"{thread} (")), [])


def dump_path(directory: StrPath, group_rank: int) -> Path:
    """Where a rank's dump lies beside its recording."""
    return Path(directory) / f"rank-{group_rank:04d}{SUFFIX}"


def write_dump(
    path: Path, recording: Recording, about: Mapping[str, Any], *, reason: str, inside: tuple[str, ...],
    stats: Mapping[str, Any] | None, generators: Mapping[str, Any], extra_stacks: Mapping[str, list[str]] | None = None,
) -> None:  # fmt: skip
    """Write a dump; an older one is replaced in one act, so that a reader sees one of the two whole.

    Args:
        about: the recorder's header.
        extra_stacks: more text to keep beside this process's Python stacks.
    """
    records = recording.records
    dropped = records[-1].sequence - len(records) if records else 0
    content = {
        "format": FORMAT,
        "version": VERSION,
        "about": ABOUT,
        "reason": reason,
        "written_s": time.time(),
        "inside": list(inside),
        "last": in_words(recording, records[-1]) if records else "nothing was recorded",
        "header": {**about, "slot_count": recording.header.slot_count},
        "dropped_records": dropped,
        "stats": stats,
        "stacks": {**python_stacks(), **(extra_stacks or {})},
        "generators": generators,
        "columns": _COLUMNS,
        "records": [_row(record) for record in records],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_whole(path, json.dumps(content, separators=(",", ":")))


def in_words(recording: Recording, record: Record) -> str:
    """Say what a record is: ``after dspark-plan, call 9, step 8``."""
    if record.kind in ("before", "after", "raised"):
        return f"{record.kind} {recording.header.slug(record.site_number)}, call {record.call}, step {record.step}"
    what = " ".join(filter(None, (record.what, record.detail)))
    return f"{record.kind} {record.call}, step {record.step}{': ' + what if what else ''}"


def python_stacks() -> dict[str, list[str]]:
    """Every thread's Python frames, outermost first; locals are not in them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = list(sys._current_frames().items())[:MOST_THREADS]
    return {
        f"{names.get(ident, 'unnamed')} ({ident})": [
            f"{entry.filename}:{entry.lineno} in {entry.name}"
            for entry in traceback.extract_stack(frame)[-MOST_FRAMES:]
        ]
        for ident, frame in frames
    }


def read_dump(path: StrPath) -> Dump:
    """Read a dump.

    Raises:
        RecordingError: it cannot be read, is no dump, is of another version, or does not hold what it should.
    """
    path = Path(path)
    try:
        content = json.loads(read_bounded(path, MAX_RECORDING_BYTES))
    except OSError as error:
        raise RecordingError(f"{path}: the dump cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path}: not a dump, or cut off: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecordingError(f"{path}: not a dump (its format is not {FORMAT}).")
    if content.get("version") != VERSION:
        raise RecordingError(
            f"{path}: dump of version {content.get('version')}; this specsync reads version {VERSION}."
        )
    try:
        return _parse(path, content)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RecordingError(f"{path}: the dump does not hold what it should: {error!r}.") from error


def _parse(path: Path, content: Mapping[str, Any]) -> Dump:
    header = parse_header(content["header"], int(content["header"]["slot_count"]))
    records = tuple(_records(content))
    last = records[-1].sequence if records else 0
    recording = Recording(path, header, records, 0, max(0, min(last, header.slot_count) - len(records)), False)
    stats = content.get("stats")
    return Dump(
        path=path,
        reason=str(content["reason"]),
        written_s=float(content["written_s"]),
        recording=recording,
        inside=tuple(map(str, content.get("inside", ()))),
        stats=dict(stats) if stats is not None else None,
        stacks={str(name): [str(line) for line in lines] for name, lines in content.get("stacks", {}).items()},
        generators=dict(content.get("generators", {})),
    )


def _row(record: Record) -> list[Any]:
    return [
        record.sequence, record.kind, record.flags, record.tensor_index, record.tensor_count, record.site_number,
        record.step, record.call, record.wall_s, record.monotonic_s, record.dtype, record.ndim, record.dims,
        record.numel, record.crc32, record.payload.hex(),
    ]  # fmt: skip


def _records(content: Mapping[str, Any]) -> Iterator[Record]:
    places = {name: place for place, name in enumerate(content["columns"])}
    order = [places[name] for name in _COLUMNS]
    for row in content["records"]:
        values = [row[place] for place in order]
        if values[1] not in KIND_NAMES.values():
            raise ValueError(f"unknown kind of record {values[1]!r}")
        numbers = (values[0], *values[2:10], values[11], *values[12], *values[13:15])
        if not all(isinstance(number, (int, float)) for number in numbers) or not isinstance(values[10], str):
            raise ValueError(f"a record's fields are of other types: {str(row)[:80]}")
        values[12:] = tuple(values[12]), *values[13:15], bytes.fromhex(values[15])
        yield Record(*values)
