"""The Triton kernel of ``one-shot``: group rank 0 stores a call's tensors into every peer's inbox, peers take them.

One program, one launch, any number of tensors; the protocol is described in `one_shot_protocol`. Imported only
where Triton is. Under Triton's interpreter the same code runs on host memory, one rank after the other.

Memory ordering, for the PTX model (sm_70 and newer):

1. *Payload.* A word carries its own tag, is aligned to 8 bytes, and is stored and loaded by ``st/ld.relaxed.sys``:
   strong operations of one size at one address, so a load sees the whole of one store (single-copy atomicity).
   A ``v2`` access is two such operations in any order, and each half has its tag. Nothing about one word follows
   from another: no fence is needed between header and data, nor between lanes.
2. *Reuse of a slot.* A peer's loads of a chunk come before its ack: each thread's loads have returned (their
   tags were tested), the block's reduction is a barrier, then one fence.acq_rel.sys and the ack's store; that is a
   release pattern, cumulative over the barrier. Rank 0 tests the ack by a relaxed load, then a fence.acq_rel.sys
   *only if it had to wait*: where the ack was already there, its later stores depend on the test by control and
   cannot be performed before the load, and a load that was performed before a store (here: the peer's, before its
   own ack) cannot observe it. Clearing a slot is a store before the same ack, so it cannot overwrite what comes next.
3. *The count.* ``state`` is read at the start and written at the end by the same stream, with a barrier between;
   kernels of one stream are ordered. Calls of one group on several streams are not supported, as in NCCL.
4. *Failure.* Details, fence, code: whoever sees the code has the details.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: SIM102, RET505 - an `if` over a constant is not an `and`, nor does a return end it, in Triton
import triton
import triton.language as tl
from triton import knobs

from specsync_core.transports import one_shot_protocol as protocol

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
LINE = tl.constexpr(protocol.LINE_BYTES)
SLOTS = tl.constexpr(protocol.SLOTS)
SLOT_LANES = tl.constexpr(protocol.SLOT_LANES)
SLOT_BYTES = tl.constexpr(protocol.SLOT_BYTES)
ACK_EVERY = tl.constexpr(protocol.ACK_EVERY)
CLEAR_ROUNDS = tl.constexpr(protocol.CLEAR_ROUNDS)
TAG_BIT = tl.constexpr(protocol.TAG_BIT - (1 << 32))
ACKS = tl.constexpr(protocol.ACKS)
DETAILS = tl.constexpr(protocol.DETAILS)
DETAIL_BYTES = tl.constexpr(protocol.DETAIL_BYTES)
RING = tl.constexpr(protocol.RING)
MISMATCH = tl.constexpr(protocol.MISMATCH)
NO_ROOT = tl.constexpr(protocol.NO_ROOT)
PEER_BEHIND = tl.constexpr(protocol.PEER_BEHIND)
FIRST_CALL = tl.constexpr(protocol.FIRST_CALL)
FIRST_LANE = tl.constexpr(protocol.FIRST_LANE)
FIRST_OWN = tl.constexpr(protocol.FIRST_OWN)
FIRST_ROOT = tl.constexpr(protocol.FIRST_ROOT)
FIRST_STEP = tl.constexpr(protocol.FIRST_STEP)
RECORD_STEP = tl.constexpr(protocol.RECORD_STEP)

# What a wait ends with.
ARRIVED = tl.constexpr(0)
DIFFERENT = tl.constexpr(1)
TIMED_OUT = tl.constexpr(2)
STOPPED = tl.constexpr(3)

OVERWRITE = tl.constexpr(0)
COMPARE_ONLY = tl.constexpr(1)
FETCH = tl.constexpr(2)


@triton.jit
def _i64(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _store_line(address, low, high):
    """Store two words, each whole. ``address`` 0 stores nothing."""
    if INTERPRETED:
        tl.store(_i64(address), low, mask=address != 0)
        tl.store(_i64(address + 8), high, mask=address != 0)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b64 p, $1, 0;
            @p st.relaxed.sys.global.v2.b64 [$1], {$2, $3};
            mov.u32 $0, 0;
            }""",
            "=r,l,l,l",
            [address, low, high],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _load_word(address):
    """Load 8 bytes that another rank may store into."""
    if INTERPRETED:
        return tl.load(_i64(address))
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.b64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _fence(order):
    """A system-wide fence of acquire and release. Takes and returns a value so that it stays in its place."""
    if INTERPRETED:
        return order
    return tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [order], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_line(address):
    """Load two words, each whole, that another rank may store into. Does not wait."""
    if INTERPRETED:
        return tl.load(_i64(address)), tl.load(_i64(address + 8))
    else:
        return tl.inline_asm_elementwise(
            "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];",
            "=l,=l,l",
            [address],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )


@triton.jit
def _await_line(line, low, high, header_line, head_low, head_high, tag, header, broken, timeout_ns):
    """Wait until a line and its slot's header carry ``tag``; return the line's payload and how the wait ended.

    The words that were loaded before are looked at first: a thread with several lines has then waited for all of
    them at once.
    """
    if INTERPRETED:
        here = ((head_low >> 32).to(tl.int32) == tag) & ((head_high >> 32).to(tl.int32) == tag)
        theirs = (head_low & 0xFFFFFFFF) | (head_high << 32)
        arrived = here & ((low >> 32).to(tl.int32) == tag) & ((high >> 32).to(tl.int32) == tag)
        stopped = tl.load(_i64(broken)) != 0
        status = tl.where(here & (theirs != header), 1, tl.where(arrived, 0, tl.where(stopped, 3, 2)))
        return (low & 0xFFFFFFFF) | (high << 32), status
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p, q, t;
            .reg .b64 x, y, hx, hy, start, now;
            .reg .b32 a, b, c, d, ha, hb, hc, hd, own_low, own_high, spins, few;
            mov.b64 {own_low, own_high}, $9;
            mov.b64 x, $3;
            mov.b64 y, $4;
            mov.b64 hx, $6;
            mov.b64 hy, $7;
            mov.u64 $0, 0;
            mov.u32 $1, 0;
            mov.u32 spins, 0;
            mov.u64 start, 0;
            bra CHECK;
            LOOK:
            ld.relaxed.sys.global.v2.b64 {x, y}, [$2];
            ld.relaxed.sys.global.v2.b64 {hx, hy}, [$5];
            CHECK:
            mov.b64 {ha, hb}, hx;
            mov.b64 {hc, hd}, hy;
            mov.b64 {a, b}, x;
            mov.b64 {c, d}, y;
            setp.eq.b32 p, hb, $8;
            setp.eq.and.b32 p, hd, $8, p;
            @!p bra AGAIN;
            setp.ne.b32 q, ha, own_low;
            setp.ne.or.b32 q, hc, own_high, q;
            @q mov.u32 $1, 1;
            @q bra DONE;
            setp.eq.b32 q, b, $8;
            setp.eq.and.b32 q, d, $8, q;
            @q mov.b64 $0, {a, c};
            @q bra DONE;
            AGAIN:
            add.u32 spins, spins, 1;
            and.b32 few, spins, 255;
            setp.ne.b32 t, few, 0;
            @t bra LOOK;
            ld.relaxed.sys.global.b64 now, [$10];
            setp.ne.b64 q, now, 0;
            @q mov.u32 $1, 3;
            @q bra DONE;
            mov.u64 now, %globaltimer;
            setp.eq.b64 q, start, 0;
            @q mov.u64 start, now;
            sub.u64 now, now, start;
            setp.lt.u64 q, now, $11;
            @q bra LOOK;
            mov.u32 $1, 2;
            DONE:
            }""",
            "=&l,=&r,l,l,l,l,l,l,r,l,l,l",
            [line, low, high, header_line, head_low, head_high, tag, header, broken, timeout_ns],
            dtype=(tl.int64, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def _await_ack(ack_line, ack, sequence, broken, timeout_ns):
    """Wait until fewer than `SLOTS` chunks before ``sequence`` are not acknowledged; ``ack`` was loaded before."""
    if INTERPRETED:
        behind = sequence - ack.to(tl.int32) >= SLOTS
        stopped = tl.load(_i64(broken)) != 0
        return tl.where(behind, tl.where(stopped, 3, 2), 0)
    return tl.inline_asm_elementwise(
        """{
            .reg .pred q, t;
            .reg .b64 word, start, now;
            .reg .b32 taken, high, ahead, spins, few;
            mov.u32 $0, 0;
            mov.u32 spins, 0;
            mov.u64 start, 0;
            mov.b64 {taken, high}, $2;
            sub.u32 ahead, $3, taken;
            setp.lt.u32 q, ahead, 32;
            @q bra DONE;
            LOOK:
            ld.relaxed.sys.global.b64 word, [$1];
            mov.b64 {taken, high}, word;
            sub.u32 ahead, $3, taken;
            setp.lt.u32 q, ahead, 32;
            @q fence.acq_rel.sys;
            @q bra DONE;
            add.u32 spins, spins, 1;
            and.b32 few, spins, 63;
            setp.ne.b32 t, few, 0;
            @t bra LOOK;
            ld.relaxed.sys.global.b64 now, [$4];
            setp.ne.b64 q, now, 0;
            @q mov.u32 $0, 3;
            @q bra DONE;
            mov.u64 now, %globaltimer;
            setp.eq.b64 q, start, 0;
            @q mov.u64 start, now;
            sub.u64 now, now, start;
            setp.lt.u64 q, now, $5;
            @q bra LOOK;
            mov.u32 $0, 2;
            DONE:
            }""",
        "=&r,l,l,r,l,l",
        [ack_line, ack, sequence, broken, timeout_ns],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _locate(lane, addresses, sizes, widths):
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
def _load8(address, left, active, UNIT: tl.constexpr):
    """Load up to 8 bytes as one word, in units that the tensors are aligned to; what is not there reads 0."""
    if UNIT == 8:
        word = tl.load(_i64(address), mask=active, other=0)
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
def _store8(address, left, word, active, UNIT: tl.constexpr):
    if UNIT == 8:
        tl.store(_i64(address), word, mask=active)
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
def _differing(bits, width, UNIT: tl.constexpr):
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
def _fail(kind, sequence, own, theirs, inboxes, record, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write what happened to this rank's host record and to every inbox, then the code that stops the group."""
    code = kind.to(tl.int64) | (RANK << 8) | (sequence.to(tl.int64) << 32)
    tl.store(_i64(record) + 1, own)
    tl.store(_i64(record) + 2, theirs)
    for rank in tl.static_range(WORLD):
        entry = inboxes[rank] + DETAILS + DETAIL_BYTES * RANK
        _store_line(entry, code, own)
        _store_line(entry + LINE, theirs, theirs)
    tl.debug_barrier()
    order = _fence(kind)
    for rank in tl.static_range(WORLD):
        _store_line(inboxes[rank] + (order - kind).to(tl.int64), code, code)
    tl.store(_i64(record), code)


@triton.jit
def _relay(code, inbox, record):
    """Bring another rank's failure to this rank's host record, unless there is one already."""
    if tl.load(_i64(record)) == 0:
        order = _fence(code.to(tl.int32))
        entry = inbox + DETAILS + DETAIL_BYTES * ((code >> 8) & 0xFF) + (order - code.to(tl.int32))
        tl.store(_i64(record) + 1, _load_word(entry + 8))
        tl.store(_i64(record) + 2, _load_word(entry + LINE))
        tl.debug_barrier()
        _fence(order)
        tl.store(_i64(record), code)


@triton.jit
def _note_first(stats, record, lane, differs, own, theirs, BLOCK: tl.constexpr):
    """Keep the first element in which this rank differed, once."""
    if tl.load(_i64(stats) + FIRST_LANE) == 0:
        first = tl.min(tl.where(differs, lane, 0x7FFFFFFF))
        chosen = differs & (lane == first)
        tl.store(_i64(stats) + FIRST_OWN, tl.sum(tl.where(chosen, own, 0)))
        tl.store(_i64(stats) + FIRST_ROOT, tl.sum(tl.where(chosen, theirs, 0)))
        tl.store(_i64(stats) + FIRST_CALL, tl.load(_i64(stats)) + 1)
        tl.store(_i64(stats) + FIRST_STEP, tl.load(_i64(record) + RECORD_STEP))
        tl.debug_barrier()
        tl.store(_i64(stats) + FIRST_LANE, (first + 1).to(tl.int64))


@triton.jit
def _send_chunk(
    addresses,
    sizes,
    widths,
    header,
    inboxes,
    sequence,
    begin,
    count,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Store one chunk into every peer's slot: line 0 is the header, line 1 + i the i-th lane of the chunk."""
    slot = RING + (sequence & (SLOTS - 1)).to(tl.int64) * SLOT_BYTES
    tag = ((sequence | TAG_BIT).to(tl.int64)) << 32
    for tile in range(0, count + 1, BLOCK):
        line = tile + tl.arange(0, BLOCK)
        active = (line > 0) & (line <= count)
        address, left, _ = _locate(begin + line - 1, addresses, sizes, widths)
        word = tl.where(line == 0, header, _load8(address, left, active, UNIT))
        low = (word & 0xFFFFFFFF) | tag
        high = ((word >> 32) & 0xFFFFFFFF) | tag
        for peer in tl.static_range(1, WORLD):
            target = inboxes[peer] + slot + line.to(tl.int64) * LINE
            _store_line(tl.where(line <= count, target, 0), low, high)


@triton.jit
def _clear_slot(slot, sequence, BLOCK: tl.constexpr):
    """Empty a slot now and then, so that no line keeps a tag long enough for the tag to come again."""
    if ((sequence >> 5) & (CLEAR_ROUNDS - 1)) == CLEAR_ROUNDS - 1:
        for tile in range(0, SLOT_LANES + 1, BLOCK):
            line = tile + tl.arange(0, BLOCK)
            zero = tl.zeros_like(line).to(tl.int64)
            _store_line(tl.where(line <= SLOT_LANES, slot + line.to(tl.int64) * LINE, 0), zero, zero)
        tl.debug_barrier()


@triton.jit
def exchange(
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
):
    """One call of the protocol, by one program: see `sync_kernel` for the arguments."""
    inbox = inboxes[RANK]
    # Everything that does not depend on anything is loaded first: a load from the L2 costs a tenth of the call.
    sequence = tl.load(_i64(state)).to(tl.int32)
    code = _load_word(inbox)
    calls = tl.load(_i64(stats))
    if RANK == 0:
        # Not triton.next_power_of_2: SGLang puts a plain function in its place, which a kernel cannot call.
        peers: tl.constexpr = 2 if WORLD <= 2 else 4 if WORLD <= 4 else 8 if WORLD <= 8 else 64
        peer = tl.arange(0, peers)
        ack_line = inbox + ACKS + LINE * tl.where((peer > 0) & (peer < WORLD), peer, 1)
        ack = _load_word(ack_line)
    tl.debug_barrier()  # every thread has the sequence before one thread may change it
    if code != 0:
        _relay(code, inbox, record)
    else:
        chunks = tl.maximum((lanes + SLOT_LANES - 1) // SLOT_LANES, 1)
        differing = tl.zeros([], dtype=tl.int64)
        bad = tl.zeros([], dtype=tl.int64)
        for chunk in range(chunks):
            if bad == 0:
                now = sequence + chunk
                begin = chunk * SLOT_LANES
                count = tl.minimum(lanes - begin, SLOT_LANES)
                if RANK == 0:
                    ended = _await_ack(ack_line, ack, now, inbox, timeout_ns)
                    worst = tl.max(ended)
                    if worst == 0:
                        _send_chunk(addresses, sizes, widths, header, inboxes, now, begin, count, WORLD, BLOCK, UNIT)
                    else:
                        bad += 1
                        if worst == TIMED_OUT:
                            late = tl.max(tl.where(ended == TIMED_OUT, peer, 0)).to(tl.int64)
                            _fail(worst + 1, now, header, late, inboxes, record, RANK, WORLD)
                        else:
                            _relay(_load_word(inbox), inbox, record)
                else:
                    slot = inbox + RING + (now & (SLOTS - 1)).to(tl.int64) * SLOT_BYTES
                    for tile in range(0, tl.maximum(count, 1), BLOCK):  # an empty call waits for its header
                        line = tile + 1 + tl.arange(0, BLOCK)
                        active = line <= count
                        lane = begin + line - 1
                        address, left, width = _locate(lane, addresses, sizes, widths)
                        own = tl.zeros([BLOCK], dtype=tl.int64)
                        if COUNT:
                            own = _load8(address, left, active, UNIT)
                        where = slot + tl.where(active, line, 0).to(tl.int64) * LINE
                        head_low, head_high = _load_line(slot)
                        low, high = _load_line(where)
                        theirs, ended = _await_line(
                            where, low, high, slot, head_low, head_high, now | TAG_BIT, header, inbox, timeout_ns
                        )
                        arrived = active & (ended == 0)
                        if MODE == FETCH:
                            target, left, width = _locate(lane, targets, sizes, widths)
                            _store8(target, left, theirs, arrived, UNIT)
                        if MODE == OVERWRITE:
                            _store8(address, left, theirs, arrived, UNIT)
                        summed = tl.where(ended == 0, 0, 1 << 40).to(tl.int64)
                        if COUNT:
                            summed += tl.where(arrived, _differing(own ^ theirs, width, UNIT), 0)
                        total = tl.sum(summed)
                        if total != 0:
                            differing += total & 0xFFFFFFFF
                            if COUNT:
                                if (total & 0xFFFFFFFF) != 0:
                                    _note_first(stats, record, lane, arrived & (own != theirs), own, theirs, BLOCK)
                            if (total >> 40) != 0:
                                if bad == 0:
                                    worst = tl.max(ended)
                                    head = (_load_word(slot) & 0xFFFFFFFF) | (_load_word(slot + 8) << 32)
                                    if worst == STOPPED:
                                        _relay(_load_word(inbox), inbox, record)
                                    else:
                                        head = tl.where(worst == DIFFERENT, head, 0)
                                        _fail(worst, now, header, head, inboxes, record, RANK, WORLD)
                                bad += 1
                    if bad == 0:
                        _clear_slot(slot, now, BLOCK)
                        if (now & (ACK_EVERY - 1)) == ACK_EVERY - 1:
                            order = _fence(now)
                            taken = (order + 1).to(tl.int64) & 0xFFFFFFFF
                            _store_line(inboxes[0] + ACKS + LINE * RANK, taken, taken)
        if bad == 0:
            tl.store(_i64(state), (sequence + chunks).to(tl.int64))
            tl.store(_i64(stats), calls + 1)
            if COUNT:
                if differing != 0:
                    tl.store(_i64(stats) + 1, tl.load(_i64(stats) + 1) + differing)
                    tl.store(_i64(stats) + 2, tl.load(_i64(stats) + 2) + 1)


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
    DEPENDENT: tl.constexpr,
):
    """Bring group rank 0's tensors to every rank of the group. One program.

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
        DEPENDENT: launched before the kernel before it has ended (programmatic dependent launch); waits for it here.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    exchange(
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
        widths,
        RANK,
        WORLD,
        BLOCK,
        UNIT,
        MODE,
        COUNT,
    )


@triton.jit
def draw_kernel(
    scores,
    noise,
    out,
    stride,
    vocabulary,
    rows,
    cells,
    ticket,
    header,
    inboxes,
    state,
    stats,
    record,
    timeout_ns,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    COUNT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    SCORE: tl.constexpr,
    NOISY: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Take the argmax of each row of ``scores``, or of ``scores / noise``, and bring group rank 0's to every rank.

    Programs ``(rows, spans)``: each folds its span of a row into the row's cell, the last one to finish does the
    exchange. The lowest index wins a tie, as in ``torch.argmax``; a NaN wins over everything.

    Args:
        scores: address of ``[rows, vocabulary]`` of type ``SCORE``, each row contiguous and ``stride`` elements behind
            the one before; ``noise``: float32, of that shape, contiguous.
        out: address of int64 ``[rows]``.
        cells: address of int64 ``[rows]``, the smallest int64 each before and after; ``ticket``: int32, 0 likewise.
        SPAN: elements that a program reads at once; ROWS: a power of two, at least ``rows``.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    here = column < vocabulary
    place = row.to(tl.int64) * stride + column
    score = tl.load(scores.to(tl.pointer_type(SCORE)) + place, mask=here, other=float("-inf")).to(tl.float32)
    if NOISY:
        offset = row.to(tl.int64) * vocabulary + column
        divisor = tl.load(noise.to(tl.pointer_type(tl.float32)) + offset, mask=here, other=1.0)
        score = tl.div_rn(score, divisor)
    # Order floats as integers: -0 equals 0, and a NaN of either sign comes last.
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    best = tl.max(tl.where(here, key, -0x8000000000000000))
    tl.atomic_max(_i64(cells) + row, best, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    before = tl.atomic_add(ticket.to(tl.pointer_type(tl.int32)), 1, sem="acq_rel", scope="gpu")
    if before == programs - 1:
        lane = tl.arange(0, ROWS)
        mine = lane < rows
        found = tl.load(_i64(cells) + lane, mask=mine, other=0, cache_modifier=".cg")
        tl.store(_i64(out) + lane, 0x7FFFFFFF - (found & 0xFFFFFFFF), mask=mine)
        tl.store(_i64(cells) + lane, tl.full([ROWS], -0x8000000000000000, tl.int64), mask=mine)
        tl.store(ticket.to(tl.pointer_type(tl.int32)), 0)
        tl.debug_barrier()  # the exchange reads the tokens back
        if WORLD > 1:
            exchange(
                (out,),
                (out,),
                (rows * 8,),
                header,
                rows,
                inboxes,
                state,
                stats,
                record,
                timeout_ns,
                (8,),
                RANK,
                WORLD,
                BLOCK,
                8,
                MODE,
                COUNT,
            )
