"""The draft tree: nodes, and the arrays that a verify walks.

Shape letters: B requests, T tree nodes (the anchor is node 0), P paths in the beam, L tokens of a path,
K children per node, M recorded candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specsync_core import decisions

if TYPE_CHECKING:
    from specsync_core import SpecTpSync

Expand = Callable[[Tensor], Tensor]
"""The draft of the next token behind each path: int64 ``[B, P, L]`` to float logits ``[B, P, V]``."""


@dataclass(frozen=True)
class Tree:
    """A tree of candidates per request. All int64 ``[B, T]``."""

    candidates_BT: Tensor
    """Token of each node; the anchor first, parents before children."""
    parents_BT: Tensor
    """Node of each node's parent; -1 for the anchor."""
    retrieve_index_BT: Tensor
    """Position of each node in the flat batch of ``B * T`` nodes."""
    retrieve_next_token_BT: Tensor
    """First child of each node; -1 for none."""
    retrieve_next_sibling_BT: Tensor
    """Next child of the same parent; -1 for none."""
    depth: int
    """Drafted levels: a path holds at most ``depth`` drafts behind its anchor."""
    max_children: int

    @classmethod
    def from_parents(cls, candidates_BT: Tensor, parents_BT: Tensor, *, depth: int, max_children: int) -> Tree:
        """Derive the arrays of a walk. Children of one parent are siblings in the order of their nodes."""
        batch, nodes = candidates_BT.shape
        node_T = torch.arange(nodes, device=candidates_BT.device)
        is_child_BTT = parents_BT.unsqueeze(1) == node_T.view(1, -1, 1)
        later_TT = node_T.view(1, -1) > node_T.view(-1, 1)
        is_sibling_BTT = (parents_BT.unsqueeze(1) == parents_BT.unsqueeze(2)) & later_TT

        def first(mask_BTT: Tensor) -> Tensor:
            return decisions.first_true(mask_BTT.flatten(0, 1)).view(batch, nodes)

        return cls(
            candidates_BT=candidates_BT,
            parents_BT=parents_BT,
            retrieve_index_BT=torch.arange(batch * nodes, device=candidates_BT.device).view(batch, nodes),
            retrieve_next_token_BT=first(is_child_BTT),
            retrieve_next_sibling_BT=first(is_sibling_BTT),
            depth=depth,
            max_children=max_children,
        )

    def children(self, node_B: Tensor) -> Tensor:
        """The children of one node per request, in sibling order: int64 ``[B, K]``, -1 behind the last."""
        child_B = decisions.at_index(self.retrieve_next_token_BT, node_B)
        children = [child_B]
        for _ in range(self.max_children - 1):
            sibling_B = decisions.at_index(self.retrieve_next_sibling_BT, child_B.clamp(min=0))
            child_B = torch.where(child_B >= 0, sibling_B, -1)
            children.append(child_B)
        return torch.stack(children, dim=1)


def candidates_in_tree(depth: int, topk: int) -> int:
    """How many candidates a beam records: the most drafts that a tree can be chosen from."""
    return topk + (depth - 1) * topk * topk


def draft_tree(sync: SpecTpSync, expand: Expand, anchor_B: Tensor, *, depth: int, topk: int, num_drafts: int) -> Tree:
    """Draft a tree level by level, and keep the likeliest nodes.

    Every level expands the ``topk`` best paths so far by their ``topk`` likeliest tokens. A candidate's score is the
    product of the probabilities along its path; of all candidates the ``num_drafts`` best make the tree.

    A level's top-k tokens and the probabilities that belong to them are agreed together, in one call (site
    ``eagle-draft``), before a beam is chosen by them: the beam, the tree and everything behind are pure functions of
    agreed bits.

    Args:
        expand: the draft network.
        anchor_B: int64; the last committed token of each request.
        depth: levels, at least 1.
        topk: children per expanded node, and paths per level.
        num_drafts: nodes besides the anchor; at most `candidates_in_tree`.
    """
    if not 1 <= num_drafts <= candidates_in_tree(depth, topk):
        raise ValueError(
            f"draft_tree: num_drafts={num_drafts}, but depth={depth} and topk={topk} give 1 to"
            f" {candidates_in_tree(depth, topk)} candidates."
        )
    beam = _Beam.root(anchor_B)
    tokens, scores, parents = [], [], []
    for level in range(depth):
        level_tokens_BPK, level_scores_BPK = _expand_level(sync, expand, beam, topk)
        tokens.append(level_tokens_BPK.flatten(1))
        scores.append(level_scores_BPK.flatten(1))
        parents.append(beam.records_BP.repeat_interleave(topk, dim=1))
        if level < depth - 1:
            beam = beam.advance(tokens[-1], scores[-1], first_record=sum(part.shape[1] for part in tokens[:-1]))
    return _best_tree(
        anchor_B, torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), depth, topk, num_drafts
    )


@dataclass(frozen=True)
class _Beam:
    paths_BPL: Tensor
    scores_BP: Tensor
    records_BP: Tensor
    """Which recorded candidate ends each path; -1 for the anchor."""

    @classmethod
    def root(cls, anchor_B: Tensor) -> _Beam:
        one_B1 = torch.ones(anchor_B.shape[0], 1, dtype=torch.float32, device=anchor_B.device)
        return cls(anchor_B.view(-1, 1, 1), one_B1, one_B1.new_full(one_B1.shape, -1, dtype=torch.int64))

    def advance(self, tokens_BN: Tensor, scores_BN: Tensor, *, first_record: int) -> _Beam:
        """The best of a level's N = P * K candidates, as many as each path has children."""
        width = tokens_BN.shape[1] // self.scores_BP.shape[1]
        best_BP = torch.sort(scores_BN, dim=1, descending=True, stable=True).indices[:, :width]
        length = self.paths_BPL.shape[2]
        ancestors_BPL = self.paths_BPL.gather(1, (best_BP // width).unsqueeze(2).expand(-1, -1, length))
        chosen_BP1 = tokens_BN.gather(1, best_BP).unsqueeze(2)
        return _Beam(
            torch.cat((ancestors_BPL, chosen_BP1), dim=2), scores_BN.gather(1, best_BP), best_BP + first_record
        )


def _expand_level(sync: SpecTpSync, expand: Expand, beam: _Beam, topk: int) -> tuple[Tensor, Tensor]:
    probs_BPV = torch.softmax(expand(beam.paths_BPL).float(), dim=-1)
    top = probs_BPV.topk(topk, dim=-1)
    topk_p_RK, topk_index_RK = sync.sync("eagle-draft", top.values.flatten(0, 1), top.indices.flatten(0, 1))
    shape = top.values.shape
    # A path is never likelier than its beginning, so a chosen node's ancestors are chosen too.
    scores_BPK = beam.scores_BP.unsqueeze(2)
    return topk_index_RK.view(shape), torch.minimum(scores_BPK * topk_p_RK.view(shape), scores_BPK)


def _best_tree(
    anchor_B: Tensor, tokens_BM: Tensor, scores_BM: Tensor, parents_BM: Tensor, depth: int, topk: int, num_drafts: int
) -> Tree:
    # Stable, so that of equal scores the earlier candidate wins: a parent before its child.
    ranked_BM = torch.sort(scores_BM, dim=1, descending=True, stable=True).indices
    kept_BN = ranked_BM[:, :num_drafts].sort(dim=1).values
    batch, drafts = kept_BN.shape
    node_N = torch.arange(1, drafts + 1, device=anchor_B.device).expand(batch, drafts)
    node_of_record_BM = torch.zeros_like(parents_BM).scatter_(1, kept_BN, node_N)
    record_BN = parents_BM.gather(1, kept_BN)
    parents_BN = torch.where(record_BN < 0, 0, node_of_record_BM.gather(1, record_BN.clamp(min=0)))
    return Tree.from_parents(
        torch.cat((anchor_B.unsqueeze(1), tokens_BM.gather(1, kept_BN)), dim=1),
        torch.cat((torch.full_like(parents_BN[:, :1], -1), parents_BN), dim=1),
        depth=depth,
        max_children=topk,
    )
