"""Typical acceptance against its definition, and the verdict that follows from a decision."""

import math

import torch
from specsync_medusa.acceptance import (
    DELTA,
    EPSILON,
    TreeAccept,
    accept_greedy,
    accept_typical,
    deepest,
    simulate,
    typical,
    verdict,
)
from specsync_medusa.tree import sparse_tree

from specsync_core import decisions

B, V = 64, 8
SHAPE = sparse_tree(3, 2, 8)


def logits(scale=2.0, seed=0):
    return scale * torch.randn(B, SHAPE.width, V, generator=torch.Generator().manual_seed(seed))


def tokens(seed=1):
    return torch.randint(V, (B, SHAPE.width), generator=torch.Generator().manual_seed(seed))


def slowly(accepts):
    """The deepest node whose every node is accepted, the first of equals, node by node."""
    best = []
    for row in range(B):
        alive = {0: 0}
        for node in range(1, SHAPE.width):
            parent = int(SHAPE.parents_W[node])
            if parent in alive and accepts(row, parent, node):
                alive[node] = alive[parent] + 1
        best.append(max(alive, key=lambda node: (alive[node], -node)))
    return best


def test_typical_is_the_papers_threshold():
    probs = logits().softmax(-1)
    for row in range(4):
        for node in range(SHAPE.width):
            p = probs[row, node].tolist()
            threshold = min(EPSILON, DELTA * math.exp(sum(each * math.log(each) for each in p)))
            assert typical(probs)[row, node].tolist() == [each > threshold for each in p]


def test_a_sure_target_accepts_only_what_it_would_say():
    assert typical(torch.tensor([[1.0, 0.0], [0.96, 0.04]])).tolist() == [[True, False], [True, False]]
    unsure = torch.full((1, 100), 0.01)
    assert typical(unsure).all(), "0.01 is typical where everything is as likely"


def test_greedy_accept_equals_the_slow_oracle():
    predict = logits().argmax(-1)
    own = accept_greedy(SHAPE, tokens(), logits())
    expected = slowly(lambda row, parent, node: int(tokens()[row, node]) == int(predict[row, parent]))
    assert own.accept_node.tolist() == expected
    assert max(expected) > 0
    assert own.bonus.tolist() == [int(predict[row, node]) for row, node in enumerate(expected)]


def test_typical_accept_equals_the_slow_oracle():
    temperatures = torch.full((B,), 0.7)
    is_typical = typical(logits().div(0.7).softmax(-1))
    own = accept_typical(SHAPE, tokens(), logits(), decisions.Sampling.of(temperatures), torch.Generator())
    expected = slowly(lambda row, parent, node: bool(is_typical[row, parent, tokens()[row, node]]))
    assert own.accept_node.tolist() == expected
    assert len(set(expected)) > 3


def test_temperature_0_is_greedy_in_a_mixed_batch():
    mixed = decisions.Sampling.of(torch.tensor([0.0, 0.9] * (B // 2)))
    own, greedy = accept_typical(SHAPE, tokens(), logits(), mixed, None), accept_greedy(SHAPE, tokens(), logits())
    assert torch.equal(own.accept_node[::2], greedy.accept_node[::2])
    assert torch.equal(own.bonus[::2], greedy.bonus[::2])


def test_the_anchor_is_always_accepted():
    assert deepest(SHAPE, torch.zeros(2, SHAPE.width, dtype=torch.bool)).tolist() == [0, 0]


def test_a_verdict_follows_from_the_decision_alone():
    drafted = torch.arange(SHAPE.width).unsqueeze(0) + 100
    for node in range(SHAPE.width):
        committed = verdict(SHAPE, drafted, TreeAccept(torch.tensor([node]), torch.tensor([7])))
        depth, path = int(SHAPE.depth_W[node]), SHAPE.path_WD[node].tolist()
        assert committed.commit_lens_B.tolist() == [depth + 1]
        assert committed.path_BC[0].tolist() == path
        expected = [100 + each for each in path[1 : depth + 1]] + [7]
        assert committed.tokens_BC[0].tolist() == expected + [-1] * (len(path) - len(expected))


def test_a_diverged_node_drifts_and_does_not_crash():
    committed = verdict(SHAPE, tokens()[:1], TreeAccept(torch.tensor([99]), torch.tensor([7])))
    assert int(committed.path_BC.max()) == SHAPE.width - 1


def test_simulated_lengths_have_their_mean():
    wide = torch.zeros(4000, SHAPE.width, V)
    nodes = simulate(SHAPE, wide, 1.5, torch.Generator().manual_seed(1)).accept_node
    assert abs(float(SHAPE.depth_W[nodes].float().mean()) - 1.5) < 0.05
    assert set(SHAPE.rank_W[nodes].tolist()) == {0}
