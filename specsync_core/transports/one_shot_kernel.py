"""The Triton kernel of ``one-shot``: group rank 0 stores a call's tensors into every peer's inbox, peers take them.

One program, one launch, any number of tensors; the protocol is described in `one_shot_protocol`. Imported only
where Triton is. Under Triton's interpreter the same code runs on host memory, one rank after the other.

Between the kernels of a decode step nothing of this one is in the instruction cache, and fetching it costs more than
running it. So a call that fits into one tile, has nothing to wait for and finds nothing different is written as one
straight run, with whatever is rare behind it (Triton 3.6 lays it out so for sm_90).

Memory ordering, for the PTX model (sm_70 and newer):

1. *Payload.* A word carries its own tag, is aligned to 8 bytes, and is stored and loaded by ``st/ld.relaxed.sys``:
   strong operations of one size at one address, so a load sees the whole of one store (single-copy atomicity).
   A ``v2`` access is two such operations in any order, and each half has its tag. Nothing about one word follows
   from another: no fence is needed between header and data, nor between lanes.
2. *Reuse of a slot.* A peer's loads of a chunk come before its ack: each thread's loads have returned (their
   tags were tested), then a barrier of the block, one fence.acq_rel.sys and the ack's store; that is a release
   pattern, cumulative over the barrier. Rank 0 tests the ack by a relaxed load, then a fence.acq_rel.sys
   *only if it had to wait*: where the ack was already there, its later stores depend on the test by control and
   cannot be performed before the load, and a load that was performed before a store (here: the peer's, before its
   own ack) cannot observe it. Clearing a slot is a store before the same ack, so it cannot overwrite what comes next.
3. *The count.* ``state`` is read at the start and written behind a barrier by the same stream; kernels of one stream
   are ordered. Calls of one group on several streams are not supported, as in NCCL.
4. *Failure.* Details, fence, code: whoever sees the code has the details.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: SIM102 - an `if` over a constant is not an `and` in Triton
import triton
import triton.language as tl

from specsync_core.transports import one_shot_protocol as protocol
from specsync_core.transports.kernel_lanes import add_differing, count_differing, load8, locate, note_first, store8
from specsync_core.transports.one_shot_words import (
    DIFFERENT,
    SLOTS,
    STOPPED,
    TIMED_OUT,
    any_of,
    await_ack,
    await_line,
    fence,
    i64,
    load_line,
    load_word,
    store_line,
)

LINE = tl.constexpr(protocol.LINE_BYTES)
SLOT_LANES = tl.constexpr(protocol.SLOT_LANES)
SLOT_BYTES = tl.constexpr(protocol.SLOT_BYTES)
SLOT_BITS = tl.constexpr(protocol.SLOTS.bit_length() - 1)
ACK_EVERY = tl.constexpr(protocol.ACK_EVERY)
CLEAR_ROUNDS = tl.constexpr(protocol.CLEAR_ROUNDS)
TAG_BIT = tl.constexpr(protocol.TAG_BIT - (1 << 32))
ACKS = tl.constexpr(protocol.ACKS)
DETAILS = tl.constexpr(protocol.DETAILS)
DETAIL_BYTES = tl.constexpr(protocol.DETAIL_BYTES)
RING = tl.constexpr(protocol.RING)

OVERWRITE = tl.constexpr(0)
COMPARE_ONLY = tl.constexpr(1)
FETCH = tl.constexpr(2)


@triton.jit
def _fail(kind, sequence, own, theirs, inboxes, record, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write what happened to this rank's host record and to every inbox, then the code that stops the group."""
    code = kind.to(tl.int64) | (RANK << 8) | (sequence.to(tl.int64) << 32)
    tl.store(i64(record) + 1, own)
    tl.store(i64(record) + 2, theirs)
    for rank in tl.static_range(WORLD):
        entry = inboxes[rank] + DETAILS + DETAIL_BYTES * RANK
        store_line(entry, code, own)
        store_line(entry + LINE, theirs, theirs)
    tl.debug_barrier()
    order = fence(kind)
    for rank in tl.static_range(WORLD):
        store_line(inboxes[rank] + (order - kind).to(tl.int64), code, code)
    tl.store(i64(record), code)


@triton.jit
def _relay(inbox, record):
    """Bring the failure that an inbox tells of to this rank's host record, unless there is one already."""
    code = load_word(inbox)
    if not any_of(tl.load(i64(record)) != 0):
        order = fence(code.to(tl.int32))
        entry = inbox + DETAILS + DETAIL_BYTES * ((code >> 8) & 0xFF) + (order - code.to(tl.int32))
        tl.store(i64(record) + 1, load_word(entry + 8))
        tl.store(i64(record) + 2, load_word(entry + LINE))
        tl.debug_barrier()
        fence(order)
        tl.store(i64(record), code)


@triton.jit
def _slot_of(sequence):
    """Where a chunk's slot begins in an inbox."""
    return RING + (sequence & (SLOTS - 1)).to(tl.int64) * SLOT_BYTES


@triton.jit
def _load_tile(
    addresses, sizes, widths: tl.constexpr, header, begin, tile, count, BLOCK: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Load what a tile of a chunk says: line 0 is the header, line 1 + i the i-th lane of the chunk."""
    line = tile + tl.arange(0, BLOCK)
    active = (line > 0) & (line <= count)
    address, left, _ = locate(begin + line - 1, addresses, sizes, widths)
    return tl.where(line == 0, header, load8(address, left, active, UNIT))


@triton.jit
def _send_tile(word, inboxes, sequence, tile, count, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Store a tile into every peer's slot."""
    line = tile + tl.arange(0, BLOCK)
    slot = _slot_of(sequence)
    tag = ((sequence | TAG_BIT).to(tl.int64)) << 32
    low = (word & 0xFFFFFFFF) | tag
    high = ((word >> 32) & 0xFFFFFFFF) | tag
    for peer in tl.static_range(1, WORLD):
        target = inboxes[peer] + slot + line.to(tl.int64) * LINE
        store_line(tl.where(line <= count, target, 0), low, high)


@triton.jit
def _clears(sequence):
    """A slot is emptied now and then, so that no line keeps a tag long enough for the tag to come again."""
    return ((sequence >> SLOT_BITS) & (CLEAR_ROUNDS - 1)) == CLEAR_ROUNDS - 1


@triton.jit
def _acks(sequence):
    return (sequence & (ACK_EVERY - 1)) == ACK_EVERY - 1


@triton.jit
def _give_back(inboxes, slot, sequence, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Let group rank 0 fill the slot again: clear it and acknowledge it, where that is due."""
    if _clears(sequence):
        for tile in range(0, SLOT_LANES + 1, BLOCK):
            line = tile + tl.arange(0, BLOCK)
            zero = tl.zeros_like(line).to(tl.int64)
            store_line(tl.where(line <= SLOT_LANES, slot + line.to(tl.int64) * LINE, 0), zero, zero)
    if _acks(sequence):
        tl.debug_barrier()  # every thread's loads and stores come before one thread's ack
        order = fence(sequence)
        taken = (order + 1).to(tl.int64) & 0xFFFFFFFF
        store_line(inboxes[0] + ACKS + LINE * RANK, taken, taken)


@triton.jit
def _advance(state, sequence, stats, calls):
    """Count a call that was done, and say where the next one begins."""
    tl.store(i64(state), sequence.to(tl.int64))
    tl.store(i64(stats), calls + 1)


@triton.jit
def _send(
    addresses, sizes, header, lanes, inboxes, state, stats, record, timeout_ns,
    widths: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """Group rank 0's side of a call."""
    inbox = inboxes[0]
    # Everything that does not depend on anything is loaded first: a load from the L2 costs a tenth of the call.
    sequence = tl.load(i64(state)).to(tl.int32)
    late = load_word(inbox) != 0
    calls = tl.load(i64(stats))
    if ONE_TILE:
        word = _load_tile(addresses, sizes, widths, header, 0, 0, lanes, BLOCK, UNIT)
    for peer in tl.static_range(1, WORLD):
        late |= sequence - load_word(inbox + ACKS + LINE * peer).to(tl.int32) >= SLOTS
    late = any_of(late)  # behind it every thread has the sequence, and one may change it
    if ONE_TILE:
        if not late:
            _send_tile(word, inboxes, sequence, 0, lanes, WORLD, BLOCK)
            _advance(state, sequence + 1, stats, calls)
    if late | (not ONE_TILE):
        _send_slowly(
            addresses, sizes, header, lanes, inboxes, state, stats, record, timeout_ns, sequence, calls,
            widths, WORLD, BLOCK, UNIT,
        )  # fmt: skip


@triton.jit
def _send_slowly(
    addresses, sizes, header, lanes, inboxes, state, stats, record, timeout_ns, sequence, calls,
    widths: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Group rank 0's side of a call that has several tiles, waits for a peer, or comes after a failure."""
    inbox = inboxes[0]
    if any_of(load_word(inbox) != 0):
        _relay(inbox, record)
    else:
        # Not triton.next_power_of_2: SGLang puts a plain function in its place, which a kernel cannot call.
        peers: tl.constexpr = 2 if WORLD <= 2 else 4 if WORLD <= 4 else 8 if WORLD <= 8 else 64
        peer = tl.arange(0, peers)
        ack_line = inbox + ACKS + LINE * tl.where((peer > 0) & (peer < WORLD), peer, 1)
        chunks = tl.maximum((lanes + SLOT_LANES - 1) // SLOT_LANES, 1)
        worst = tl.zeros([], dtype=tl.int32)
        for chunk in range(chunks):
            if worst == 0:
                now = sequence + chunk
                begin = chunk * SLOT_LANES
                count = tl.minimum(lanes - begin, SLOT_LANES)
                ended = await_ack(ack_line, load_word(ack_line), now, inbox, timeout_ns)
                worst = tl.max(ended)
                if worst == 0:
                    for tile in range(0, count + 1, BLOCK):
                        word = _load_tile(addresses, sizes, widths, header, begin, tile, count, BLOCK, UNIT)
                        _send_tile(word, inboxes, now, tile, count, WORLD, BLOCK)
                else:
                    if worst == TIMED_OUT:
                        behind = tl.max(tl.where(ended == TIMED_OUT, peer, 0)).to(tl.int64)
                        _fail(worst + 1, now, header, behind, inboxes, record, 0, WORLD)
                    else:
                        _relay(inbox, record)
        if worst == 0:
            _advance(state, sequence + chunks, stats, calls)


@triton.jit
def _take_tile(
    addresses, targets, sizes, header, inbox, slot, now, begin, tile, count, timeout_ns,
    widths: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, MODE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Wait for one tile of a chunk and take it.

    Returns the lanes, which of them arrived, what they held and hold, how each wait ended, and one number: how many
    elements differed, and 65536 for each wait that failed.
    """
    line = tile + 1 + tl.arange(0, BLOCK)
    active = line <= count
    lane = begin + line - 1
    address, left, width = locate(lane, addresses, sizes, widths)
    own = tl.zeros([BLOCK], dtype=tl.int64)
    if COUNT:
        own = load8(address, left, active, UNIT)
    where = slot + tl.where(active, line, 0).to(tl.int64) * LINE
    head_low, head_high = load_line(slot)
    low, high = load_line(where)
    theirs, ended = await_line(where, low, high, slot, head_low, head_high, now | TAG_BIT, header, inbox, timeout_ns)
    arrived = active & (ended == 0)
    if MODE == FETCH:
        target, room, _ = locate(lane, targets, sizes, widths)
        store8(target, room, theirs, arrived, UNIT)
    if MODE == OVERWRITE:
        store8(address, left, theirs, arrived, UNIT)
    told = tl.where(ended == 0, 0, 65536)
    if COUNT:
        told += tl.where(arrived, count_differing(own ^ theirs, width, UNIT).to(tl.int32), 0)
    return lane, arrived, own, theirs, ended, tl.sum(told)


@triton.jit
def _settle_tile(
    header, inboxes, slot, now, stats, record, call, lane, arrived, own, theirs, ended, told,
    RANK: tl.constexpr, WORLD: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """See to a tile in which something differed or did not come."""
    if COUNT:
        if (told & 65535) != 0:
            note_first(stats, record, call, lane, arrived & (own != theirs), own, theirs)
    if told >= 65536:
        worst = tl.max(ended)
        if worst == STOPPED:
            _relay(inboxes[RANK], record)
        else:
            head = (load_word(slot) & 0xFFFFFFFF) | (load_word(slot + 8) << 32)
            head = tl.where(worst == DIFFERENT, head, 0)
            _fail(worst, now, header, head, inboxes, record, RANK, WORLD)


@triton.jit
def _take(
    addresses, targets, sizes, header, lanes, inboxes, state, stats, record, timeout_ns,
    widths: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    MODE: tl.constexpr, COUNT: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """A peer's side of a call."""
    inbox = inboxes[RANK]
    sequence = tl.load(i64(state)).to(tl.int32)
    code = load_word(inbox)
    calls = tl.load(i64(stats))
    broken = any_of(code != 0)  # behind it every thread has the sequence, and one may change it
    if broken:
        _relay(inbox, record)
    elif ONE_TILE:
        slot = inbox + _slot_of(sequence)
        lane, arrived, own, theirs, ended, told = _take_tile(
            addresses, targets, sizes, header, inbox, slot, sequence, 0, 0, lanes, timeout_ns,
            widths, BLOCK, UNIT, MODE, COUNT,
        )  # fmt: skip
        if told < 65536:
            _advance(state, sequence + 1, stats, calls)
        if (told != 0) | _acks(sequence) | _clears(sequence):
            if told != 0:
                _settle_tile(
                    header, inboxes, slot, sequence, stats, record, calls + 1, lane, arrived, own, theirs, ended, told,
                    RANK, WORLD, COUNT,
                )  # fmt: skip
            if told < 65536:
                if COUNT:
                    add_differing(stats, told.to(tl.int64))
                _give_back(inboxes, slot, sequence, RANK, BLOCK)
    else:
        _take_slowly(
            addresses, targets, sizes, header, lanes, inboxes, state, stats, record, timeout_ns, sequence, calls,
            widths, RANK, WORLD, BLOCK, UNIT, MODE, COUNT,
        )  # fmt: skip


@triton.jit
def _take_slowly(
    addresses, targets, sizes, header, lanes, inboxes, state, stats, record, timeout_ns, sequence, calls,
    widths: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    MODE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A peer's side of a call that has several tiles."""
    inbox = inboxes[RANK]
    chunks = tl.maximum((lanes + SLOT_LANES - 1) // SLOT_LANES, 1)
    differing = tl.zeros([], dtype=tl.int64)
    failed = tl.zeros([], dtype=tl.int32)
    for chunk in range(chunks):
        if failed == 0:
            now = sequence + chunk
            begin = chunk * SLOT_LANES
            count = tl.minimum(lanes - begin, SLOT_LANES)
            slot = inbox + _slot_of(now)
            for tile in range(0, tl.maximum(count, 1), BLOCK):  # an empty call waits for its header
                if failed == 0:
                    lane, arrived, own, theirs, ended, told = _take_tile(
                        addresses, targets, sizes, header, inbox, slot, now, begin, tile, count, timeout_ns,
                        widths, BLOCK, UNIT, MODE, COUNT,
                    )  # fmt: skip
                    if told != 0:
                        _settle_tile(
                            header, inboxes, slot, now, stats, record, calls + 1, lane, arrived, own, theirs, ended,
                            told, RANK, WORLD, COUNT,
                        )  # fmt: skip
                    differing += (told & 65535).to(tl.int64)
                    failed |= told >> 16
            if failed == 0:
                _give_back(inboxes, slot, now, RANK, BLOCK)
    if failed == 0:
        _advance(state, sequence + chunks, stats, calls)
        if COUNT:
            add_differing(stats, differing)


@triton.jit
def sync_kernel(
    addresses,
    targets,
    sizes,
    header,
    lanes,
    inboxes,
    state,
    stats,
    record,
    timeout_ns,
    widths: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    MODE: tl.constexpr,
    COUNT: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    """Bring group rank 0's tensors to every rank of the group. One program: a launch, or the last of a draw's.

    Args:
        addresses: int64 each: this rank's tensors, contiguous.
        targets: int64 each: where rank 0's values go in mode ``FETCH``; else the same as ``addresses``.
        sizes: int32 each: bytes.
        header: `Header.word` of the call.
        lanes: of all tensors together.
        inboxes: int64 each: every rank's inbox, by group rank, as this rank sees it.
        state: the group's sequence on this rank, one int64.
        stats: this signature's counters.
        record: int64 words in pinned host memory.
        widths: element size of each tensor; ``UNIT`` is the smallest of them, at most 8.
        MODE: ``OVERWRITE`` in place, ``COMPARE_ONLY``, or ``FETCH`` into ``targets``.
        COUNT: compare with one's own values first, and count.
        ONE_TILE: the call's lines, group rank 0's header among them, fit into ``BLOCK``.
    """
    if RANK == 0:
        _send(
            addresses, sizes, header, lanes, inboxes, state, stats, record, timeout_ns,
            widths, WORLD, BLOCK, UNIT, ONE_TILE,
        )  # fmt: skip
    else:
        _take(
            addresses, targets, sizes, header, lanes, inboxes, state, stats, record, timeout_ns,
            widths, RANK, WORLD, BLOCK, UNIT, MODE, COUNT, ONE_TILE,
        )  # fmt: skip
