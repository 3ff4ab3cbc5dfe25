"""How the kernels of ``one-shot`` store, load and await words that another rank's kernel loads and stores.

A *line* is two words of 8 bytes, each whole; what lies in them is told in `one_shot_protocol`. Imported only where
Triton is. Under Triton's interpreter the same functions work on host memory, one rank after the other.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: RET505 - a `return` in an `if` over a constant does not end a Triton function
import triton
import triton.language as tl
from triton import knobs

from specsync_core.transports import one_shot_protocol as protocol

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
SLOTS = tl.constexpr(protocol.SLOTS)
assert protocol.SLOTS == 32  # `await_ack` has the number in its assembly

# What a wait ends with; 0 is an arrival.
DIFFERENT = tl.constexpr(1)
TIMED_OUT = tl.constexpr(2)
STOPPED = tl.constexpr(3)


@triton.jit
def i64(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def store_line(address, low, high):
    """Store two words, each whole. ``address`` 0 stores nothing."""
    if INTERPRETED:
        tl.store(i64(address), low, mask=address != 0)
        tl.store(i64(address + 8), high, mask=address != 0)
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
def load_word(address):
    """Load 8 bytes that another rank may store into."""
    if INTERPRETED:
        return tl.load(i64(address))
    return tl.inline_asm_elementwise(
        "ld.relaxed.sys.global.b64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def fence(order):
    """A system-wide fence of acquire and release. Takes and returns a value so that it stays in its place."""
    if INTERPRETED:
        return order
    return tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [order], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def any_of(flag):
    """Whether a flag is set in any thread of the block; a barrier.

    Threads that load what another rank may store at that moment can differ, and a block must not part before a barrier.
    """
    if INTERPRETED:
        return flag
    else:
        voted = tl.inline_asm_elementwise(
            """{
            .reg .pred own, any;
            setp.ne.u32 own, $1, 0;
            barrier.cta.red.or.pred any, 0, own;
            selp.u32 $0, 1, 0, any;
            }""",
            "=r,r",
            [flag.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return voted != 0


@triton.jit
def load_line(address):
    """Load two words, each whole, that another rank may store into. Does not wait."""
    if INTERPRETED:
        return tl.load(i64(address)), tl.load(i64(address + 8))
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
def await_line(line, low, high, header_line, head_low, head_high, tag, header, broken, timeout_ns):
    """Wait until a line and its slot's header carry ``tag``; return the line's payload and how the wait ended.

    The words that were loaded before are looked at first: a thread with several lines has then waited for all of
    them at once.
    """
    if INTERPRETED:
        here = ((head_low >> 32).to(tl.int32) == tag) & ((head_high >> 32).to(tl.int32) == tag)
        theirs = (head_low & 0xFFFFFFFF) | (head_high << 32)
        arrived = here & ((low >> 32).to(tl.int32) == tag) & ((high >> 32).to(tl.int32) == tag)
        stopped = tl.load(i64(broken)) != 0
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
def await_ack(ack_line, ack, sequence, broken, timeout_ns):
    """Wait until fewer than `SLOTS` chunks before ``sequence`` are not acknowledged; ``ack`` was loaded before."""
    if INTERPRETED:
        behind = sequence - ack.to(tl.int32) >= SLOTS
        stopped = tl.load(i64(broken)) != 0
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
