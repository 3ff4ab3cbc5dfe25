"""The Triton kernel of the fused draw: an argmax over each row, whose last program does the exchange.

Imported only where Triton is.
"""

from __future__ import annotations

# mypy: ignore-errors
import triton
import triton.language as tl

from specsync_core.transports.one_shot_kernel import OVERWRITE, sync_kernel
from specsync_core.transports.one_shot_words import i64


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
    COUNT: tl.constexpr,
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
    tl.atomic_max(i64(cells) + row, best, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    before = tl.atomic_add(ticket.to(tl.pointer_type(tl.int32)), 1, sem="acq_rel", scope="gpu")
    if before == programs - 1:
        lane = tl.arange(0, ROWS)
        mine = lane < rows
        found = tl.load(i64(cells) + lane, mask=mine, other=0, cache_modifier=".cg")
        tl.store(i64(out) + lane, 0x7FFFFFFF - (found & 0xFFFFFFFF), mask=mine)
        tl.store(i64(cells) + lane, tl.full([ROWS], -0x8000000000000000, tl.int64), mask=mine)
        tl.store(ticket.to(tl.pointer_type(tl.int32)), 0)
        tl.debug_barrier()  # the exchange reads the tokens back
        if WORLD > 1:
            sync_kernel(
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
                OVERWRITE,
                COUNT,
                ROWS < BLOCK,
            )
