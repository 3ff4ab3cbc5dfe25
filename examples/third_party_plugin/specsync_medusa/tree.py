"""Medusa's candidate tree: which combinations of the heads' candidates are verified.

After "Searching for the optimized tree construction" in Cai et al., arXiv 2401.10774: nodes are added by their chance.

The tree's shape is fixed, so ranks agree on it by themselves. Shape letters: B requests, G heads, K candidates per
head, W nodes (the anchor first), D = G + 1 nodes of the longest path.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor

HIT = 0.6
"""Assumed chance that the first head's first candidate is right. A trained model would bring measured ones."""
NEXT_RANK = 0.35
NEXT_HEAD = 0.8


@dataclass(frozen=True)
class TreeShape:
    """The nodes of a tree, parents before children. All int64, on the engine's device."""

    parents_W: Tensor
    """-1 for the anchor."""
    depth_W: Tensor
    """0 for the anchor; a node at depth d holds a candidate of head d - 1."""
    rank_W: Tensor
    """Which of its head's candidates the node holds."""
    path_WD: Tensor
    """The nodes from the anchor to each node; -1 behind it."""

    @property
    def width(self) -> int:
        return int(self.parents_W.shape[0])

    def candidates(self, anchor_B: Tensor, candidates_BGK: Tensor) -> Tensor:
        """The token of every node: int64 ``[B, W]``."""
        head_W, rank_W = self.depth_W[1:] - 1, self.rank_W[1:]
        return torch.cat((anchor_B.unsqueeze(1), candidates_BGK[:, head_W, rank_W]), dim=1)


def sparse_tree(heads: int, topk: int, nodes: int, device: torch.device | str = "cpu") -> TreeShape:
    """The ``nodes`` likeliest combinations, besides the anchor, where heads hit independently of each other."""
    parents, depths, ranks, paths = [-1], [0], [0], [[0]]
    waiting: list[tuple[float, int, int]] = []

    def offer(parent: int, chance: float) -> None:
        for rank in range(topk if depths[parent] < heads else 0):
            heappush(waiting, (-chance * HIT * NEXT_RANK**rank * NEXT_HEAD ** depths[parent], parent, rank))

    offer(0, 1.0)
    while waiting and len(parents) <= nodes:
        chance, parent, rank = heappop(waiting)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        ranks.append(rank)
        paths.append([*paths[parent], len(parents) - 1])
        offer(len(parents) - 1, -chance)
    padded = [path + [-1] * (heads + 1 - len(path)) for path in paths]
    return TreeShape(*(torch.tensor(values, device=device) for values in (parents, depths, ranks, padded)))
