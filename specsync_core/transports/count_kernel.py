"""The Triton kernel that compares a call's tensors with what came from group rank 0, counts, and overwrites.

One program, one launch, any number of tensors, where plain torch needs some twenty launches (measured in an engine:
500 us of host time a call). Imported only where Triton is. The words of the counts are those of ``one-shot``.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from specsync_core.transports.one_shot_kernel import _differing, _i64, _load8, _locate, _note_first, _store8


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
    calls = tl.load(_i64(stats))
    if COMPARE:
        differing = tl.zeros([], dtype=tl.int64)
        for tile in range(0, lanes, BLOCK):
            lane = tile + tl.arange(0, BLOCK)
            active = lane < lanes
            address, left, width = _locate(lane, addresses, sizes, widths)
            other, _, _ = _locate(lane, others, sizes, widths)
            own = _load8(address, left, active, UNIT)
            theirs = _load8(other, left, active, UNIT)
            if OVERWRITE:
                _store8(address, left, theirs, active, UNIT)
            total = tl.sum(tl.where(active, _differing(own ^ theirs, width, UNIT), 0))
            if total != 0:
                differing += total
                _note_first(stats, record, lane, active & (own != theirs), own, theirs, BLOCK)
        if differing != 0:
            tl.store(_i64(stats) + 1, tl.load(_i64(stats) + 1) + differing)
            tl.store(_i64(stats) + 2, tl.load(_i64(stats) + 2) + 1)
    tl.store(_i64(stats), calls + 1)
