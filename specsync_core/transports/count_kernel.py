"""The Triton kernel that compares a call's tensors with what came from group rank 0, counts, and overwrites.

One program, one launch, any number of tensors, where plain torch needs some twenty launches (measured in an engine:
500 us of host time a call). Imported only where Triton is. The words of the counts are those of ``one-shot``.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from specsync_core.transports.kernel_lanes import add_differing, count_differing, load8, locate, note_first, store8
from specsync_core.transports.one_shot_words import i64


@triton.jit
def count_kernel(
    addresses,
    others,
    sizes,
    lanes,
    stats,
    record,
    widths: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    OVERWRITE: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """Count one call.

    Args:
        addresses, others: of this rank's tensors and of group rank 0's values, contiguous.
        sizes, widths: bytes of each tensor, and of its elements.
        lanes: words of 8 bytes in all; each tensor begins with a new one.
        stats, record: int64 words, see `one_shot_protocol`; of the record only the step is read.
    """
    calls = tl.load(i64(stats))
    if COMPARE:
        differing = tl.zeros([], dtype=tl.int64)
        for tile in range(0, lanes, BLOCK):
            lane = tile + tl.arange(0, BLOCK)
            active = lane < lanes
            address, left, width = locate(lane, addresses, sizes, widths)
            other, _, _ = locate(lane, others, sizes, widths)
            own = load8(address, left, active, UNIT)
            theirs = load8(other, left, active, UNIT)
            if OVERWRITE:
                store8(address, left, theirs, active, UNIT)
            total = tl.sum(tl.where(active, count_differing(own ^ theirs, width, UNIT), 0))
            if total != 0:
                differing += total
                note_first(stats, record, calls + 1, lane, active & (own != theirs), own, theirs)
        add_differing(stats, differing)
    tl.store(i64(stats), calls + 1)
