"""What the kernels that sync and count do with tensors: read them as lanes of 8 bytes, compare, note what differed.

Imported only where Triton is.
"""

from __future__ import annotations

# mypy: ignore-errors
import triton
import triton.language as tl

from specsync_core.transports import one_shot_protocol as protocol
from specsync_core.transports.one_shot_words import i64

FIRST_CALL = tl.constexpr(protocol.FIRST_CALL)
FIRST_LANE = tl.constexpr(protocol.FIRST_LANE)
FIRST_OWN = tl.constexpr(protocol.FIRST_OWN)
FIRST_ROOT = tl.constexpr(protocol.FIRST_ROOT)
FIRST_STEP = tl.constexpr(protocol.FIRST_STEP)
RECORD_STEP = tl.constexpr(protocol.RECORD_STEP)
MISMATCHES = tl.constexpr(protocol.MISMATCHES)
MISMATCHED_CALLS = tl.constexpr(protocol.MISMATCHED_CALLS)


@triton.jit
def locate(lane, addresses, sizes, widths):
    """Where a lane's 8 bytes begin, how many of them its tensor has left, and the size of the tensor's elements."""
    address = tl.zeros_like(lane).to(tl.int64)
    left = tl.zeros_like(lane)
    width = tl.zeros_like(lane)
    start = 0
    for tensor in tl.static_range(len(addresses)):
        here = lane >= start
        offset = (lane - start) * 8
        address = tl.where(here, addresses[tensor] + offset, address)
        left = tl.where(here, sizes[tensor] - offset, left)
        width = tl.where(here, widths[tensor], width)
        start += (sizes[tensor] + 7) // 8
    return address, left, width


@triton.jit
def load8(address, left, active, UNIT: tl.constexpr):
    """Load up to 8 bytes as one word, in units that the tensors are aligned to; what is not there reads 0."""
    if UNIT == 8:
        word = tl.load(i64(address), mask=active, other=0)
    else:
        word = tl.zeros_like(address)
        for unit in tl.static_range(8 // UNIT):
            there = active & (left > unit * UNIT)
            if UNIT == 4:
                part = tl.load((address + unit * UNIT).to(tl.pointer_type(tl.uint32)), mask=there, other=0)
            elif UNIT == 2:
                part = tl.load((address + unit * UNIT).to(tl.pointer_type(tl.uint16)), mask=there, other=0)
            else:
                part = tl.load((address + unit * UNIT).to(tl.pointer_type(tl.uint8)), mask=there, other=0)
            word |= part.to(tl.int64) << (8 * UNIT * unit)
    return word


@triton.jit
def store8(address, left, word, active, UNIT: tl.constexpr):
    if UNIT == 8:
        tl.store(i64(address), word, mask=active)
    else:
        for unit in tl.static_range(8 // UNIT):
            there = active & (left > unit * UNIT)
            part = word >> (8 * UNIT * unit)
            if UNIT == 4:
                tl.store((address + unit * UNIT).to(tl.pointer_type(tl.int32)), part.to(tl.int32), mask=there)
            elif UNIT == 2:
                tl.store((address + unit * UNIT).to(tl.pointer_type(tl.int16)), part.to(tl.int16), mask=there)
            else:
                tl.store((address + unit * UNIT).to(tl.pointer_type(tl.int8)), part.to(tl.int8), mask=there)


@triton.jit
def count_differing(bits, width, UNIT: tl.constexpr):
    """How many elements of ``width`` bytes have a bit set in each word; elements wider than 8 count by halves."""
    if UNIT == 8:
        return (bits != 0).to(tl.int64)
    # Fold each byte into its lowest bit, then bytes into pairs, pairs into words, as far as the element goes.
    nibbles = (bits | (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    halves = (nibbles | (nibbles >> 2)) & 0x0303030303030303
    ones = (halves | (halves >> 1)) & 0x0101010101010101
    pairs = (ones | (ones >> 8)) & 0x0001000100010001
    words = (pairs | (pairs >> 16)) & 0x0000000100000001
    whole = (words | (words >> 32)) & 1
    flags = tl.where(width == 1, ones, tl.where(width == 2, pairs, tl.where(width == 4, words, whole)))
    return ((flags * 0x0101010101010101) >> 56) & 0xFF


@triton.jit
def note_first(stats, record, call, lane, differs, own, theirs):
    """Keep the first element in which this rank differed, once."""
    if tl.load(i64(stats) + FIRST_LANE) == 0:
        first = tl.min(tl.where(differs, lane, 0x7FFFFFFF))
        chosen = differs & (lane == first)
        tl.store(i64(stats) + FIRST_OWN, tl.sum(tl.where(chosen, own, 0)))
        tl.store(i64(stats) + FIRST_ROOT, tl.sum(tl.where(chosen, theirs, 0)))
        tl.store(i64(stats) + FIRST_CALL, call)
        tl.store(i64(stats) + FIRST_STEP, tl.load(i64(record) + RECORD_STEP))
        tl.debug_barrier()
        tl.store(i64(stats) + FIRST_LANE, (first + 1).to(tl.int64))


@triton.jit
def add_differing(stats, differing):
    """Count a call in which ``differing`` elements differed."""
    if differing != 0:
        tl.store(i64(stats) + MISMATCHES, tl.load(i64(stats) + MISMATCHES) + differing)
        tl.store(i64(stats) + MISMATCHED_CALLS, tl.load(i64(stats) + MISMATCHED_CALLS) + 1)
