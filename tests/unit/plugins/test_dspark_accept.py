import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specsync_dspark.accept import accept, accept_greedy, accept_sampled, finalise, simulate
from specsync_dspark.epilogue import AcceptEpilogue

from specsync_core.decisions import ChainAccept, Sampling
from tests.toy_models import table
from tests.unit.plugins.support import LoneSync

GAMMA, VOCAB = 3, 4


def case(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    candidates_BS = torch.randint(VOCAB, (batch, GAMMA + 1), generator=generator)
    target_BSV = torch.randn(batch, GAMMA + 1, VOCAB, generator=generator) * 2
    draft_BGV = torch.randn(batch, GAMMA, VOCAB, generator=generator) * 2
    verify_lens_B = torch.randint(1, GAMMA + 2, (batch,), generator=generator, dtype=torch.int32)
    return candidates_BS, target_BSV, draft_BGV, verify_lens_B


def run(sync, temperatures_B, seed, *, planned=True):
    candidates_BS, target_BSV, draft_BGV, verify_lens_B = case(temperatures_B.shape[0], seed)
    return accept(
        sync,
        candidates_BS,
        target_BSV,
        draft_BGV,
        Sampling.of(temperatures_B),
        verify_lens_B=verify_lens_B if planned else None,
        generator=torch.Generator().manual_seed(seed),
    )


def rows_equal(found, expected, rows_B):
    return all(torch.equal(mine[rows_B], theirs[rows_B]) for mine, theirs in zip(found, expected, strict=True))


@given(st.integers(0, 5), st.integers(0, 2**31), st.booleans())
def test_a_greedy_batch_follows_the_argmax_up_to_its_cap(batch, seed, planned):
    sync = LoneSync()
    found = run(sync, torch.zeros(batch), seed, planned=planned)
    candidates_BS, target_BSV, _, verify_lens_B = case(batch, seed)
    for row in range(batch):
        predict = target_BSV[row].argmax(dim=-1).tolist()
        length = 0
        while length < GAMMA and candidates_BS[row, length + 1] == predict[length]:
            length += 1
        capped = min(length, int(verify_lens_B[row]) - 1) if planned else length
        assert [int(part[row]) for part in found] == [capped, predict[capped], length - capped]
    assert sync.slugs == ["dspark-accept-greedy"]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.5]), min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_mixed_batch_gives_each_row_its_own_verdict(temperatures, seed):
    temperatures_B, sync = torch.tensor(temperatures), LoneSync()
    found = run(sync, temperatures_B, seed)
    candidates_BS, target_BSV, draft_BGV, verify_lens_B = case(len(temperatures), seed)
    greedy = accept_greedy(candidates_BS, target_BSV, verify_lens_B)
    sampled = accept_sampled(
        candidates_BS,
        target_BSV,
        draft_BGV,
        Sampling.of(temperatures_B),
        verify_lens_B,
        torch.Generator().manual_seed(seed),
    )
    assert rows_equal(found, greedy, temperatures_B <= 0)
    assert rows_equal(found, sampled, temperatures_B > 0)
    assert sync.slugs == ["dspark-accept-sample" if any(temperatures) else "dspark-accept-greedy"]


def test_the_triple_is_one_agreement_and_everything_follows_from_it():
    def rank_zero(correct_len, bonus, cap_trim_lens):
        correct_len.copy_(torch.tensor([3, 0]))
        bonus.copy_(torch.tensor([1, 2]))
        cap_trim_lens.copy_(torch.tensor([0, 1]))

    for temperature, site in ((0.0, "dspark-accept-greedy"), (1.0, "dspark-accept-sample")):
        sync = LoneSync(overwrite={site: rank_zero})
        verdict = run(sync, torch.full((2,), temperature), seed=5)
        final = finalise(case(2, 5)[0], verdict, torch.tensor([10, 20]))
        assert [part.tolist() for part in verdict] == [[3, 0], [1, 2], [0, 1]]
        assert final.commit_lens_B.tolist() == [4, 1]
        assert final.new_seq_lens_B.tolist() == [14, 21]
        assert final.out_tokens_BS.tolist() == [[*case(2, 5)[0][0, 1:].tolist(), 1], [2, -1, -1, -1]]
        assert sync.slugs == [site]


@given(st.integers(0, 5), st.integers(0, 2**31), st.booleans())
def test_the_epilogue_decides_as_the_eager_greedy_accept(batch, seed, planned):
    candidates_BS, target_BSV, draft_BGV, verify_lens_B = case(batch, seed)
    lens_B, prefix_lens_B = verify_lens_B if planned else None, torch.arange(batch) * 7
    sync = LoneSync()
    epilogue = AcceptEpilogue(sync, max_batch=5, stride=GAMMA + 1, vocab_size=VOCAB, device=torch.device("cpu"))
    # What an earlier, larger batch left behind must not be seen.
    epilogue.accept(*case(5, seed + 1)[:2], torch.full((5,), 99), torch.ones(5, dtype=torch.int32))
    verdict, final = epilogue.accept(candidates_BS, target_BSV, prefix_lens_B, lens_B)
    eager = accept(
        LoneSync(), candidates_BS, target_BSV, draft_BGV, Sampling.of(torch.zeros(batch)), verify_lens_B=lens_B
    )
    for found, expected in zip(
        (*verdict, *final), (*eager, *finalise(candidates_BS, eager, prefix_lens_B)), strict=True
    ):
        assert torch.equal(found, expected)
    assert sync.slugs == ["dspark-accept-graph"] * 2


def test_the_epilogue_derives_from_the_agreed_triple():
    sync = LoneSync(overwrite={"dspark-accept-graph": lambda correct_len, *_: correct_len.fill_(1)})
    epilogue = AcceptEpilogue(sync, max_batch=2, stride=4, vocab_size=VOCAB, device=torch.device("cpu"))
    candidates_BS, target_BSV, _, _ = case(2, 3)
    verdict, final = epilogue.accept(candidates_BS, target_BSV, torch.tensor([5, 6]))
    assert verdict.correct_len.tolist() == [1, 1]
    assert final.new_seq_lens_B.tolist() == [7, 8]
    assert (final.out_tokens_BS[:, 2:] == -1).all()


def test_logits_behind_the_verify_length_may_hold_anything():
    candidates_BS, target_BSV, draft_BGV, _ = case(4, 11)
    lens_B = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    behind_BS = torch.arange(GAMMA + 1) >= lens_B.unsqueeze(1)
    spoilt_BSV = target_BSV.masked_fill(behind_BS.unsqueeze(2), torch.nan)
    for temperatures_B in (torch.zeros(4), torch.ones(4), torch.tensor([0.0, 1.0, 0.0, 1.0])):
        verdicts = [
            accept(
                LoneSync(),
                candidates_BS,
                logits_BSV,
                draft_BGV,
                Sampling.of(temperatures_B),
                verify_lens_B=lens_B,
                generator=torch.Generator().manual_seed(1),
            )
            for logits_BSV in (target_BSV, spoilt_BSV)
        ]
        for clean, spoilt in zip(verdicts[0][:2], verdicts[1][:2], strict=True):  # the trim is a statistic of them
            assert torch.equal(clean, spoilt)


@pytest.mark.parametrize("planned", [False, True])
def test_simulated_acceptance_is_agreed_last(planned):
    rows = 4000
    target_BSV = table(1, GAMMA + 1, VOCAB, seed=1).expand(rows, -1, -1)
    zeros_B = torch.zeros(rows, dtype=torch.int64)
    honest = ChainAccept(zeros_B, zeros_B, torch.full((rows,), 2))
    sync = LoneSync()
    verdict = simulate(
        sync,
        honest,
        target_BSV,
        mean_len=1.5,
        verify_lens_B=torch.full((rows,), 2, dtype=torch.int32) if planned else None,
        generator=torch.Generator().manual_seed(2),
    )
    assert set(verdict.correct_len.tolist()) == ({1} if planned else {1, 2})
    assert torch.equal(verdict.bonus, target_BSV[0].argmax(dim=-1)[verdict.correct_len])
    if not planned:
        assert float(verdict.correct_len.float().mean()) == pytest.approx(1.5, abs=0.05)
    assert sync.slugs == ["dspark-accept-simulated"]
