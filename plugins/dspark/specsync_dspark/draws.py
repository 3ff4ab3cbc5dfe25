"""The eager block draft: one draw per step, agreed before the next step's logits are formed.

Shape letters: B requests, G drafted tokens per block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from specsync_core import decisions

if TYPE_CHECKING:
    from specsync_core import SpecTpSync

Markov = Callable[[Tensor], Tensor]
"""What the previous token alone says about the next: int64 ``[B]`` to float ``[B, V]``."""


@dataclass(frozen=True)
class DraftBlock:
    """A drafted block and the logits that it was drawn from."""

    tokens_BG: Tensor
    """int64; agreed token by token."""
    logits_BGV: Tensor
    """The step logits, Markov part included; this rank's own bits."""


def greedy_draw(step_logits_BV: Tensor) -> Tensor:
    """The argmax of every row: int64 ``[B]``."""
    return step_logits_BV.argmax(dim=-1)


def race_draw(step_logits_BV: Tensor, sampling: decisions.Sampling, generator: Generator | None) -> Tensor:
    """Fast sampling, an exponential race on fresh noise; greedy rows race on noise 1: int64 ``[B]``."""
    return decisions.sample_tokens(step_logits_BV, sampling, generator)


def multinomial_draw(step_logits_BV: Tensor, sampling: decisions.Sampling, generator: Generator | None) -> Tensor:
    """A multinomial draw per row; greedy rows take the argmax: int64 ``[B]``."""
    probs_BV = decisions.probabilities(step_logits_BV, sampling.temperatures_B)
    drawn_B = torch.multinomial(probs_BV, num_samples=1, generator=generator).squeeze(1)
    return torch.where(sampling.greedy_B, step_logits_BV.argmax(dim=-1), drawn_B)


def draft_chain(
    base_logits_BGV: Tensor,
    anchor_B: Tensor,
    markov: Markov,
    draw: Callable[[Tensor], Tensor],
    agree: Callable[[Tensor], Any],
) -> DraftBlock:
    """Draw a block token by token, agreeing on each before anything looks at it.

    Syncing at the end of the block would be too late: every step's logits depend on the token before.

    Args:
        base_logits_BGV: float; one forward of the draft model over the block.
        anchor_B: int64; the last committed token of each request.
        markov: the Markov head.
        draw: step logits ``[B, V]`` to tokens int64 ``[B]``, on this rank alone.
        agree: the site's bound point; overwrites the tokens with group rank 0's.
    """
    prev_B, tokens, logits = anchor_B, [], []
    for step in range(base_logits_BGV.shape[1]):
        step_logits_BV = base_logits_BGV[:, step] + markov(prev_B)
        prev_B = agree(draw(step_logits_BV))
        tokens.append(prev_B)
        logits.append(step_logits_BV)
    return DraftBlock(torch.stack(tokens, dim=1), torch.stack(logits, dim=1))


def draft_block(
    sync: SpecTpSync,
    base_logits_BGV: Tensor,
    anchor_B: Tensor,
    markov: Markov,
    sampling: decisions.Sampling,
    generator: Generator | None,
    *,
    fast_sampling: bool = True,
) -> DraftBlock:
    """Draft a block eagerly, with the draw and the site that the batch calls for.

    Sites: ``dspark-draft-greedy`` when every row is greedy; otherwise ``dspark-draft-sample``, or
    ``dspark-draft-multinomial`` without fast sampling.

    Args:
        generator: this rank's own; ranks may hold different states.
        fast_sampling: an exponential race in place of the multinomial; equal on every rank.
    """
    if sampling.all_greedy:
        return draft_chain(base_logits_BGV, anchor_B, markov, greedy_draw, sync.point("dspark-draft-greedy"))
    draw, site = (race_draw, "dspark-draft-sample") if fast_sampling else (multinomial_draw, "dspark-draft-multinomial")
    return draft_chain(
        base_logits_BGV, anchor_B, markov, lambda logits: draw(logits, sampling, generator), sync.point(site)
    )
