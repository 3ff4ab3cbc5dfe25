"""The mathematics that several speculative algorithms share: draws, runs, rejection, acceptance by fiat.

Pure, batched torch: nothing here broadcasts. An algorithm calls these to reach a decision on its own
rank and hands the result to ``sync`` before it derives anything from it.

Shape letters: B requests, G drafted tokens per block, S = G + 1 verify stride (the anchor first),
V vocabulary. Token ids and lengths are int64. Every function can be captured in a CUDA graph, except
`Sampling.of`, which reads one value on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from specsync_core.algorithm import Verdict

MIN_TEMPERATURE = 1e-5
MIN_NOISE = 1e-20
"""The CPU's exponential noise may be exactly 0, and 0 / 0 would win every race as NaN."""


@dataclass(frozen=True)
class Sampling:
    """How each row of a batch is sampled, and whether the batch is of one kind.

    The two booleans choose the site, so they must agree between ranks by themselves: they are a pure
    function of what the requests asked for, which is replicated.
    """

    temperatures_B: Tensor
    """float32, at least 1e-5; exactly 1 for a greedy row, so that dividing by it moves no argmax."""
    greedy_B: Tensor
    """bool: rows that take the argmax."""
    all_greedy: bool
    any_greedy: bool

    @classmethod
    def of(cls, temperatures_B: Tensor, top_ks_B: Tensor | None = None) -> Sampling:
        """Classify a batch's rows.

        Args:
            temperatures_B: float ``[B]``; 0 or less means greedy.
            top_ks_B: int ``[B]``; 1 or less means greedy. None: no row is limited.

        Graph: reads the number of greedy rows on the host; call it once per step, outside capture.
        """
        greedy_B = temperatures_B <= 0
        if top_ks_B is not None:
            greedy_B = greedy_B | (top_ks_B <= 1)
        clamped_B = temperatures_B.float().clamp(min=MIN_TEMPERATURE)
        greedy_rows = int(greedy_B.sum())
        return cls(
            temperatures_B=clamped_B.masked_fill(greedy_B, 1.0),
            greedy_B=greedy_B,
            all_greedy=greedy_rows == greedy_B.numel(),
            any_greedy=greedy_rows > 0,
        )


def probabilities(logits: Tensor, temperatures_B: Tensor) -> Tensor:
    """Softmax of ``[B, ..., V]`` logits at each request's own temperature, in float32."""
    shape = (-1,) + (1,) * (logits.dim() - 1)
    return torch.softmax(logits.float() / temperatures_B.view(shape), dim=-1)


def exponential_noise(like: Tensor, generator: Generator | None) -> Tensor:
    """Noise ``E ~ Exp(1)`` for every element, float32, never 0."""
    noise = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return noise.exponential_(generator=generator).clamp_(min=MIN_NOISE)


def race_noise(like: Tensor, sampling: Sampling, generator: Generator | None) -> Tensor:
    """Fresh noise of a race, 1 in greedy rows: float32, of ``like``'s shape ``[B, V]``."""
    return exponential_noise(like, generator).masked_fill_(sampling.greedy_B.unsqueeze(1), 1.0)


def uniform_coins(like: Tensor, generator: Generator | None) -> Tensor:
    """Coins in [0, 1) for every element, float32."""
    return torch.rand(like.shape, dtype=torch.float32, device=like.device, generator=generator)


def race_scores(logits_BV: Tensor, temperatures_B: Tensor, noise_BV: Tensor) -> Tensor:
    """Scores whose argmax is a draw per row, that of ``softmax(logits / temperature) / noise``: float32 ``[B, V]``.

    With ``noise ~ Exp(1)`` that is a sample of the softmax; with noise 1 it is the argmax. Computed on
    logarithms, where neither the softmax underflows nor its rounding ties two logits.
    """
    return logits_BV.float() / temperatures_B.unsqueeze(1) - noise_BV.log()


def exponential_race(logits_BV: Tensor, temperatures_B: Tensor, noise_BV: Tensor) -> Tensor:
    """Draw a token per row, as `race_scores` says: int64 ``[B]``."""
    return race_scores(logits_BV, temperatures_B, noise_BV).argmax(dim=-1)


def weighted_draw(weights_BV: Tensor, noise_BV: Tensor) -> Tensor:
    """Draw an index per row in proportion to weights that need not sum to 1; a weight of 0 is never drawn."""
    return (weights_BV / noise_BV).argmax(dim=-1)


def sample_tokens(logits_BV: Tensor, sampling: Sampling, generator: Generator | None) -> Tensor:
    """A token per row, by argmax where the row is greedy, else by temperature: int64 ``[B]``."""
    if sampling.all_greedy:
        return logits_BV.argmax(dim=-1)
    return exponential_race(logits_BV, sampling.temperatures_B, race_noise(logits_BV, sampling, generator))


def leading_run(matches_BG: Tensor) -> Tensor:
    """How many leading elements of each row are true: int64 ``[B]``."""
    return matches_BG.long().cumprod(dim=1).sum(dim=1)


def first_true(mask_BX: Tensor) -> Tensor:
    """The index of each row's first true element, -1 where there is none: int64 ``[B]``."""
    return torch.where(mask_BX.any(dim=1), mask_BX.int().argmax(dim=1), -1)


def at_index(values: Tensor, index_B: Tensor) -> Tensor:
    """``values[b, index_B[b]]`` for every b."""
    return values[torch.arange(values.shape[0], device=values.device), index_B]


class ChainAccept(NamedTuple):
    """The accept of a chain of drafts, cap applied. All int64 ``[B]``."""

    correct_len: Tensor
    """Accepted drafts, at most the cap."""
    bonus: Tensor
    """The target's own token behind them."""
    cap_trim_lens: Tensor
    """Accepted drafts that the cap took away. Logits behind the cap need not exist, so it is a statistic."""

    def where(self, condition_B: Tensor, other: ChainAccept) -> ChainAccept:
        """This accept in the rows where the condition holds, the other one elsewhere."""
        return ChainAccept(*(torch.where(condition_B, mine, theirs) for mine, theirs in zip(self, other, strict=True)))


def greedy_chain(candidates_BS: Tensor, target_predict_BS: Tensor, caps_B: Tensor | None = None) -> ChainAccept:
    """Accept drafts for as long as they equal the target's own predictions.

    Args:
        candidates_BS: int64; the anchor, then the drafts.
        target_predict_BS: int64; the target's token behind each candidate.
        caps_B: int ``[B]``; at most so many drafts are accepted. None: all of them may be.
    """
    run_B = leading_run(candidates_BS[:, 1:] == target_predict_BS[:, :-1])
    correct_len_B = torch.minimum(run_B, _limits(candidates_BS, caps_B))
    return ChainAccept(correct_len_B, at_index(target_predict_BS, correct_len_B).long(), run_B - correct_len_B)


def rejection_chain(
    candidates_BS: Tensor,
    target_probs_BSV: Tensor,
    coins_BG: Tensor,
    noise_BV: Tensor,
    *,
    draft_probs_BGV: Tensor | None = None,
    caps_B: Tensor | None = None,
) -> ChainAccept:
    """Chain rejection sampling: the committed tokens follow the target's distribution exactly.

    Draft ``d`` is accepted with probability ``min(1, p(d) / q(d))``, p of the target and q of the draft. At the
    first rejection the bonus is drawn from ``relu(p - q)``; when none was rejected, from p.

    A cap ends the chain as if the block had been shorter: a row that reaches its cap draws the bonus from p at
    the cap, *whatever* the draft behind the cap would have been worth. Drawing from ``relu(p - q)`` where that
    draft would have been rejected, and from p where it would have been accepted, would not add up to p.

    Args:
        candidates_BS: int64; the anchor, then the drafts.
        target_probs_BSV: float32; the target's distribution behind each candidate. Positions behind a cap may hold
            anything, NaN included.
        coins_BG: float32 in [0, 1), one per draft.
        noise_BV: Exp(1), for the bonus.
        draft_probs_BGV: float32; what each draft was drawn from. None: each draft was chosen without chance
            (a point mass), so it is accepted with ``p(d)`` and the bonus is drawn from p without d.
        caps_B: int ``[B]``; at most so many drafts are accepted. None: all of them may be.
    """
    drafts_BG1 = candidates_BS[:, 1:].unsqueeze(2)
    draft_len = drafts_BG1.shape[1]
    p_BG = target_probs_BSV[:, :draft_len].gather(2, drafts_BG1).squeeze(2)
    q_BG = 1.0 if draft_probs_BGV is None else draft_probs_BGV.gather(2, drafts_BG1).squeeze(2)
    run_B = leading_run(coins_BG * q_BG < p_BG)
    limit_B = _limits(candidates_BS, caps_B)
    correct_len_B = torch.minimum(run_B, limit_B)
    stop_B = correct_len_B.clamp(max=draft_len - 1)
    p_BV = at_index(target_probs_BSV, correct_len_B)
    if draft_probs_BGV is None:
        residual_BV = p_BV.scatter(1, at_index(drafts_BG1, stop_B), 0.0)
    else:
        residual_BV = (p_BV - at_index(draft_probs_BGV, stop_B)).relu()
    # Rounding may reject a draft and leave nothing to draw from: p and q are equal there, so p will do.
    from_residual_B = (correct_len_B < limit_B) & (residual_BV.sum(dim=1) > 0)
    bonus_B = weighted_draw(torch.where(from_residual_B.unsqueeze(1), residual_BV, p_BV), noise_BV)
    return ChainAccept(correct_len_B, bonus_B, run_B - correct_len_B)


def _limits(candidates_BS: Tensor, caps_B: Tensor | None) -> Tensor:
    batch, stride = candidates_BS.shape
    if caps_B is None:
        return torch.full((batch,), stride - 1, dtype=torch.int64, device=candidates_BS.device)
    return caps_B.long().clamp(0, stride - 1)


def simulated_lens(mean_len: float, longest_B: Tensor, generator: Generator | None) -> Tensor:
    """Forced accepted lengths of the given mean: each row gets its floor or its ceiling.

    Args:
        mean_len: accepted drafts per step, 0 or more.
        longest_B: int ``[B]``; no row gets more (the drafts that it has, or its cap).

    Returns:
        int64 ``[B]``. A draw from this rank's generator: a decision, to be synced as any other.
    """
    whole = int(mean_len)
    coins_B = uniform_coins(longest_B, generator)
    return torch.minimum(whole + (coins_B < mean_len - whole).long(), longest_B.long().clamp(min=0))


def chain_parents(candidates_BS: Tensor) -> Tensor:
    """The parents of a chain: node i hangs on node i - 1, the anchor on none (-1)."""
    width = candidates_BS.shape[1]
    return torch.arange(-1, width - 1, device=candidates_BS.device).expand_as(candidates_BS)


def chain_verdict(candidates_BS: Tensor, correct_len_B: Tensor, bonus_B: Tensor) -> Verdict:
    """What a chain commits: the accepted drafts, then the bonus. A pure function of synced values.

    A length beyond the block is cut to it: a rank whose length has diverged must drift, which can be diagnosed,
    and not crash on an index.
    """
    stride = candidates_BS.shape[1]
    correct_len_B = correct_len_B.long().clamp(0, stride - 1)
    column_S = torch.arange(stride, device=candidates_BS.device)
    shifted_BS = torch.cat((candidates_BS[:, 1:], bonus_B.unsqueeze(1).to(candidates_BS.dtype)), dim=1)
    at_end_BS = column_S == correct_len_B.unsqueeze(1)
    tokens_BS = torch.where(at_end_BS, bonus_B.unsqueeze(1), shifted_BS)
    behind_BS = column_S > correct_len_B.unsqueeze(1)
    return Verdict(
        commit_lens_B=correct_len_B + 1,
        tokens_BC=tokens_BS.masked_fill(behind_BS, -1),
        path_BC=column_S.expand_as(candidates_BS).masked_fill(behind_BS, -1),
    )
