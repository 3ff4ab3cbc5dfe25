import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specsync_eagle import verify
from specsync_eagle.tree import Tree
from specsync_eagle.verify import TreeVerdict, greedy_verdict, sampled_verdict, simulate, tree_verdict, verify_tree

from specsync_core import decisions
from specsync_core.decisions import Sampling
from tests.toy_models import table
from tests.unit.plugins.support import LoneSync, assert_distributed

VOCAB = 6


def random_tree(batch, nodes, seed, *, vocab=VOCAB):
    """Children of one node hold different tokens, as a top-k gives them."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents = torch.zeros(batch, nodes).long(), torch.full((batch, nodes), -1)
    for row in range(batch):
        order = torch.rand(nodes, vocab, generator=generator).argsort(dim=1)
        used = [0] * nodes
        for node in range(1, nodes):
            free = [other for other in range(node) if used[other] < vocab]
            parent = free[int(torch.randint(len(free), (), generator=generator))]
            tokens[row, node] = order[parent, used[parent]]
            parents[row, node] = parent
            used[parent] += 1
    return Tree.from_parents(tokens, parents, depth=max(nodes - 1, 1), max_children=min(max(nodes - 1, 1), vocab))


def walk_oracle(tree, row, decide, node=0):
    """Recursion over the tree: ``decide(node, children)`` says which child, or the bonus where the walk ends."""
    children = [child for child, parent in enumerate(tree.parents_BT[row].tolist()) if parent == node]
    child, bonus = decide(node, children)
    if child is None:
        return [node], [bonus]
    path, tokens = walk_oracle(tree, row, decide, child)
    return [node, *path], [int(tree.candidates_BT[row, child]), *tokens]


def check(tree, verdict, row, path, tokens):
    nodes = tree.candidates_BT.shape[1]
    predict, padding = [0] * nodes, [-1] * (tree.depth + 1 - len(path))
    for node, token in zip(path, tokens, strict=True):
        predict[node] = token
    assert verdict.accept_index[row].tolist() == [*(row * nodes + node for node in path), *padding]
    assert verdict.predict.view(-1, nodes)[row].tolist() == predict
    assert int(verdict.num_correct_drafts[row]) == len(path) - 1
    assert {part.dtype for part in verdict} == {torch.int32}


@given(st.integers(0, 4), st.integers(1, 8), st.integers(0, 2**31))
def test_greedy_verify(batch, nodes, seed):
    tree = random_tree(batch, nodes, seed)
    logits_BTV = table(batch, nodes, VOCAB, seed=seed)
    verdict = greedy_verdict(tree, logits_BTV)
    for row in range(batch):
        predict = logits_BTV[row].argmax(dim=-1).tolist()

        def decide(node, children, row=row, predict=predict):
            match = [child for child in children if int(tree.candidates_BT[row, child]) == predict[node]]
            return (match[0], None) if match else (None, predict[node])

        check(tree, verdict, row, *walk_oracle(tree, row, decide))


@settings(max_examples=150)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**31))
def test_sampling_verify(batch, nodes, seed):
    tree, generator = random_tree(batch, nodes, seed), torch.Generator().manual_seed(seed)
    logits_BTV = table(batch, nodes, VOCAB, seed=seed)
    temperatures_B = torch.tensor([0.0, 0.5, 1.0, 2.0])[:batch]
    sampling = Sampling.of(temperatures_B)
    verdict = sampled_verdict(tree, logits_BTV, sampling, generator)
    replay = torch.Generator().manual_seed(seed)
    coins_BT = decisions.uniform_coins(logits_BTV[:, :, 0], replay)
    noise_BV = decisions.exponential_noise(logits_BTV[:, 0], replay)
    probs_BTV = decisions.probabilities(logits_BTV, sampling.temperatures_B)
    for row in range(batch):

        def decide(node, children, row=row):
            probs, tokens = probs_BTV[row, node].tolist(), tree.candidates_BT[row].tolist()
            if temperatures_B[row] <= 0:
                best = int(logits_BTV[row, node].argmax())
                return next(((child, None) for child in children if tokens[child] == best), (None, best))
            running = 0.0
            for child in children:
                running += probs[tokens[child]]
                if float(coins_BT[row, node]) < running:
                    return child, None
            for child in children:
                probs[tokens[child]] = 0.0
            race = [weight / hurdle for weight, hurdle in zip(probs, noise_BV[row].tolist(), strict=True)]
            return None, race.index(max(race))

        check(tree, verdict, row, *walk_oracle(tree, row, decide))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_committed_tokens_follow_the_target_whatever_tree_was_drafted(seed):
    """First token, and the joint of the first two: by the tree where it went on, else by a further verify."""
    rows, vocab = 60_000, 4
    probs_VV = torch.softmax(table(vocab, vocab, seed=seed), dim=-1)
    generator = torch.Generator().manual_seed(seed)
    shape = random_tree(1, 7, seed, vocab=vocab)

    def step(anchor_B):
        tokens_BT = torch.cat((anchor_B.unsqueeze(1), shape.candidates_BT[:, 1:].expand(rows, -1)), dim=1)
        tree = Tree.from_parents(
            tokens_BT, shape.parents_BT.expand(rows, -1), depth=shape.depth, max_children=shape.max_children
        )
        verdict = verify_tree(
            LoneSync(), tree, probs_VV.log()[tokens_BT], Sampling.of(torch.ones(rows)), generator=generator
        )
        return tree_verdict(tree, verdict)

    first = step(torch.zeros(rows).long())
    second = step(first.tokens_BC[:, 0])
    two_B = first.commit_lens_B > 1
    assert 0 < int(two_B.sum()) < rows
    joint = torch.stack((first.tokens_BC[:, 0], torch.where(two_B, first.tokens_BC[:, 1], second.tokens_BC[:, 0])), 1)
    assert_distributed(joint[:, :1], probs_VV[0])
    assert_distributed(joint, probs_VV[0].unsqueeze(1) * probs_VV)


def test_children_that_cover_the_vocabulary_leave_the_target_to_draw_from():
    tree = Tree.from_parents(torch.tensor([[0, 0, 1]]), torch.tensor([[-1, 0, 0]]), depth=1, max_children=2)
    weights = verify._without_children(tree, torch.tensor([0]), torch.tensor([[0.4, 0.6]]))
    assert torch.equal(weights, torch.tensor([[0.4, 0.6]]))


def test_an_absent_child_takes_no_token_away():
    """Absent children read node 0; the anchor's token must stay in the draw."""
    tree = Tree.from_parents(torch.tensor([[2, 1]]), torch.tensor([[-1, 0]]), depth=1, max_children=3)
    weights = verify._without_children(tree, torch.tensor([0]), torch.full((1, 4), 0.25))
    assert weights.tolist() == [[0.25, 0.0, 0.25, 0.25]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_three_tensors_are_one_agreement_in_every_path(temperature):
    site = "eagle-verify-sample" if temperature else "eagle-verify-greedy"
    tree = random_tree(2, 5, seed=3)
    imposed = TreeVerdict(
        predict=torch.arange(10, dtype=torch.int32) % VOCAB,
        accept_index=torch.tensor([[0, 2, -1, -1, -1], [5, -1, -1, -1, -1]], dtype=torch.int32),
        num_correct_drafts=torch.tensor([1, 0], dtype=torch.int32),
    )

    def rank_zero(*tensors):
        for tensor, value in zip(tensors, imposed, strict=True):
            tensor.copy_(value)

    sync = LoneSync(overwrite={site: rank_zero})
    sampling = Sampling.of(torch.full((2,), temperature))
    verdict = verify_tree(sync, tree, table(2, 5, VOCAB, seed=1), sampling, torch.Generator())
    committed = tree_verdict(tree, verdict)
    assert sync.slugs == [site]
    assert committed.commit_lens_B.tolist() == [2, 1]
    assert committed.tokens_BC.tolist() == [[0, 2, -1, -1, -1], [5, -1, -1, -1, -1]]
    assert committed.path_BC.tolist() == [[0, 2, -1, -1, -1], [0, -1, -1, -1, -1]]


def test_a_length_that_has_diverged_stays_within_the_tree():
    tree = random_tree(1, 3, seed=1)
    honest = greedy_verdict(tree, table(1, 3, VOCAB, seed=2))
    skewed = honest._replace(num_correct_drafts=honest.num_correct_drafts + 100)
    committed = tree_verdict(tree, skewed)
    assert committed.commit_lens_B.tolist() == [3]
    assert int(committed.tokens_BC.min()) >= 0
    assert 0 <= int(committed.path_BC.min()) <= int(committed.path_BC.max()) < 3
    astray = tree_verdict(tree, honest._replace(accept_index=honest.accept_index + 100))
    assert int(astray.path_BC.max()) < 3


def test_simulated_acceptance_follows_first_children_and_is_agreed():
    rows = 4000
    parents_BT = torch.tensor([[-1, 0, 0, 1, 3]]).expand(rows, -1)
    tree = Tree.from_parents(torch.tensor([[9, 1, 2, 3, 4]]).expand(rows, -1), parents_BT, depth=3, max_children=2)
    logits_BTV = table(1, 5, VOCAB, seed=1).expand(rows, -1, -1)
    sync = LoneSync()
    verdict = simulate(sync, tree, logits_BTV, mean_len=1.5, generator=torch.Generator().manual_seed(0))
    assert sync.slugs == ["eagle-accept-simulated"]
    assert set(verdict.num_correct_drafts.tolist()) == {1, 2}
    assert float(verdict.num_correct_drafts.float().mean()) == pytest.approx(1.5, abs=0.05)
    committed, argmax = tree_verdict(tree, verdict), logits_BTV[0].argmax(dim=-1).tolist()
    for length, tokens, path in {
        (int(n), tuple(t), tuple(p))
        for n, t, p in zip(
            committed.commit_lens_B, committed.tokens_BC.tolist(), committed.path_BC.tolist(), strict=True
        )
    }:
        assert tokens == {2: (1, argmax[1], -1, -1), 3: (1, 3, argmax[3], -1)}[length]
        assert path == {2: (0, 1, -1, -1), 3: (0, 1, 3, -1)}[length]


def test_simulated_acceptance_stops_where_the_tree_does():
    tree = random_tree(3, 2, seed=1)
    verdict = simulate(LoneSync(), tree, table(3, 2, VOCAB, seed=1), mean_len=9.0)
    assert verdict.num_correct_drafts.tolist() == [1, 1, 1]
