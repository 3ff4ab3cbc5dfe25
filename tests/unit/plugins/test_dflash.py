import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specsync_dflash.accept import accept, simulate
from specsync_dflash.draft import CapturedDraft, draft_greedy, draft_selected

from specsync_core import decisions
from specsync_core.decisions import Sampling
from tests.toy_models import table
from tests.unit.plugins.support import LoneSync, assert_distributed

GAMMA, VOCAB = 3, 5


def test_the_greedy_block_is_agreed_as_a_whole():
    logits_BGV = table(4, GAMMA, VOCAB, seed=1)
    sync = LoneSync()
    tokens_BG = draft_greedy(sync, logits_BGV)
    assert tokens_BG.tolist() == [[row.index(max(row)) for row in block] for block in logits_BGV.tolist()]
    assert sync.slugs == ["dflash-draft-greedy"]
    captured = CapturedDraft(sync, max_batch=4, gamma=GAMMA, vocab_size=VOCAB, device=torch.device("cpu"))
    assert torch.equal(captured.draft(logits_BGV), tokens_BG)
    assert torch.equal(captured.draft(logits_BGV[1:3]), tokens_BG[1:3])
    assert sync.slugs == ["dflash-draft-greedy"] * 3


def selector_probabilities(logits_GV, temperature, num_candidates):
    rows = []
    for row in logits_GV.tolist():
        kept = sorted(range(len(row)), key=lambda token: -row[token])[:num_candidates]
        weights = [torch.tensor(row[token] / temperature).exp() if token in kept else 0.0 for token in range(len(row))]
        rows.append([float(weight / sum(weights)) for weight in weights])
    return torch.tensor(rows)


def test_the_selector_draws_from_its_candidate_sets_and_greedy_rows_take_the_best():
    rows, greedy_rows = 30_000, 10
    logits_BGV = table(1, GAMMA, VOCAB, seed=1).expand(rows + greedy_rows, -1, -1)
    sync = LoneSync()
    block = draft_selected(
        sync,
        logits_BGV,
        Sampling.of(torch.cat((torch.full((rows,), 0.7), torch.zeros(greedy_rows)))),
        num_candidates=3,
        generator=torch.Generator().manual_seed(1),
    )
    probs_GV = selector_probabilities(logits_BGV[0], 0.7, 3)
    assert torch.allclose(block.probs_BGV[0], probs_GV, atol=1e-6)
    assert (probs_GV > 0).sum(dim=1).tolist() == [3] * GAMMA
    assert_distributed(block.tokens_BG[:rows], torch.einsum("a,b,c->abc", *probs_GV))
    assert torch.equal(block.tokens_BG[rows:], logits_BGV[rows:].argmax(dim=-1))
    assert sync.slugs == ["dflash-draft-selector"]


def test_more_candidates_than_tokens_are_all_of_them():
    block = draft_selected(
        LoneSync(), table(2, GAMMA, VOCAB, seed=1), Sampling.of(torch.ones(2)), num_candidates=99, generator=None
    )
    assert torch.allclose(block.probs_BGV, torch.softmax(table(2, GAMMA, VOCAB, seed=1), dim=-1))


def case(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    candidates_BS = torch.randint(VOCAB, (batch, GAMMA + 1), generator=generator)
    target_BSV = torch.randn(batch, GAMMA + 1, VOCAB, generator=generator) * 2
    selector_BGV = torch.softmax(torch.randn(batch, GAMMA, VOCAB, generator=generator), dim=-1)
    return candidates_BS, target_BSV, selector_BGV


@given(st.lists(st.sampled_from([0.0, 0.5, 1.5]), max_size=6), st.integers(0, 2**31), st.booleans())
def test_the_three_paths(temperatures, seed, selected):
    batch, sync, sampling = len(temperatures), LoneSync(), Sampling.of(torch.tensor(temperatures))
    candidates_BS, target_BSV, selector_BGV = case(batch, seed)
    found = accept(
        sync,
        candidates_BS,
        target_BSV,
        sampling,
        selector_probs_BGV=selector_BGV if selected else None,
        generator=torch.Generator().manual_seed(seed),
    )
    replay = torch.Generator().manual_seed(seed)
    greedy = decisions.greedy_chain(candidates_BS, target_BSV.argmax(dim=-1))
    sampled = decisions.rejection_chain(
        candidates_BS,
        decisions.probabilities(target_BSV, sampling.temperatures_B),
        decisions.uniform_coins(candidates_BS[:, 1:], replay),
        decisions.exponential_noise(target_BSV[:, 0], replay),
        draft_probs_BGV=selector_BGV if selected else None,
    )
    for row, temperature in enumerate(temperatures):
        expected = greedy if temperature <= 0 else sampled
        assert [int(part[row]) for part in found] == [int(expected.correct_len[row]), int(expected.bonus[row])]
    sampled_site = "dflash-selector" if selected else "dflash-accept-sample"
    assert sync.slugs == [sampled_site if selected or any(temperatures) else "dflash-accept-greedy"]


def test_greedy_derives_both_values_from_the_agreed_predictions():
    predict_S = torch.tensor([1, 2, 3, 4])
    sync = LoneSync(overwrite={"dflash-accept-greedy": lambda predict: predict.copy_(predict_S.expand_as(predict))})
    candidates_BS = torch.tensor([[0, 1, 2, 0], [0, 4, 4, 4]])
    verdict = accept(sync, candidates_BS, table(2, GAMMA + 1, VOCAB, seed=1), Sampling.of(torch.zeros(2)))
    assert (verdict.accept_len.tolist(), verdict.bonus.tolist()) == ([2, 0], [3, 1])


@pytest.mark.parametrize("num_candidates", [1, 2, VOCAB])
def test_a_selectors_drafts_leave_the_targets_distribution_as_it_is(num_candidates):
    """By the selector's own rejection, and by target-only rejection of the very same drafts."""
    rows = 60_000
    target_VV, block_GV = table(VOCAB, VOCAB, seed=1), table(GAMMA, VOCAB, seed=2)
    probs_VV, sampling = torch.softmax(target_VV / 0.8, dim=-1), Sampling.of(torch.full((rows,), 0.8))
    lengths = {}
    for selected in (True, False):
        generator = torch.Generator().manual_seed(9)

        def step(anchor_B, selected=selected, generator=generator):
            block = draft_selected(
                LoneSync(), block_GV.expand(rows, -1, -1), sampling, num_candidates=num_candidates, generator=generator
            )
            candidates_BS = torch.cat((anchor_B.unsqueeze(1), block.tokens_BG), dim=1)
            probs_BGV = block.probs_BGV if selected else None
            verdict = accept(
                LoneSync(),
                candidates_BS,
                target_VV[candidates_BS],
                sampling,
                selector_probs_BGV=probs_BGV,
                generator=generator,
            )
            return decisions.chain_verdict(candidates_BS, verdict.accept_len, verdict.bonus)

        first = step(torch.zeros(rows).long())
        second = step(first.tokens_BC[:, 0])
        two_B = first.commit_lens_B > 1
        joint = torch.stack(
            (first.tokens_BC[:, 0], torch.where(two_B, first.tokens_BC[:, 1], second.tokens_BC[:, 0])), 1
        )
        assert_distributed(joint[:, :1], probs_VV[0])
        assert_distributed(joint, probs_VV[0].unsqueeze(1) * probs_VV)
        lengths[selected] = float(first.commit_lens_B.float().mean())
    assert num_candidates == 1 or lengths[True] > lengths[False] + 0.05  # what the selector's probabilities are for


def test_simulated_acceptance_is_agreed():
    rows = 4000
    target_BSV = table(1, GAMMA + 1, VOCAB, seed=1).expand(rows, -1, -1)
    sync = LoneSync()
    verdict = simulate(sync, target_BSV, mean_len=1.5, generator=torch.Generator().manual_seed(2))
    assert set(verdict.accept_len.tolist()) == {1, 2}
    assert torch.equal(verdict.bonus, target_BSV[0].argmax(dim=-1)[verdict.accept_len])
    assert sync.slugs == ["dflash-accept-simulated"]
