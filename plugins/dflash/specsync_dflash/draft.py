"""The block draft of one forward: greedy, or chosen by a selector from candidate sets.

Shape letters: B requests, G drafted tokens per block, V vocabulary, K candidates per position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from specsync_core import decisions, replay

if TYPE_CHECKING:
    from specsync_core import SpecTpSync


@dataclass(frozen=True)
class SelectedBlock:
    """A block that a selector sampled."""

    tokens_BG: Tensor
    """int64; agreed."""
    probs_BGV: Tensor
    """float32; the distribution that each token was drawn from, 0 outside its candidate set. This rank's own bits."""


def draft_greedy(sync: SpecTpSync, block_logits_BGV: Tensor) -> Tensor:
    """The argmax of every block position, agreed: int64 ``[B, G]`` (site ``dflash-draft-greedy``).

    Greedy or not, it is a rank's own decision: a near-tie falls differently on different bits.
    """
    tokens_BG: Tensor = sync.sync("dflash-draft-greedy", block_logits_BGV.argmax(dim=-1))
    return tokens_BG


def draft_selected(
    sync: SpecTpSync,
    block_logits_BGV: Tensor,
    sampling: decisions.Sampling,
    *,
    num_candidates: int,
    generator: Generator | None,
) -> SelectedBlock:
    """A selector's draws from each position's likeliest tokens, agreed (site ``dflash-draft-selector``).

    Agreement on the accepted lengths alone would not do: ranks that hold different drafts commit different tokens,
    and feed them into a vocabulary-parallel embedding.

    Args:
        block_logits_BGV: float; one forward of the draft model over the block.
        num_candidates: K; how many tokens a position's candidate set holds.
        generator: this rank's own; ranks may hold different states.
    """
    top = block_logits_BGV.float().topk(min(num_candidates, block_logits_BGV.shape[-1]), dim=-1)
    probs_BGK = decisions.probabilities(top.values, sampling.temperatures_B)
    noise_BGK = decisions.exponential_noise(probs_BGK, generator)
    drawn_BG = (probs_BGK / noise_BGK).argmax(dim=-1).masked_fill(sampling.greedy_B.unsqueeze(1), 0)
    tokens_BG = top.indices.gather(2, drawn_BG.unsqueeze(2)).squeeze(2)
    probs_BGV = torch.zeros_like(block_logits_BGV, dtype=torch.float32).scatter_(2, top.indices, probs_BGK)
    return SelectedBlock(sync.sync("dflash-draft-selector", tokens_BG), probs_BGV)


class CapturedDraft:
    """`draft_greedy` over static buffers, as the tail of a captured draft graph; called directly off a GPU."""

    def __init__(self, sync: SpecTpSync, *, max_batch: int, gamma: int, vocab_size: int, device: torch.device) -> None:
        self._sync = sync
        self.logits_BGV = torch.zeros(max_batch, gamma, vocab_size, dtype=torch.float32, device=device)
        self.tokens_BG = torch.zeros(max_batch, gamma, dtype=torch.int64, device=device)
        self._replays: dict[int, replay.Replay] = {}

    def draft(self, block_logits_BGV: Tensor) -> Tensor:
        """Fill the buffer, replay, and return a view of the agreed tokens: valid until the next draft."""
        batch = block_logits_BGV.shape[0]
        self.logits_BGV[:batch].copy_(block_logits_BGV)
        if batch not in self._replays or self._replays[batch].stale:
            self._replays[batch] = replay.Replay(lambda: self._tail(batch), self.logits_BGV.device, sync=self._sync)
        self._replays[batch]()
        return self.tokens_BG[:batch]

    def _tail(self, batch: int) -> None:
        self.tokens_BG[:batch].copy_(draft_greedy(self._sync, self.logits_BGV[:batch]))
