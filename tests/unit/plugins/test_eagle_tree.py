import itertools

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from specsync_eagle.tree import Tree, candidates_in_tree, draft_tree

from tests.toy_models import table
from tests.unit.plugins.support import LoneSync


def by_last_token(logits_VV):
    return lambda paths_BPL: logits_VV[paths_BPL[:, :, -1]]


def random_parents(batch, nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, nodes), -1)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(node, (batch,), generator=generator)
    return parents


@given(st.integers(0, 4), st.integers(1, 7), st.integers(0, 2**31))
def test_the_arrays_of_a_walk(batch, nodes, seed):
    parents_BT = random_parents(batch, nodes, seed)
    tree = Tree.from_parents(torch.zeros(batch, nodes).long(), parents_BT, depth=nodes, max_children=max(nodes - 1, 1))
    assert tree.retrieve_index_BT.flatten().tolist() == list(range(batch * nodes))
    for row, parents in enumerate(parents_BT.tolist()):
        for node in range(nodes):
            children = [child for child in range(nodes) if parents[child] == node]
            assert int(tree.retrieve_next_token_BT[row, node]) == (children or [-1])[0]
            later = [other for other in range(node + 1, nodes) if parents[other] == parents[node]]
            assert int(tree.retrieve_next_sibling_BT[row, node]) == (later or [-1])[0]
            found = tree.children(torch.full((batch,), node))[row].tolist()
            assert found == children + [-1] * (len(found) - len(children))


def tree_oracle(logits_VV, anchor, depth, topk, num_drafts):
    """The best drafts as paths of tokens: beam by beam, with every candidate on record.

    None where two candidates are as good as equal: the same transitions in another order are, and rounding decides.
    """
    probs_VV = torch.softmax(logits_VV, dim=-1)
    beam, record = [((anchor,), 1.0)], []
    for _ in range(depth):
        level = []
        for path, score in beam:
            top = probs_VV[path[-1]].topk(topk)
            level += [
                ((*path, token), score * chance)
                for token, chance in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
        record += level
        beam = sorted(level, key=lambda entry: -entry[1])[:topk]
    scores = sorted(score for _, score in record)
    if any(high - low <= 1e-5 * high for low, high in itertools.pairwise(scores)):
        return None
    return {path for path, _ in sorted(record, key=lambda entry: -entry[1])[:num_drafts]}


def paths_of(tree, row):
    tokens, parents = tree.candidates_BT[row].tolist(), tree.parents_BT[row].tolist()
    paths = [(tokens[0],)]
    for node in range(1, len(tokens)):
        assert parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_tree_is_the_likeliest_of_all_candidates(depth, topk, data):
    logits_VV = table(6, 6, seed=data.draw(st.integers(0, 2**31)), scale=2.0)
    num_drafts = data.draw(st.integers(1, candidates_in_tree(depth, topk)))
    sync, anchor_B = LoneSync(), torch.tensor([0, 3, 5])
    tree = draft_tree(
        sync,
        by_last_token(logits_VV),
        anchor_B,
        depth=depth,
        topk=topk,
        num_drafts=num_drafts,
    )
    assert sync.slugs == ["eagle-draft"] * depth
    assert tree.candidates_BT.shape == (3, num_drafts + 1)
    for row, anchor in enumerate(anchor_B.tolist()):
        paths = paths_of(tree, row)
        assert len(set(paths)) == len(paths)
        best = tree_oracle(logits_VV, anchor, depth, topk, num_drafts)
        assert best is None or set(paths[1:]) == best
        event("compared" if best is not None else "a tie")


def test_a_certain_chain_keeps_parents_before_children():
    """Probability 1 makes a child's score equal its parent's; the parent must be chosen first all the same."""
    logits_VV = torch.full((4, 4), -1e9)
    logits_VV[[0, 1, 2, 3], [1, 2, 3, 0]] = 0.0
    for num_drafts in range(1, candidates_in_tree(3, 2) + 1):
        tree = draft_tree(
            LoneSync(), by_last_token(logits_VV), torch.tensor([0]), depth=3, topk=2, num_drafts=num_drafts
        )
        assert len(paths_of(tree, 0)) == num_drafts + 1
    assert (0, 1, 2, 3) in paths_of(tree, 0)


def test_a_level_follows_the_agreed_tokens_and_probabilities():
    def rank_zero(topk_p, topk_index):
        topk_p.copy_(torch.tensor([0.1, 0.9]).expand_as(topk_p))
        topk_index.copy_(torch.tensor([4, 5]).expand_as(topk_index))

    seen = []

    def expand(paths_BPL):
        seen.append(paths_BPL.tolist())
        return table(6, 6, seed=1)[paths_BPL[:, :, -1]]

    sync = LoneSync(overwrite={"eagle-draft": rank_zero})
    tree = draft_tree(sync, expand, torch.tensor([0]), depth=2, topk=2, num_drafts=3)
    assert seen == [[[[0]]], [[[0, 5], [0, 4]]]]
    assert set(paths_of(tree, 0)[1:]) == {(0, 5), (0, 5, 5), (0, 4)}


def test_probabilities_above_one_cannot_orphan_a_node():
    sync = LoneSync(overwrite={"eagle-draft": lambda topk_p, _: topk_p.mul_(50)})
    tree = draft_tree(sync, by_last_token(table(6, 6, seed=2)), torch.tensor([0]), depth=3, topk=2, num_drafts=4)
    assert len(set(paths_of(tree, 0))) == 5


@pytest.mark.parametrize("num_drafts", [0, 7])
def test_a_tree_of_impossible_size_is_refused(num_drafts):
    with pytest.raises(ValueError, match=rf"num_drafts={num_drafts}, but depth=2 and topk=2 give 1 to 6 candidates"):
        draft_tree(
            LoneSync(), by_last_token(table(4, 4, seed=1)), torch.tensor([0]), depth=2, topk=2, num_drafts=num_drafts
        )
