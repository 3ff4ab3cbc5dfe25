"""The verdict on a block: three exclusive paths through one function.

Shape letters: B requests, G drafted tokens per block, S = G + 1 (the anchor first), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Generator, Tensor

from specsync_core import decisions

if TYPE_CHECKING:
    from specsync_core import SpecTpSync


class BlockAccept(NamedTuple):
    """The verdict on a block. Both int64 ``[B]``."""

    accept_len: Tensor
    """Accepted drafts."""
    bonus: Tensor
    """The target's own token behind them."""


def accept(
    sync: SpecTpSync,
    candidates_BS: Tensor,
    target_logits_BSV: Tensor,
    sampling: decisions.Sampling,
    *,
    selector_probs_BGV: Tensor | None = None,
    generator: Generator | None = None,
) -> BlockAccept:
    """The agreed verdict of a verify.

    - A selector sampled the block (``dflash-selector``): chain rejection of its distribution against the target's.
    - Every row is greedy (``dflash-accept-greedy``): the target's argmax at every position is agreed, and the verdict
      is a pure function of it and of the drafts, which must be agreed too.
    - Otherwise (``dflash-accept-sample``): target-only rejection sampling. A draft that no chance chose is accepted
      with the target's own probability of it; on rejection the bonus is drawn from the target without it.

    All of them leave the target's distribution as it is. Where a selector drew the drafts, target-only rejection
    would do so too (it is exact for whatever draft it is given), but it would accept less: ``sum p * q`` of the
    drafts, against ``sum min(p, q)``. The selector's candidate set does not bias the outcome, because what is outside
    it has ``q = 0`` and is reached through ``relu(p - q)``.

    In a mixed batch greedy rows take the greedy verdict.

    Args:
        candidates_BS: int64; the anchor, then the (agreed) drafts.
        target_logits_BSV: float; the target's logits behind each candidate.
        selector_probs_BGV: float32; what each draft was drawn from, None without a selector.
        generator: this rank's own; ranks may hold different states.
    """
    if selector_probs_BGV is None and sampling.all_greedy:
        target_predict_BS = sync.sync(
            "dflash-accept-greedy", target_logits_BSV.argmax(dim=-1), logits=target_logits_BSV
        )
        return _pair(decisions.greedy_chain(candidates_BS, target_predict_BS))
    verdict = decisions.rejection_chain(
        candidates_BS,
        decisions.probabilities(target_logits_BSV, sampling.temperatures_B),
        decisions.uniform_coins(candidates_BS[:, 1:], generator),
        decisions.exponential_noise(target_logits_BSV[:, 0], generator),
        draft_probs_BGV=selector_probs_BGV,
    )
    if sampling.any_greedy:
        greedy = decisions.greedy_chain(candidates_BS, target_logits_BSV.argmax(dim=-1))
        verdict = greedy.where(sampling.greedy_B, verdict)
    site = "dflash-accept-sample" if selector_probs_BGV is None else "dflash-selector"
    return BlockAccept(*sync.sync(site, *_pair(verdict), logits=target_logits_BSV))


def simulate(
    sync: SpecTpSync, target_logits_BSV: Tensor, *, mean_len: float, generator: Generator | None = None
) -> BlockAccept:
    """Force accepted lengths of a given mean, in place of the honest verdict (site ``dflash-accept-simulated``).

    The length is drawn after the accept was agreed on, so the final values are synced again. The bonus is the
    target's argmax at the forced length: a benchmark's text has no meaning.
    """
    batch, stride, _ = target_logits_BSV.shape
    lens_B = decisions.simulated_lens(mean_len, target_logits_BSV.new_full((batch,), stride - 1).long(), generator)
    bonus_B = decisions.at_index(target_logits_BSV, lens_B).argmax(dim=-1)
    return BlockAccept(*sync.sync("dflash-accept-simulated", lens_B, bonus_B))


def _pair(verdict: decisions.ChainAccept) -> BlockAccept:
    return BlockAccept(verdict.correct_len, verdict.bonus)
