"""The Triton kernel that spreads trees into a mask. Imported only where Triton is."""

from __future__ import annotations

# mypy: ignore-errors
import triton
import triton.language as tl

STRETCH = tl.constexpr(128)


@triton.jit(do_not_specialize=("mask", "tree", "lengths"))
def spread_kernel(mask, tree, lengths, NODES: tl.constexpr, CELLS: tl.constexpr):
    """Write one request's tree; a program for each. See `tree_mask.spread_tree_`.

    Args:
        CELLS: a power of two, at least ``NODES`` squared.
    """
    request = tl.program_id(0)
    before = tl.zeros([], dtype=tl.int64)
    for start in range(0, request, STRETCH):
        other = start + tl.arange(0, STRETCH)
        before += tl.sum(tl.load(lengths + other, mask=other < request, other=0).to(tl.int64))
    length = tl.load(lengths + request).to(tl.int64)
    cell = tl.arange(0, CELLS)
    there = cell < NODES * NODES
    own = request.to(tl.int64) * (NODES * NODES) + cell
    place = before * NODES + own + (cell // NODES + 1) * length
    tl.store(mask + place, tl.load(tree + own, mask=there), mask=there)
