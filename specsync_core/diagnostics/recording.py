"""The recording: one rank's recent decisions and waits in a file that outlives the rank. No torch.

Layout, little endian: a fixed preamble (`PREAMBLE`), a JSON header of ``header_bytes`` bytes, and from
``ring_offset`` on a ring of ``slot_count`` slots. A record with sequence number n (from 1) lies in slot
(n - 1) modulo ``slot_count`` and ends with a CRC of itself, so that a reader of a live or torn file
recognises what is whole. A call with three tensors writes three records before and three after the sync.

Recordings hold token ids and lengths (the sites' tensors), never text of prompts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Union
from zlib import crc32

from specsync_core.bounded_file import MAX_RECORDING_BYTES, read_bounded
from specsync_core.errors import SpecSyncError

MAGIC = b"SPECSYNC"
VERSION = 1
SUFFIX = ".specsync"

PREAMBLE = struct.Struct("<8sIIQQII")
"""Magic, version, slot_bytes, slot_count, ring_offset, header_bytes, CRC of the header."""

MAX_WORLD_SIZE = 1 << 16

VALUE_BYTES = 128
"""Bytes kept of each tensor: the first 16 int64 or float64, 32 int32, 64 bfloat16."""

BODY = struct.Struct(f"<QBBBBIqQddBBHIIIIQI{VALUE_BYTES}s")
CRC = struct.Struct("<I")
SLOT_BYTES = BODY.size + CRC.size
_EMPTY = bytes(SLOT_BYTES)
BODY_FIELDS = (
    *("sequence", "kind", "flags", "tensor_index", "tensor_count", "site_number", "step", "call"),
    *("wall_s", "monotonic_s", "dtype", "ndim", "value_bytes", "dim0", "dim1", "dim2", "dim3"),
    *("numel", "crc32", "payload"),
)

BEFORE, AFTER, WAIT_BEGIN, WAIT_END, CLOSED, RAISED = 1, 2, 3, 4, 5, 6
HAS_VALUES, CAPTURING, FAILED, SKIPPED = 1, 2, 4, 8

RecordKind = Literal["before", "after", "wait-begin", "wait-end", "closed", "raised"]
KIND_NAMES: dict[int, RecordKind] = {
    BEFORE: "before",
    AFTER: "after",
    WAIT_BEGIN: "wait-begin",
    WAIT_END: "wait-end",
    CLOSED: "closed",
    RAISED: "raised",
}

Value = Union[int, float, bool]  # noqa: UP007 (evaluated at run time)
StrPath = Union[str, "PathLike[str]"]

# (name, bytes per element, struct letter or None). The position is the code in the file: append only.
DTYPES: tuple[tuple[str, int, str | None], ...] = (
    ("unknown", 0, None),
    ("bool", 1, "?"),
    ("uint8", 1, "B"),
    ("int8", 1, "b"),
    ("int16", 2, "h"),
    ("int32", 4, "i"),
    ("int64", 8, "q"),
    ("float16", 2, "e"),
    ("bfloat16", 2, None),
    ("float32", 4, "f"),
    ("float64", 8, "d"),
    ("uint16", 2, "H"),
    ("uint32", 4, "I"),
    ("uint64", 8, "Q"),
    ("float8_e4m3fn", 1, None),
    ("float8_e5m2", 1, None),
    ("float8_e4m3fnuz", 1, None),
    ("float8_e5m2fnuz", 1, None),
)
DTYPE_CODES = {name: code for code, (name, _, _) in enumerate(DTYPES)}


class RecordingError(SpecSyncError, ValueError):
    """A file is not a recording, is of another version, or its header is damaged."""


@dataclass(frozen=True)
class SiteEntry:
    """What a recording knows of a site: enough to read it without the registry."""

    slug: str
    kind: str
    """``broadcast``, ``consensus`` or ``check``."""
    tensors: tuple[str, ...]
    cause: str = ""
    """Why ranks may differ: ``memory``, ``rng``, ``float``, ``host``."""


@dataclass(frozen=True)
class Header:
    """Who wrote a recording, and under what plan."""

    version: int
    group_rank: int
    world_size: int
    ranks: tuple[int, ...]
    """Global ranks of the group's members, by group rank."""
    plan_digest: str
    run_id: str
    """Equal on the ranks of one run; empty when the engine did not give one."""
    pid: int
    host: Mapping[str, Any]
    """Host name, boot id, pid namespace and the process's start time: whether ``pid`` can be asked after."""
    versions: Mapping[str, str | None]
    """``specsync``, ``python``, ``torch``, ``cuda``, ``nccl``; None for what is absent."""
    started_s: float
    """Wall time, seconds since the epoch."""
    slot_count: int
    sites: Mapping[int, SiteEntry]
    generators: Mapping[str, Any] = field(default_factory=dict)
    """Seeds and offsets of the process's generators when the recorder began (`specsync_core.diagnostics.facts`)."""

    modes: Mapping[str, str] = field(default_factory=dict)
    """By slug, as the plan had them at the start; empty when the recorder was not told."""

    def is_measurement(self, number: int) -> bool:
        """Whether ranks go on with a measurement of their own here, which differs by nature and decides nothing yet."""
        entry = self.sites.get(number)
        return entry is not None and entry.cause == "memory" and self.modes.get(entry.slug) in ("audit", "off")

    def is_consensus(self, number: int) -> bool:
        entry = self.sites.get(number)
        return entry is not None and entry.kind == "consensus"

    def slug(self, number: int) -> str:
        entry = self.sites.get(number)
        return entry.slug if entry else f"site-{number}"

    def tensor(self, number: int, index: int) -> str:
        entry = self.sites.get(number)
        if entry is None or index >= len(entry.tensors):
            return "value" if index == 0 else f"tensor-{index}"
        return entry.tensors[index]


@dataclass(frozen=True)
class Record:
    """One record. For a wait, ``call`` numbers the waits, and ``what``, ``detail`` say what is waited for."""

    sequence: int
    kind: RecordKind
    flags: int
    tensor_index: int
    tensor_count: int
    site_number: int
    step: int
    call: int
    """The site's call number on this rank, from 1."""
    wall_s: float
    monotonic_s: float
    dtype: str
    ndim: int
    dims: tuple[int, ...]
    """At most the first four sizes."""
    numel: int
    crc32: int
    """Of the tensor's bytes; meaningful with ``has_values``."""
    payload: bytes

    @property
    def has_values(self) -> bool:
        return bool(self.flags & HAS_VALUES)

    @property
    def failed(self) -> bool:
        """Of the end of a wait or of a site's call: it was left by an exception, whose type is ``what``."""
        return bool(self.flags & FAILED)

    @property
    def skipped(self) -> bool:
        """Of values after a site: this rank did not take part in the sync there."""
        return bool(self.flags & SKIPPED)

    @property
    def values(self) -> tuple[Value, ...]:
        """The first values; the bits as an integer for 8-bit floats."""
        return decode_values(self.payload, self.dtype) if self.has_values else ()

    @property
    def what(self) -> str:
        return self._texts()[0]

    @property
    def detail(self) -> str:
        return self._texts()[1]

    def _texts(self) -> tuple[str, str]:
        what, _, detail = self.payload.decode("utf-8", errors="ignore").partition("\0")
        return what, detail


@dataclass(frozen=True)
class Recording:
    """What could be read of one rank's recording."""

    path: Path
    header: Header
    records: tuple[Record, ...]
    """Whole records, oldest first."""
    torn: int
    """Slots that hold something, but no whole record."""
    lost: int
    """Records that the ring should still hold and that could not be read."""
    truncated: bool
    """The file is shorter than its header says; anything may be missing, also the newest records."""

    @property
    def wrapped(self) -> bool:
        """Older records were overwritten."""
        return bool(self.records) and self.records[-1].sequence > self.header.slot_count

    @property
    def closed(self) -> Record | None:
        """The record of an orderly end; its ``what`` is the outcome."""
        return self.records[-1] if self.records and self.records[-1].kind == "closed" else None

    @property
    def takes_signals(self) -> bool:
        """Its writer has a handler of SIGUSR1, as long as it lives."""
        return stacks_path(self.path).exists()


def recording_path(directory: StrPath, group_rank: int) -> Path:
    """Where a rank's recording lies in a directory of recordings."""
    return Path(directory) / f"rank-{group_rank:04d}{SUFFIX}"


def stacks_path(recording: Path) -> Path:
    """Where SIGUSR1's handler of the recording's writer leaves stacks until the watchdog makes a dump of them."""
    return recording.with_suffix(".stacks")


def read_recording(path: StrPath) -> Recording:
    """Read a recording, also while its writer lives, was killed, or when the file was cut.

    Raises:
        RecordingError: the file cannot be read, is not a recording, is of another version, or its header is damaged.
    """
    path = Path(path)
    try:
        data = read_bounded(path, MAX_RECORDING_BYTES)
    except OSError as error:
        raise RecordingError(f"{path}: the recording cannot be read: {error}") from error
    return parse_recording(path, data)


def parse_recording(path: Path, data: bytes) -> Recording:
    """`read_recording` of a file's bytes."""
    header, ring = _read_header(path, data)
    found, torn = [], 0
    for slot in _slots(memoryview(data)[ring : ring + header.slot_count * SLOT_BYTES]):
        record = _read_slot(slot)
        if record is not None:
            found.append(record)
        else:
            torn += 1
    found.sort(key=lambda record: record.sequence)
    last = found[-1].sequence if found else 0
    return Recording(
        path=path,
        header=header,
        records=tuple(found),
        torn=torn,
        lost=min(last, header.slot_count) - len(found),
        truncated=len(data) < ring + header.slot_count * SLOT_BYTES,
    )


def decode_values(payload: bytes, dtype: str) -> tuple[Value, ...]:
    """Turn kept bytes into numbers; an unfinished last element is left out."""
    _, size, letter = DTYPES[DTYPE_CODES.get(dtype, 0)]
    if size == 0:
        return ()
    count = len(payload) // size
    if dtype == "bfloat16":
        halves = struct.unpack(f"<{count}H", payload[: 2 * count])
        return tuple(struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves)
    return struct.unpack(f"<{count}{letter or 'B'}", payload[: size * count])


def write_header(fields: Mapping[str, Any], slot_count: int) -> bytes:
    """Return the bytes from the preamble to the ring: the header, padded to whole pages."""
    dtypes = [name for name, _, _ in DTYPES]
    layout = {"fields": BODY_FIELDS, "struct": BODY.format, "crc": CRC.format, "dtypes": dtypes}
    text = json.dumps({**fields, "record": layout}, separators=(",", ":")).encode()
    ring_offset = -(-(PREAMBLE.size + len(text)) // 4096) * 4096
    preamble = PREAMBLE.pack(MAGIC, VERSION, SLOT_BYTES, slot_count, ring_offset, len(text), crc32(text))
    return (preamble + text).ljust(ring_offset, b"\0")


def _read_header(path: Path, data: bytes) -> tuple[Header, int]:
    if data[: len(MAGIC)] != MAGIC or len(data) < PREAMBLE.size:
        raise RecordingError(f"{path}: not a recording (it does not begin with {MAGIC.decode()}), or cut off.")
    _, version, slot_bytes, slot_count, ring_offset, header_bytes, crc = PREAMBLE.unpack_from(data)
    if version != VERSION:
        raise RecordingError(f"{path}: recording of version {version}; this specsync reads version {VERSION}.")
    text = data[PREAMBLE.size : PREAMBLE.size + header_bytes]
    if slot_bytes != SLOT_BYTES or len(text) != header_bytes or crc32(text) != crc:
        raise RecordingError(f"{path}: the recording's header is damaged or cut off.")
    try:
        return parse_header(json.loads(text), slot_count), ring_offset
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordingError(f"{path}: the recording's header does not hold what it should: {error!r}.") from error


def parse_header(fields: Mapping[str, Any], slot_count: int) -> Header:
    """Check and take over a header's fields.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it does not hold what it should.
    """
    if not 0 <= fields["group_rank"] < fields["world_size"] <= MAX_WORLD_SIZE:
        raise ValueError(f"group rank {fields['group_rank']} of {fields['world_size']}")
    entries = fields["sites"].items()
    sites = {int(number): SiteEntry(slug, kind, tuple(names), *more) for number, (slug, kind, names, *more) in entries}
    return Header(
        version=VERSION,
        group_rank=fields["group_rank"],
        world_size=fields["world_size"],
        ranks=tuple(fields["ranks"]),
        plan_digest=fields["plan_digest"],
        run_id=fields["run_id"],
        pid=fields["pid"],
        host=fields["host"],
        versions=fields["versions"],
        started_s=fields["started_s"],
        slot_count=slot_count,
        sites=sites,
        generators=dict(fields.get("generators", {})),
        modes=dict(fields.get("modes", {})),
    )


def _slots(ring: memoryview) -> Iterator[bytes]:
    """Every slot that something was written into."""
    for start in range(0, len(ring), SLOT_BYTES):
        slot = bytes(ring[start : start + SLOT_BYTES])
        if slot != _EMPTY[: len(slot)]:
            yield slot


def _read_slot(slot: bytes) -> Record | None:
    if len(slot) < SLOT_BYTES or crc32(slot[: BODY.size]) != CRC.unpack_from(slot, BODY.size)[0]:
        return None
    fields: Sequence[Any] = BODY.unpack_from(slot)
    sequence, kind, flags, tensor_index, tensor_count, site_number, step, call, wall_s, monotonic_s = fields[:10]
    dtype, ndim, value_bytes, *dims, numel, crc, payload = fields[10:]
    if kind not in KIND_NAMES:
        return None
    dtype_name = DTYPES[dtype][0] if dtype < len(DTYPES) else "unknown"
    return Record(
        sequence, KIND_NAMES[kind], flags, tensor_index, tensor_count, site_number, step, call, wall_s, monotonic_s,
        dtype_name, ndim, tuple(dims[:ndim]), numel, crc, payload[:value_bytes],
    )  # fmt: skip
