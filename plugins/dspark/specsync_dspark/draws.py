"""The eager block draft: one draw per step, agreed before the next step's logits are formed.

Where the transport can, a draw and its sync are one launch (`SpecTpSync.draw`); only the multinomial draws first.

Shape letters: B requests, G drafted tokens per block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
) -> DraftBlock:
    """Draw a block token by token, each agreed before anything looks at it.

    Syncing at the end of the block would be too late: every step's logits depend on the token before.

    Args:
        base_logits_BGV: float32, bfloat16 or float16; one forward of the draft model over the block.
        anchor_B: int64; the last committed token of each request.
        markov: the Markov head.
        draw: step logits ``[B, V]`` to group rank 0's tokens, int64 ``[B]``.
    """
    prev_B, tokens, logits = anchor_B, [], []
    for step in range(base_logits_BGV.shape[1]):
        step_logits_BV = base_logits_BGV[:, step] + markov(prev_B)
        prev_B = draw(step_logits_BV)
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

    Sites: ``dspark-draft-greedy`` when every row is greedy; otherwise ``dspark-draft-sample``, an exponential race on
    fresh noise, or ``dspark-draft-multinomial`` without fast sampling.

    Args:
        generator: this rank's own; ranks may hold different states.
        fast_sampling: an exponential race in place of the multinomial; equal on every rank.
    """

    def greedy(logits_BV: Tensor) -> Tensor:
        return sync.draw("dspark-draft-greedy", logits_BV)

    def race(logits_BV: Tensor) -> Tensor:
        noise_BV = decisions.race_noise(logits_BV, sampling, generator)
        return sync.draw("dspark-draft-sample", decisions.race_scores(logits_BV, sampling.temperatures_B, noise_BV))

    def multinomial(logits_BV: Tensor) -> Tensor:
        drawn_B: Tensor = sync.sync("dspark-draft-multinomial", multinomial_draw(logits_BV, sampling, generator))
        return drawn_B

    draw = greedy if sampling.all_greedy else race if fast_sampling else multinomial
    return draft_chain(base_logits_BGV, anchor_B, markov, draw)
