"""The protocol of ``one-shot``, as facts: what lies where in a rank's inbox, what a word means, how a failure reads.

Every rank of a group owns an *inbox* in symmetric memory, which all of them can store into. The kernel
(`one_shot_kernel`), the host side (`one_shot`) and the model that tests check exhaustively share this module.

A message is one *chunk* of a call: a header line and up to `SLOT_LANES` data lines, in one slot of a ring. A
line is 16 bytes, two words of 8: each holds 32 bits of payload below a 32-bit *tag* that is the chunk's sequence
number. A word is stored and loaded whole, so whoever sees the tag has the payload (NCCL's LL protocol).

    sequence  counts the chunks of a group, all sites together, and lives on the device: graph replays, several
              graphs, eager calls and interleaved sites all continue the one count.
    tag       the sequence's low 31 bits with the top bit set, so that cleared memory never looks like a message.
              A slot is cleared by its reader once every `CLEAR_ROUNDS` rounds, long before a tag comes again.
    ack       how many chunks a peer has taken, stored into group rank 0's inbox every `ACK_EVERY` chunks. Rank 0
              fills a slot again only when every peer has acknowledged what was in it.
    header    which call this is: site and payload. A peer whose own call differs reports instead of taking it.
    broken    a code in every inbox; once it is set no call moves anything any more.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

LINE_BYTES = 16
LANE_BYTES = 8
"""Payload of one line."""
SLOTS = 32
SLOT_LANES = 4096
"""Data lines of a slot: 32 KiB of payload; larger calls take several chunks."""
SLOT_BYTES = LINE_BYTES * (1 + SLOT_LANES)
ACK_EVERY = 8
"""At most `SLOTS` - 1, or rank 0 would wait for an ack that never becomes due; measured, an ack costs its fence."""
CLEAR_ROUNDS = 1 << 16
"""A power of two; `SLOTS` times this stays below 2**31, after which tags come again."""
TAG_BIT = 1 << 31
MAX_WORLD = 64

# Offsets in bytes from the start of an inbox.
BROKEN = 0
ACKS = LINE_BYTES
"""One line per group rank, used in group rank 0's inbox."""
DETAILS = 2048
DETAIL_BYTES = 32
"""One entry per group rank that failed: code, its own header, the header that it received, 0."""
RING = 4096
INBOX_BYTES = RING + SLOTS * SLOT_BYTES

# Words of a failure code: kind, group rank, sequence.
MISMATCH, NO_ROOT, PEER_BEHIND, HALTED = 1, 2, 3, 4
"""`HALTED` is written by a rank's host, which saw a peer end or give up."""

# int64 words of the record in host memory that the kernel writes and the host reads without waiting.
RECORD_CODE, RECORD_OWN, RECORD_THEIRS, RECORD_STEP, RECORD_HALT, RECORD_WORDS = 0, 1, 2, 3, 4, 8
"""From `RECORD_HALT` on the host writes one line, the code that halts this rank's kernels."""

# int64 words of a signature's counters on the device.
CALLS, MISMATCHES, MISMATCHED_CALLS, FIRST_CALL, FIRST_LANE, FIRST_OWN, FIRST_ROOT, FIRST_STEP = range(8)
"""`FIRST_LANE` counts from 1; 0 is no difference so far."""
STATS_WORDS = 8


@dataclass(frozen=True)
class Header:
    """What one call is, in 64 bits."""

    site: int
    """crc32 of the site's slug."""
    nbytes: int
    """Low 24 bits of the payload's size."""
    label: int
    """8 bits of the shapes and dtypes, so that equal sizes of other types differ too."""

    @classmethod
    def of(cls, slug: str, label: str, nbytes: int) -> Header:
        return cls(zlib.crc32(slug.encode()), nbytes & 0xFFFFFF, zlib.crc32(label.encode()) & 0xFF)

    @classmethod
    def from_word(cls, word: int) -> Header:
        return cls(word & 0xFFFFFFFF, word >> 32 & 0xFFFFFF, word >> 56 & 0xFF)

    @property
    def word(self) -> int:
        """Signed 64 bits, as the kernel takes it."""
        word = self.site | self.nbytes << 32 | self.label << 56
        return word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True)
class Failure:
    """What a failure record says."""

    kind: int
    group_rank: int
    """The rank that noticed."""
    sequence: int
    own: Header
    """The noticing rank's call."""
    theirs: Header
    """What it had received; all 0 when nothing came. For `PEER_BEHIND`, ``site`` is the slow peer's group rank."""

    @classmethod
    def from_words(cls, code: int, own: int, theirs: int) -> Failure:
        kind, group_rank, sequence = code & 0xFF, code >> 8 & 0xFF, code >> 32 & 0xFFFFFFFF
        return cls(kind, group_rank, sequence, Header.from_word(own), Header.from_word(theirs))


def lanes_of(nbytes: int) -> int:
    """Lines that a tensor of this size takes."""
    return -(-nbytes // LANE_BYTES)


def chunks_of(lanes: int) -> int:
    """Chunks that a call takes; an empty one still sends its header."""
    return max(1, -(-lanes // SLOT_LANES))
