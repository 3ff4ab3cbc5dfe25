"""The verdict on a block: how many drafts are committed, and the token behind them.

The triple of a `ChainAccept` is agreed in one call before anything is derived from it.
Shape letters: B requests, G drafted tokens per block, S = G + 1 verify stride, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Generator, Tensor

from specsync_core import decisions

if TYPE_CHECKING:
    from specsync_core import SpecTpSync


class Finalised(NamedTuple):
    """What follows from a synced verdict."""

    commit_lens_B: Tensor
    """int64: accepted drafts and the bonus."""
    new_seq_lens_B: Tensor
    """int64: committed tokens that have KV: the prefix, the anchor and the accepted drafts."""
    out_tokens_BS: Tensor
    """int64: accepted drafts, then the bonus; -1 behind."""


def caps(verify_lens_B: Tensor | None) -> Tensor | None:
    """The most drafts that a plan lets a row accept; its verify length counts the anchor."""
    return None if verify_lens_B is None else verify_lens_B - 1


def accept_greedy(
    candidates_BS: Tensor, target_logits_BSV: Tensor, verify_lens_B: Tensor | None
) -> decisions.ChainAccept:
    """The verdict of greedy rows. Pure; can be captured."""
    return decisions.greedy_chain(candidates_BS, target_logits_BSV.argmax(dim=-1), caps(verify_lens_B))


def accept_sampled(
    candidates_BS: Tensor,
    target_logits_BSV: Tensor,
    draft_logits_BGV: Tensor,
    sampling: decisions.Sampling,
    verify_lens_B: Tensor | None,
    generator: Generator | None,
) -> decisions.ChainAccept:
    """The verdict of sampled rows, by chain rejection of the draft's distribution against the target's. Pure."""
    return decisions.rejection_chain(
        candidates_BS,
        decisions.probabilities(target_logits_BSV, sampling.temperatures_B),
        decisions.uniform_coins(candidates_BS[:, 1:], generator),
        decisions.exponential_noise(target_logits_BSV[:, 0], generator),
        draft_probs_BGV=decisions.probabilities(draft_logits_BGV, sampling.temperatures_B),
        caps_B=caps(verify_lens_B),
    )


def accept(
    sync: SpecTpSync,
    candidates_BS: Tensor,
    target_logits_BSV: Tensor,
    draft_logits_BGV: Tensor,
    sampling: decisions.Sampling,
    *,
    verify_lens_B: Tensor | None = None,
    generator: Generator | None = None,
) -> decisions.ChainAccept:
    """The agreed verdict of an eager verify, greedy, sampled or mixed.

    Sites: ``dspark-accept-greedy`` when every row is greedy, else ``dspark-accept-sample``. A mixed batch computes
    both and takes each row's own.

    Args:
        candidates_BS: int64; the anchor, then the (agreed) drafts.
        target_logits_BSV: float; rows behind a request's verify length may hold anything.
        draft_logits_BGV: float; what the drafts were drawn from.
        verify_lens_B: int32 ``[B]``; the agreed plan, None when all is verified.
        generator: this rank's own; ranks may hold different states.
    """
    if sampling.all_greedy:
        verdict = accept_greedy(candidates_BS, target_logits_BSV, verify_lens_B)
        return decisions.ChainAccept(*sync.sync("dspark-accept-greedy", *verdict, logits=target_logits_BSV))
    verdict = accept_sampled(candidates_BS, target_logits_BSV, draft_logits_BGV, sampling, verify_lens_B, generator)
    if sampling.any_greedy:
        greedy = accept_greedy(candidates_BS, target_logits_BSV, verify_lens_B)
        verdict = greedy.where(sampling.greedy_B, verdict)
    return decisions.ChainAccept(*sync.sync("dspark-accept-sample", *verdict, logits=target_logits_BSV))


def simulate(
    sync: SpecTpSync,
    honest: decisions.ChainAccept,
    target_logits_BSV: Tensor,
    *,
    mean_len: float,
    verify_lens_B: Tensor | None = None,
    generator: Generator | None = None,
) -> decisions.ChainAccept:
    """Force accepted lengths of a given mean, after the honest accept (site ``dspark-accept-simulated``).

    The length is drawn, so what the accept had agreed on is gone: the final values are synced again. The bonus is
    the target's argmax at the forced length, sampled or not: a benchmark's text has no meaning.
    """
    longest_B = honest.correct_len.new_full(honest.correct_len.shape, target_logits_BSV.shape[1] - 1)
    limits_B = caps(verify_lens_B)
    lens_B = decisions.simulated_lens(mean_len, longest_B if limits_B is None else limits_B, generator)
    bonus_B = decisions.at_index(target_logits_BSV, lens_B).argmax(dim=-1)
    forced = decisions.ChainAccept(lens_B, bonus_B, honest.cap_trim_lens.clone())
    return decisions.ChainAccept(*sync.sync("dspark-accept-simulated", *forced))


def finalise(candidates_BS: Tensor, verdict: decisions.ChainAccept, prefix_lens_B: Tensor) -> Finalised:
    """Derive lengths and output tokens from an agreed verdict. Pure; can be captured."""
    chain = decisions.chain_verdict(candidates_BS, verdict.correct_len, verdict.bonus)
    return Finalised(chain.commit_lens_B, prefix_lens_B + chain.commit_lens_B, chain.tokens_BC)
