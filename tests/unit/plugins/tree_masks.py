"""Verify masks as an engine makes them. Run as a program: the kernel that spreads trees, under Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

CASES = ((1, 3), (4, 8), (7, 12), (150, 2))
"""Requests and nodes: no powers of two, and more requests than the kernel adds up at once."""


def mask_of(tree_BNN: Tensor, length_B: Tensor) -> Tensor:
    """A row per node, request by request: all that was before, then the tree's row."""
    rows = [
        torch.cat((tree_NN.new_ones(len(tree_NN), length), tree_NN), dim=1).view(-1)
        for tree_NN, length in zip(tree_BNN, length_B.tolist(), strict=True)
    ]
    return torch.cat(rows)


def trees(requests: int, nodes: int, seed: int) -> Tensor:
    return torch.rand(requests, nodes, nodes, generator=torch.Generator().manual_seed(seed)) < 0.5


def lengths(requests: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(1, 200, (requests,), generator=torch.Generator().manual_seed(requests)).to(dtype)


def check_under_the_interpreter() -> None:
    from specsync_eagle.tree_mask_kernel import spread_kernel

    for requests, nodes in CASES:
        for dtype in (torch.int64, torch.int32):
            length_B = lengths(requests, dtype)
            own, theirs = (trees(requests, nodes, seed) for seed in (0, 1))
            mask = mask_of(own, length_B)
            assert not torch.equal(mask, mask_of(theirs, length_B))
            cells = 1 << (nodes * nodes - 1).bit_length()
            spread_kernel[(requests,)](mask, theirs.reshape(-1), length_B, nodes, cells)
            assert torch.equal(mask, mask_of(theirs, length_B)), (requests, nodes, dtype)
            print(f"{requests} trees of {nodes} nodes", flush=True)


def check_places_beyond_32_bits() -> None:
    """A mask of 2.3 GB, of zeros alone: what is not touched takes no memory."""
    from specsync_eagle.tree_mask_kernel import spread_kernel

    requests, nodes, length = 3, 64, 12_000_000
    mask = torch.zeros(requests * nodes * (length + nodes), dtype=torch.bool)
    tree_BNN = trees(requests, nodes, seed=0)
    length_B = torch.full((requests,), length, dtype=torch.int32)
    spread_kernel[(requests,)](mask, tree_BNN.view(-1), length_B, nodes, nodes * nodes)
    assert torch.equal(mask.view(requests, nodes, -1)[..., length:], tree_BNN)
    print("trees of a mask of 2.3 GB", flush=True)


if __name__ == "__main__":
    check_under_the_interpreter()
    check_places_beyond_32_bits()
