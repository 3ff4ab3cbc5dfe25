"""The candidate tree: its shape, and the tokens of its nodes."""

import pytest
import torch
from specsync_medusa.tree import HIT, NEXT_HEAD, NEXT_RANK, sparse_tree


@pytest.mark.parametrize(("heads", "topk", "nodes"), [(1, 1, 1), (3, 2, 6), (4, 3, 16), (2, 2, 99)])
def test_parents_come_first_and_paths_follow_them(heads, topk, nodes):
    shape = sparse_tree(heads, topk, nodes)
    assert shape.width == 1 + min(nodes, sum(topk**depth for depth in range(1, heads + 1)))
    for node in range(1, shape.width):
        parent, depth = int(shape.parents_W[node]), int(shape.depth_W[node])
        assert 0 <= parent < node
        assert depth == int(shape.depth_W[parent]) + 1 <= heads
        path = shape.path_WD[node].tolist()
        assert path[: depth + 1] == [*shape.path_WD[parent].tolist()[:depth], node]
        assert set(path[depth + 1 :]) <= {-1}
    siblings = list(zip(shape.parents_W.tolist(), shape.rank_W.tolist(), strict=True))
    assert len(set(siblings)) == shape.width


def test_it_holds_the_likeliest_combinations():
    def chance(shape, node):
        value = 1.0
        for each in shape.path_WD[node].tolist()[1:]:
            if each >= 0:
                value *= HIT * NEXT_RANK ** int(shape.rank_W[each]) * NEXT_HEAD ** (int(shape.depth_W[each]) - 1)
        return value

    all_of_them, some = sparse_tree(3, 3, 39), sparse_tree(3, 3, 12)
    best = sorted((chance(all_of_them, node) for node in range(1, 40)), reverse=True)[:12]
    assert sorted((chance(some, node) for node in range(1, 13)), reverse=True) == pytest.approx(best)


def test_a_node_holds_its_heads_candidate():
    shape = sparse_tree(2, 2, 6)
    candidates_BGK = torch.tensor([[[10, 11], [20, 21]]])
    tokens = shape.candidates(torch.tensor([7]), candidates_BGK)[0].tolist()
    assert tokens[0] == 7
    for node in range(1, shape.width):
        assert tokens[node] == 10 * int(shape.depth_W[node]) + int(shape.rank_W[node])
