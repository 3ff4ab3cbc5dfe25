"""The verdict on a candidate tree: typical acceptance (Cai et al., arXiv 2401.10774), or the target's own path. Pure.

Shape letters: B requests, W tree nodes (the anchor first), D nodes of the longest path, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from specsync_core import Verdict, decisions
from specsync_medusa.tree import TreeShape

EPSILON = 0.09
"""A candidate that the target gives more than this is typical, however sure the target is of itself."""
DELTA = 0.3
"""Of ``exp(-entropy)``: where the target is unsure, less is typical too."""


class TreeAccept(NamedTuple):
    """The decision; everything else about a verdict is a pure function of it. Both int64 ``[B]``."""

    accept_node: Tensor
    """The deepest accepted node: its path is what is committed."""
    bonus: Tensor
    """The target's token behind it."""


def typical(probs: Tensor) -> Tensor:
    """Which tokens are typical of distributions ``[..., V]``: ``p > min(epsilon, delta * exp(-entropy))``; bool."""
    entropy = -(probs * probs.clamp(min=1e-20).log()).sum(dim=-1, keepdim=True)
    return probs > (DELTA * torch.exp(-entropy)).clamp(max=EPSILON)


def accept_greedy(shape: TreeShape, tokens_BW: Tensor, target_logits_BWV: Tensor) -> TreeAccept:
    """Accept candidates that are the target's argmax behind their parent."""
    predict_BW = target_logits_BWV.argmax(dim=-1)
    accepted_BW = tokens_BW == predict_BW[:, shape.parents_W.clamp(min=0)]
    node_B = deepest(shape, accepted_BW)
    return TreeAccept(node_B, decisions.at_index(predict_BW, node_B))


def accept_typical(
    shape: TreeShape,
    tokens_BW: Tensor,
    target_logits_BWV: Tensor,
    sampling: decisions.Sampling,
    generator: Generator | None,
) -> TreeAccept:
    """Accept candidates that are typical of the target behind their parent; draw the token behind the last one.

    Greedy rows accept as `accept_greedy` does, which is what typical acceptance becomes at temperature 0.
    """
    probs_BWV = decisions.probabilities(target_logits_BWV, sampling.temperatures_B)
    typical_BWV = typical(probs_BWV)[:, shape.parents_W.clamp(min=0)]
    accepted_BW = typical_BWV.gather(2, tokens_BW.unsqueeze(2)).squeeze(2)
    node_B = deepest(shape, accepted_BW)
    drawn_B = decisions.sample_tokens(decisions.at_index(target_logits_BWV, node_B), sampling, generator)
    greedy = accept_greedy(shape, tokens_BW, target_logits_BWV)
    return TreeAccept(
        torch.where(sampling.greedy_B, greedy.accept_node, node_B),
        torch.where(sampling.greedy_B, greedy.bonus, drawn_B),
    )


def deepest(shape: TreeShape, accepted_BW: Tensor) -> Tensor:
    """The deepest node whose whole path is accepted, the first of equals; the anchor always is: int64 ``[B]``."""
    on_path_WD = shape.path_WD >= 0
    path_BWD = accepted_BW[:, shape.path_WD.clamp(min=0)] | ~on_path_WD
    path_BWD[:, :, 0] = True
    depth_BW = torch.where(path_BWD.all(dim=2), shape.depth_W, -1)
    return depth_BW.argmax(dim=1)


def simulate(shape: TreeShape, target_logits_BWV: Tensor, mean_len: float, generator: Generator | None) -> TreeAccept:
    """Force accepted lengths of a given mean, along each head's first candidate."""
    line_D = shape.path_WD[shape.path_WD[:, 1:].amin(dim=1).argmax()]  # the deepest path is the first candidates'
    longest_B = torch.full(target_logits_BWV.shape[:1], int((line_D >= 0).sum()) - 1, device=line_D.device)
    node_B = line_D[decisions.simulated_lens(mean_len, longest_B, generator)]
    return TreeAccept(node_B, decisions.at_index(target_logits_BWV, node_B).argmax(dim=-1))


def verdict(shape: TreeShape, tokens_BW: Tensor, agreed: TreeAccept) -> Verdict:
    """What a step commits: a pure function of the agreed decision.

    A node beyond the tree is cut to it: a rank that has diverged must drift, which can be diagnosed, and not crash.
    """
    node_B = agreed.accept_node.long().clamp(0, shape.width - 1)
    path_BD, len_B1 = shape.path_WD[node_B], shape.depth_W[node_B].unsqueeze(1)
    drafted_BD = tokens_BW.gather(1, path_BD.clamp(min=0)).roll(-1, dims=1)
    column_D = torch.arange(path_BD.shape[1], device=path_BD.device)
    tokens_BD = torch.where(column_D == len_B1, agreed.bonus.long().unsqueeze(1), drafted_BD)
    return Verdict(
        commit_lens_B=len_B1.squeeze(1) + 1,
        tokens_BC=tokens_BD.masked_fill(column_D > len_B1, -1),
        path_BC=path_BD,
    )
