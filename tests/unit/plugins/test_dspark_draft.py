import pytest
import torch
from specsync_dspark.draws import draft_block, multinomial_draw
from specsync_dspark.folded import FoldedSampler

from specsync_core import folded_sampling_bytes
from specsync_core.decisions import Sampling, sample_tokens
from tests.toy_models import table
from tests.unit.plugins.support import LoneSync, assert_distributed

GAMMA, VOCAB = 3, 5
MARKOV_VV = table(VOCAB, VOCAB, seed=2, scale=2.0)
SITES = {"greedy": "dspark-draft-greedy", "fast": "dspark-draft-sample", "multinomial": "dspark-draft-multinomial"}


def markov(prev_B):
    return MARKOV_VV[prev_B]


def base_logits(batch):
    return table(1, GAMMA, VOCAB, seed=3).expand(batch, GAMMA, VOCAB)


def draft(sync, temperatures_B, *, way="fast", seed=0):
    anchor_B = torch.zeros(temperatures_B.shape[0], dtype=torch.int64)
    generator, sampling = torch.Generator().manual_seed(seed), Sampling.of(temperatures_B)
    logits_BGV = base_logits(anchor_B.shape[0])
    if way != "folded":
        fast = way != "multinomial"
        return draft_block(sync, logits_BGV, anchor_B, markov, sampling, generator, fast_sampling=fast)
    return folded_sampler(sync, anchor_B.shape[0], generator).draft(logits_BGV, anchor_B, sampling)


def folded_sampler(sync, max_batch, generator):
    return FoldedSampler(
        sync,
        markov,
        max_batch=max_batch,
        gamma=GAMMA,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        generator=generator,
    )


def greedy_oracle(logits_GV, anchor):
    tokens = []
    for step in range(GAMMA):
        anchor = int((logits_GV[step] + MARKOV_VV[anchor]).argmax())
        tokens.append(anchor)
    return tokens


def chain_probabilities(temperature):
    """The joint distribution of the block's first two drafts."""
    base = base_logits(1)[0]
    first = torch.softmax((base[0] + MARKOV_VV[0]) / temperature, dim=-1)
    second = torch.softmax((base[1] + MARKOV_VV) / temperature, dim=-1)
    return first.unsqueeze(1) * second


@pytest.mark.parametrize("way", ["greedy", "fast", "multinomial"])
def test_one_agreement_per_drafted_token_at_the_site_of_the_draw(way):
    sync = LoneSync()
    temperatures_B = torch.tensor([0.0, 0.0 if way == "greedy" else 1.0])
    block = draft(sync, temperatures_B, way=way)
    assert sync.slugs == [SITES[way]] * GAMMA
    assert torch.equal(block.tokens_BG, torch.stack([tensors[0] for _, tensors in sync.calls], dim=1))


@pytest.mark.parametrize("way", ["greedy", "fast", "multinomial", "folded"])
def test_an_agreed_token_shapes_the_next_steps_logits(way):
    """The other rank's token, not one's own, is what the Markov head sees."""
    temperatures_B = torch.tensor([0.0 if way == "greedy" else 1.0])
    site = SITES.get(way, "dspark-graph-sample")
    sync = LoneSync(overwrite={site: lambda tokens: tokens.fill_(4)})
    block = draft(sync, temperatures_B, way=way)
    assert block.tokens_BG.tolist() == [[4, 4, 4]]
    expected_GV = base_logits(1)[0] + torch.stack((MARKOV_VV[0], MARKOV_VV[4], MARKOV_VV[4]))
    assert torch.allclose(block.logits_BGV[0], expected_GV)


@pytest.mark.parametrize("way", ["fast", "multinomial", "folded"])
def test_sampled_rows_follow_the_drafts_distribution_and_greedy_rows_the_argmax(way):
    rows = 30_000
    temperatures_B = torch.cat((torch.full((rows,), 0.8), torch.zeros(10)))
    block = draft(LoneSync(), temperatures_B, way=way, seed=5)
    assert_distributed(block.tokens_BG[:rows, :2], chain_probabilities(0.8))
    assert block.tokens_BG[rows:].tolist() == [greedy_oracle(base_logits(1)[0], 0)] * 10


@pytest.mark.parametrize("draw", [sample_tokens, multinomial_draw])
def test_a_temperature_near_zero_is_clamped_not_divided_by(draw):
    sampling = Sampling.of(torch.tensor([1e-30]))
    assert draw(torch.tensor([[1.0, 3.0, 2.0]]), sampling, torch.Generator().manual_seed(0)).tolist() == [1]


@pytest.mark.parametrize("draw", [sample_tokens, multinomial_draw])
def test_a_top_k_of_one_is_greedy_at_any_temperature(draw):
    logits_BV = torch.tensor([[1.0, 1.1, 1.05]]).expand(500, 3)
    sampling = Sampling.of(torch.full((500,), 5.0), top_ks_B=torch.ones(500, dtype=torch.int64))
    assert (draw(logits_BV, sampling, torch.Generator().manual_seed(0)) == 1).all()


def test_folded_variants_have_sites_of_their_own():
    sync = LoneSync()
    folded_sampler(sync, 2, torch.Generator()).draft(base_logits(2), torch.zeros(2).long(), Sampling.of(torch.ones(2)))
    assert sync.slugs == ["dspark-graph-sample"] * GAMMA
    sync = LoneSync()
    folded_sampler(sync, 2, None).draft(base_logits(2), torch.zeros(2).long(), Sampling.of(torch.zeros(2)))
    assert sync.slugs == ["dspark-graph-greedy"] * GAMMA


def test_folded_buffers_take_the_memory_that_the_gate_counts():
    sampler = FoldedSampler(
        LoneSync(),
        markov,
        max_batch=6,
        gamma=GAMMA,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        generator=torch.Generator(),
    )
    assert sampler.noise_BV.nbytes + sampler.logits_BGV.nbytes == folded_sampling_bytes(6, GAMMA, VOCAB, 2)


def test_every_replay_redraws_its_noise_and_reads_its_buffers_anew():
    sampler = folded_sampler(LoneSync(), 200, torch.Generator().manual_seed(1))
    sampling, anchor_B = Sampling.of(torch.full((200,), 1.5)), torch.zeros(200).long()
    first = sampler.draft(base_logits(200), anchor_B, sampling).tokens_BG.clone()
    again = sampler.draft(base_logits(200), anchor_B, sampling).tokens_BG.clone()
    assert not torch.equal(first, again)
    cold = sampler.draft(base_logits(200), anchor_B, Sampling.of(torch.zeros(200))).tokens_BG
    assert cold.tolist() == [greedy_oracle(base_logits(1)[0], 0)] * 200
    smaller = sampler.draft(base_logits(3), torch.full((3,), 2), Sampling.of(torch.zeros(3))).tokens_BG
    assert smaller.tolist() == [greedy_oracle(base_logits(1)[0], 2)] * 3
