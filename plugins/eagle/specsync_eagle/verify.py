"""The verdict on a tree: the path that the target takes through it, and the token behind.

Shape letters: B requests, T tree nodes, D = depth + 1 nodes of the longest path (the anchor first), K children per
node, V vocabulary. The walk has a fixed number of steps and reads nothing on the host, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor

from specsync_core import Verdict, decisions
from specsync_eagle.tree import Tree

if TYPE_CHECKING:
    from specsync_core import SpecTpSync


class TreeVerdict(NamedTuple):
    """What every verify returns. All int32."""

    predict: Tensor
    """``[B * T]``; the token behind each node of the accepted path, 0 elsewhere."""
    accept_index: Tensor
    """``[B, D]``; flat positions of the accepted path's nodes, the anchor first; -1 behind the end."""
    num_correct_drafts: Tensor
    """``[B]``; accepted drafts, the anchor and the bonus not counted."""


Choose = Callable[[Tensor, Tensor], Tensor]
"""Which child the target takes: nodes int64 ``[B]``, children int64 ``[B, K]`` to a column, -1 for none."""


def verify_tree(
    sync: SpecTpSync,
    tree: Tree,
    target_logits_BTV: Tensor,
    sampling: decisions.Sampling,
    generator: Generator | None = None,
) -> TreeVerdict:
    """The agreed verdict of a verify, greedy, sampled or mixed.

    All three tensors are agreed in one call and in every path (``eagle-verify-greedy`` when every row is greedy,
    else ``eagle-verify-sample``): a branch without it is where ranks part (SG #28815, #34238).

    Args:
        target_logits_BTV: float; the target's logits behind each node.
        generator: this rank's own; ranks may hold different states.
    """
    if sampling.all_greedy:
        return TreeVerdict(
            *sync.sync("eagle-verify-greedy", *greedy_verdict(tree, target_logits_BTV), logits=target_logits_BTV)
        )
    verdict = sampled_verdict(tree, target_logits_BTV, sampling, generator)
    return TreeVerdict(*sync.sync("eagle-verify-sample", *verdict, logits=target_logits_BTV))


def greedy_verdict(tree: Tree, target_logits_BTV: Tensor) -> TreeVerdict:
    """Follow the child that is the target's argmax, for as long as there is one. Pure."""
    predict_BT = target_logits_BTV.argmax(dim=-1)
    stop_B, verdict = _walk(tree, _greedy_choice(tree, predict_BT))
    return _with_bonus(tree, verdict, stop_B, decisions.at_index(predict_BT, stop_B))


def sampled_verdict(
    tree: Tree, target_logits_BTV: Tensor, sampling: decisions.Sampling, generator: Generator | None
) -> TreeVerdict:
    """Follow children by coin; greedy rows follow the argmax. Pure.

    One coin per node: the first child whose running sum of target probabilities exceeds it is taken. When none is,
    the walk ends and the bonus is drawn from the target's distribution without the children that were tried. A token
    among the children is then drawn with its own probability, and so is any other: the target's distribution is left
    as it is, whatever tree was drafted.
    """
    predict_BT = target_logits_BTV.argmax(dim=-1)
    probs_BTV = decisions.probabilities(target_logits_BTV, sampling.temperatures_B)
    coins_BT = decisions.uniform_coins(predict_BT, generator)
    noise_BV = decisions.exponential_noise(probs_BTV[:, 0], generator)
    greedily, by_coin = _greedy_choice(tree, predict_BT), _coin_choice(tree, probs_BTV, coins_BT)

    def choose(node_B: Tensor, children_BK: Tensor) -> Tensor:
        return torch.where(sampling.greedy_B, greedily(node_B, children_BK), by_coin(node_B, children_BK))

    stop_B, verdict = _walk(tree, choose)
    weights_BV = _without_children(tree, stop_B, decisions.at_index(probs_BTV, stop_B))
    drawn_B = decisions.weighted_draw(weights_BV, noise_BV)
    bonus_B = torch.where(sampling.greedy_B, decisions.at_index(predict_BT, stop_B), drawn_B)
    return _with_bonus(tree, verdict, stop_B, bonus_B)


def simulate(
    sync: SpecTpSync,
    tree: Tree,
    target_logits_BTV: Tensor,
    *,
    mean_len: float,
    generator: Generator | None = None,
) -> TreeVerdict:
    """Force accepted lengths of a given mean along first children (site ``eagle-accept-simulated``).

    The length is drawn after the verify was agreed on and rewrites all three tensors, so the final values are synced
    again. The bonus is the target's argmax where the path ends: a benchmark's text has no meaning.
    """
    longest_B = torch.full(tree.candidates_BT.shape[:1], tree.depth, device=tree.candidates_BT.device)
    left_B = decisions.simulated_lens(mean_len, longest_B, generator)

    def choose(node_B: Tensor, children_BK: Tensor) -> Tensor:
        nonlocal left_B
        left_B = left_B - 1
        return torch.where((left_B >= 0) & (children_BK[:, 0] >= 0), 0, -1)

    stop_B, verdict = _walk(tree, choose)
    bonus_B = decisions.at_index(target_logits_BTV, stop_B).argmax(dim=-1)
    return TreeVerdict(*sync.sync("eagle-accept-simulated", *_with_bonus(tree, verdict, stop_B, bonus_B)))


def tree_verdict(tree: Tree, agreed: TreeVerdict) -> Verdict:
    """What a tree commits: a pure function of an agreed verdict.

    A length beyond the path is cut to it, and its entries are read as if they were there: a rank whose length has
    diverged must drift, which can be diagnosed, and not crash on an index.
    """
    batch, nodes = tree.candidates_BT.shape
    depth_D = torch.arange(agreed.accept_index.shape[1], device=tree.candidates_BT.device)
    num_correct_B1 = agreed.num_correct_drafts.long().clamp(0, depth_D.shape[0] - 1).unsqueeze(1)
    index_BD = agreed.accept_index.long().clamp(0, max(batch * nodes - 1, 0))
    behind_BD = depth_D > num_correct_B1
    return Verdict(
        commit_lens_B=num_correct_B1.squeeze(1) + 1,
        tokens_BC=agreed.predict.long()[index_BD].masked_fill(behind_BD, -1),
        path_BC=(index_BD % nodes).masked_fill(behind_BD, -1),
    )


def _greedy_choice(tree: Tree, predict_BT: Tensor) -> Choose:
    def choose(node_B: Tensor, children_BK: Tensor) -> Tensor:
        tokens_BK = tree.candidates_BT.gather(1, children_BK.clamp(min=0))
        wanted_B = decisions.at_index(predict_BT, node_B)
        return decisions.first_true((children_BK >= 0) & (tokens_BK == wanted_B.unsqueeze(1)))

    return choose


def _coin_choice(tree: Tree, probs_BTV: Tensor, coins_BT: Tensor) -> Choose:
    def choose(node_B: Tensor, children_BK: Tensor) -> Tensor:
        tokens_BK = tree.candidates_BT.gather(1, children_BK.clamp(min=0))
        probs_BK = decisions.at_index(probs_BTV, node_B).gather(1, tokens_BK).masked_fill(children_BK < 0, 0.0)
        coin_B1 = decisions.at_index(coins_BT, node_B).unsqueeze(1)
        return decisions.first_true((children_BK >= 0) & (coin_B1 < probs_BK.cumsum(dim=1)))

    return choose


def _without_children(tree: Tree, node_B: Tensor, probs_BV: Tensor) -> Tensor:
    """The target's weights without the tokens of a node's children; as they were, should nothing be left."""
    children_BK = tree.children(node_B)
    tokens_BK = tree.candidates_BT.gather(1, children_BK.clamp(min=0))
    # amin: an absent child (1) and a present one (0) may name the same token, and the present one must win.
    kept_BV = torch.ones_like(probs_BV).scatter_reduce_(1, tokens_BK, (children_BK < 0).to(probs_BV.dtype), "amin")
    weights_BV = probs_BV * kept_BV
    return torch.where(weights_BV.sum(dim=1, keepdim=True) > 0, weights_BV, probs_BV)


def _walk(tree: Tree, choose: Choose) -> tuple[Tensor, TreeVerdict]:
    """Walk from the anchor by ``choose``. Returns the node where each walk ends, and the verdict but for the bonus."""
    batch = tree.candidates_BT.shape[0]
    node_B = torch.zeros(batch, dtype=torch.int64, device=tree.candidates_BT.device)
    alive_B = torch.ones_like(node_B, dtype=torch.bool)
    predict_BT = torch.zeros_like(tree.candidates_BT)
    path = [decisions.at_index(tree.retrieve_index_BT, node_B)]
    for _ in range(tree.depth):
        children_BK = tree.children(node_B)
        column_B = choose(node_B, children_BK)
        alive_B = alive_B & (column_B >= 0)
        child_B = decisions.at_index(children_BK, column_B.clamp(min=0)).clamp(min=0)
        token_B = decisions.at_index(tree.candidates_BT, child_B)
        predict_BT.scatter_(1, node_B.unsqueeze(1), torch.where(alive_B, token_B, 0).unsqueeze(1))
        node_B = torch.where(alive_B, child_B, node_B)
        path.append(torch.where(alive_B, decisions.at_index(tree.retrieve_index_BT, node_B), -1))
    accept_index_BD = torch.stack(path, dim=1)
    num_correct_B = (accept_index_BD >= 0).sum(dim=1) - 1
    return node_B, TreeVerdict(predict_BT, accept_index_BD.int(), num_correct_B.int())


def _with_bonus(tree: Tree, verdict: TreeVerdict, stop_B: Tensor, bonus_B: Tensor) -> TreeVerdict:
    predict_BT = verdict.predict.scatter(1, stop_B.unsqueeze(1), bonus_B.unsqueeze(1))
    return verdict._replace(predict=predict_BT.flatten().int())
