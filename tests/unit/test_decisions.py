"""The shared mathematics against slow, obvious Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsync_core import decisions
from specsync_core.decisions import MIN_NOISE, Sampling
from tests.toy_models import ToyTarget, table
from tests.unit.plugins.support import assert_distributed

SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(2, 5), st.integers(0, 2**31))


def chain_oracle(accepted: list[bool], cap: int) -> tuple[int, int]:
    run = 0
    while run < len(accepted) and accepted[run]:
        run += 1
    return min(run, cap), run - min(run, cap)


def race_oracle(weights: list[float], noise: list[float]) -> int:
    finishes = [weight / hurdle for weight, hurdle in zip(weights, noise, strict=True)]
    return finishes.index(max(finishes))


def test_sampling_classifies_rows():
    sampling = Sampling.of(torch.tensor([0.0, -1.0, 1e-9, 0.7, 0.7]), top_ks_B=torch.tensor([50, 50, 50, 1, 2]))
    assert sampling.greedy_B.tolist() == [True, True, False, True, False]
    assert sampling.temperatures_B.tolist() == pytest.approx([1.0, 1.0, 1e-5, 1.0, 0.7])
    assert (sampling.all_greedy, sampling.any_greedy) == (False, True)
    assert Sampling.of(torch.zeros(2)).all_greedy
    assert not Sampling.of(torch.ones(2)).any_greedy
    assert Sampling.of(torch.zeros(0)).all_greedy


def test_a_race_of_noise_one_is_the_argmax_even_between_neighbouring_floats():
    logits = torch.tensor([[10.0, 10.0], [3.0, 3.0]])
    logits[:, 1] = torch.nextafter(logits[:, 0], torch.tensor(torch.inf))
    sampling = Sampling.of(torch.tensor([0.0, 0.7]), top_ks_B=torch.tensor([9, 1]))
    assert decisions.exponential_race(logits, sampling.temperatures_B, torch.ones(2, 2)).tolist() == [1, 1]


@given(SHAPES)
def test_the_race_is_what_its_formula_says(shape):
    batch, _, vocab, seed = shape
    logits, noise = table(batch, vocab, seed=seed, scale=3.0), table(batch, vocab, seed=seed + 1).exp()
    temperatures = torch.linspace(0.3, 2.0, batch)
    probs = torch.softmax(logits / temperatures.unsqueeze(1), dim=-1)
    assert decisions.exponential_race(logits, temperatures, noise).tolist() == [
        race_oracle(*pair) for pair in zip(probs.tolist(), noise.tolist(), strict=True)
    ]


def test_races_and_weighted_draws_follow_their_distribution():
    generator, rows = torch.Generator().manual_seed(3), 40_000
    logits = table(6, seed=4, scale=1.5)
    probs = torch.softmax(logits / 0.7, dim=-1)
    noise = decisions.exponential_noise(torch.empty(rows, 6), generator)
    raced = decisions.exponential_race(logits.expand(rows, 6), torch.full((rows,), 0.7), noise)
    assert_distributed(raced.unsqueeze(1), probs)
    weights = torch.cat((probs * 3, torch.zeros(1)))
    noise = decisions.exponential_noise(torch.empty(rows, 7), generator)
    drawn = decisions.weighted_draw(weights.expand(rows, 7), noise)
    assert int(drawn.max()) < 6, "a weight of 0 was drawn"
    assert_distributed(drawn.unsqueeze(1), probs)


def test_noise_is_never_zero_and_masked_logits_never_win(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "exponential_", lambda noise, generator: noise.zero_())
        assert float(decisions.exponential_noise(torch.empty(3), None).min()) > 0
    logits = torch.tensor([[0.0, -torch.inf]])
    noise = torch.tensor([[50.0, MIN_NOISE]])
    assert decisions.exponential_race(logits, torch.ones(1), noise).tolist() == [0]


def test_sample_tokens_takes_the_argmax_of_greedy_rows_only():
    rows = 20_000
    logits = table(5, seed=8).expand(2 * rows, 5)
    temperatures = torch.cat((torch.zeros(rows), torch.full((rows,), 0.6)))
    tokens = decisions.sample_tokens(logits, Sampling.of(temperatures), torch.Generator().manual_seed(1))
    assert (tokens[:rows] == int(logits[0].argmax())).all()
    assert_distributed(tokens[rows:].unsqueeze(1), torch.softmax(logits[0] / 0.6, dim=-1))


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=4))
def test_leading_run_and_first_true(rows):
    mask = torch.tensor(rows, dtype=torch.bool).view(-1, 3)
    assert decisions.leading_run(mask).tolist() == [chain_oracle(row, 3)[0] for row in rows]
    assert decisions.first_true(mask).tolist() == [row.index(True) if True in row else -1 for row in rows]


@given(SHAPES, st.booleans())
def test_greedy_chain(shape, capped):
    batch, gamma, vocab, seed = shape
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randint(vocab, (batch, gamma + 1), generator=generator)
    predict = torch.randint(vocab, (batch, gamma + 1), generator=generator)
    caps = torch.randint(-1, gamma + 2, (batch,), generator=generator) if capped else None
    found = decisions.greedy_chain(candidates, predict, caps)
    for row in range(batch):
        cap = gamma if caps is None else min(max(int(caps[row]), 0), gamma)
        matches = [bool(candidates[row, i + 1] == predict[row, i]) for i in range(gamma)]
        correct, trim = chain_oracle(matches, cap)
        assert [int(part[row]) for part in found] == [correct, int(predict[row, correct]), trim]


@settings(max_examples=200)
@given(SHAPES, st.booleans(), st.booleans())
def test_rejection_chain(shape, capped, point_mass):
    batch, gamma, vocab, seed = shape
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randint(vocab, (batch, gamma + 1), generator=generator)
    target = torch.softmax(torch.randn(batch, gamma + 1, vocab, generator=generator), dim=-1)
    draft = torch.softmax(torch.randn(batch, gamma, vocab, generator=generator), dim=-1)
    coins = torch.rand(batch, gamma, generator=generator)
    noise = decisions.exponential_noise(target[:, 0], generator)
    caps = torch.randint(0, gamma + 1, (batch,), generator=generator) if capped else None
    found = decisions.rejection_chain(
        candidates, target, coins, noise, draft_probs_BGV=None if point_mass else draft, caps_B=caps
    )
    for row in range(batch):
        cap = gamma if caps is None else int(caps[row])
        drafts = candidates[row, 1:].tolist()
        p = [float(target[row, i, d]) for i, d in enumerate(drafts)]
        q = [1.0 if point_mass else float(draft[row, i, d]) for i, d in enumerate(drafts)]
        accepted = [float(coins[row, i]) < min(1.0, p[i] / q[i]) for i in range(gamma)]
        correct, trim = chain_oracle(accepted, cap)
        weights = target[row, correct].tolist()
        if correct < cap:
            without = [1.0 if token == drafts[correct] else 0.0 for token in range(vocab)]
            weights = [
                max(weight - (without[token] if point_mass else float(draft[row, correct, token])), 0.0)
                for token, weight in enumerate(weights)
            ]
        assert [int(part[row]) for part in found] == [correct, race_oracle(weights, noise[row].tolist()), trim]


def test_an_equal_draft_is_always_accepted_and_an_impossible_one_never():
    target = torch.tensor([[[0.5, 0.5, 0.0]] * 3])
    coins, noise = torch.full((1, 2), 1 - 2**-24), torch.ones(1, 3)
    equal = decisions.rejection_chain(torch.tensor([[0, 0, 1]]), target, coins, noise, draft_probs_BGV=target[:, :2])
    assert equal.correct_len.tolist() == [2]
    impossible = decisions.rejection_chain(
        torch.tensor([[0, 2, 1]]), target, torch.zeros(1, 2), noise, draft_probs_BGV=torch.full((1, 2, 3), 1 / 3)
    )
    assert impossible.correct_len.tolist() == [0]


def test_a_rejection_that_leaves_no_residual_draws_from_the_target():
    target = torch.tensor([[[0.25, 0.75]] * 2])
    certain = torch.tensor([[[0.25, 0.7500001]]])
    verdict = decisions.rejection_chain(
        torch.tensor([[0, 1]]), target, torch.ones(1, 1), torch.ones(1, 2), draft_probs_BGV=certain
    )
    assert (verdict.correct_len.tolist(), verdict.bonus.tolist()) == ([0], [1])


def test_what_is_behind_a_cap_does_not_matter():
    target = torch.full((1, 4, 3), torch.nan)
    target[0, :2] = torch.tensor([0.2, 0.3, 0.5])
    arguments = (torch.tensor([[0, 2, 1, 1]]), target, torch.zeros(1, 3), torch.tensor([[9.0, 0.1, 9.0]]))
    verdict = decisions.rejection_chain(*arguments, caps_B=torch.tensor([1]))
    assert (verdict.correct_len.tolist(), verdict.bonus.tolist()) == ([1], [1])


@pytest.mark.parametrize("cap", [0, 1, 2, 3, None])
@pytest.mark.parametrize("kind", ["drawn", "fixed"])
def test_committed_tokens_follow_the_target_under_every_cap(cap, kind):
    """First token, and the joint of the first two where a second was committed for sure by a further step."""
    rows, vocab, gamma = 60_000, 4, 3
    target = ToyTarget.seeded(vocab)
    probs = target.probabilities(1.0)
    draft_probs = torch.softmax(table(gamma, vocab, seed=5), dim=-1)
    generator = torch.Generator().manual_seed(17)

    def step(anchor):
        if kind == "drawn":
            drafts = torch.multinomial(draft_probs, rows, replacement=True, generator=generator).t()
        else:
            drafts = torch.tensor([1, 0, 3]).expand(rows, gamma)
        candidates = torch.cat((anchor.unsqueeze(1), drafts), dim=1)
        verdict = decisions.rejection_chain(
            candidates,
            probs[candidates],
            decisions.uniform_coins(drafts, generator),
            decisions.exponential_noise(torch.empty(rows, vocab), generator),
            draft_probs_BGV=draft_probs.expand(rows, gamma, vocab) if kind == "drawn" else None,
            caps_B=None if cap is None else torch.full((rows,), cap),
        )
        return decisions.chain_verdict(candidates, verdict.correct_len, verdict.bonus)

    first = step(torch.zeros(rows, dtype=torch.int64))
    second = step(first.tokens_BC[:, 0])
    joint = torch.stack(
        (first.tokens_BC[:, 0], torch.where(first.commit_lens_B > 1, first.tokens_BC[:, 1], second.tokens_BC[:, 0])), 1
    )
    assert_distributed(joint[:, :1], probs[0])
    assert_distributed(joint, probs[0].unsqueeze(1) * probs)
    if cap is not None:
        assert int(first.commit_lens_B.max()) <= cap + 1


def test_simulated_lengths_have_their_mean_and_their_limit():
    lens = decisions.simulated_lens(1.3, torch.full((50_000,), 3), torch.Generator().manual_seed(0))
    assert set(lens.tolist()) == {1, 2}
    assert float(lens.float().mean()) == pytest.approx(1.3, abs=0.02)
    assert decisions.simulated_lens(9.0, torch.tensor([0, 2, -1]), None).tolist() == [0, 2, 0]


@given(SHAPES)
def test_chain_verdict(shape):
    batch, gamma, vocab, seed = shape
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randint(vocab, (batch, gamma + 1), generator=generator)
    correct = torch.randint(0, gamma + 1, (batch,), generator=generator)
    bonus = torch.randint(vocab, (batch,), generator=generator)
    verdict = decisions.chain_verdict(candidates, correct, bonus)
    assert verdict.commit_lens_B.tolist() == [length + 1 for length in correct.tolist()]
    for row in range(batch):
        length = int(correct[row])
        padding = [-1] * (gamma - length)
        assert verdict.tokens_BC[row].tolist() == [*candidates[row, 1 : length + 1].tolist(), int(bonus[row]), *padding]
        assert verdict.path_BC[row].tolist() == [*range(length + 1), *padding]


def test_a_length_that_has_diverged_is_cut_to_the_block():
    verdict = decisions.chain_verdict(torch.tensor([[5, 6, 7]] * 2), torch.tensor([9, -4]), torch.tensor([1, 1]))
    assert verdict.commit_lens_B.tolist() == [3, 1]
    assert verdict.tokens_BC.tolist() == [[6, 7, 1], [1, -1, -1]]


def test_chain_parents():
    assert decisions.chain_parents(torch.zeros(2, 4)).tolist() == [[-1, 0, 1, 2]] * 2
