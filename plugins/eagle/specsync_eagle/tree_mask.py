"""The attention mask of a verify that spans the sequences: an agreed tree goes into the places that it has there.

Shape letters: B requests, N nodes of a request's tree, M = B * N * N.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor


def spread_tree_(mask: Tensor, tree_M: Tensor, length_B: Tensor, nodes: int) -> None:
    """Write every request's tree into a mask that has a row per node: the request's length, then the tree's row.

    In one launch on CUDA and ROCm: the verify waits for this host, where each of PyTorch's operations takes some 20 us
    in a running engine (measured on two H200s: 170 to 220 us for those below).

    Args:
        mask: bool ``[sum of N * (length + N)]``, contiguous, on the current device; overwritten where the trees are,
            and nowhere else.
        tree_M: bool ``[M]``, contiguous: may node i see node j, request by request.
        length_B: int64 or int32 ``[B]``, contiguous: tokens before the trees.
        nodes: N.

    Graph: capturable on CUDA after `prepare` or a first call with lengths of this dtype and as many nodes; elsewhere
        after a first call with these sizes.
    """
    requests = length_B.numel()
    if mask.is_cuda:
        kernel = prepare(mask.device, length_B.dtype, nodes)
        kernel[(requests, 1, 1)](mask, tree_M, length_B, nodes, _cells(nodes))
        return
    # Node i's place for node j: N * (the lengths before) + N^2 * b + (length + N) * i + length + j. Without lengths
    # that is the places in order.
    fixed_BM, per_length_M = _places(1 << (requests - 1).bit_length(), nodes, mask.device)
    place_BM = fixed_BM[:requests].add((length_B.cumsum(0) - length_B)[:, None], alpha=nodes)
    place_BM.addcmul_(length_B[:, None], per_length_M)
    mask.index_copy_(0, place_BM.view(-1), tree_M)


@lru_cache(maxsize=16)
def _places(requests: int, nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What of the places in a mask does not depend on lengths, and what a request's length counts for."""
    fixed_BM = torch.arange(requests * nodes * nodes, device=device).view(requests, nodes * nodes)
    return fixed_BM, fixed_BM[0] // nodes + 1


@cache
def prepare(device: torch.device, lengths: torch.dtype, nodes: int) -> Any:
    """Compile and load the kernel for one CUDA device: Triton's dispatcher would look at every argument of every call.

    Raises:
        ImportError: Triton is not installed.
    """
    from specsync_eagle.tree_mask_kernel import spread_kernel

    with torch.cuda.device(device):
        kernel = spread_kernel.warmup(torch.bool, torch.bool, lengths, nodes, _cells(nodes), grid=(1,))
        _ = kernel.run  # loads it, for the device that is current here
    return kernel


def _cells(nodes: int) -> int:
    """A power of two, at least the cells of a tree's matrix."""
    return 1 << (nodes * nodes - 1).bit_length()
