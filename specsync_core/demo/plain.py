"""Decoding without speculation: what speculative output is compared with."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from specsync_core.algorithm import Batch, Draft, Verdict


class PlainSpeculator:
    """One token per step from the target alone: argmax, or a draw at the request's temperature.

    Args:
        generator: for temperatures above 0. There is no site here, so ranks must hold equal states.
    """

    width = 1

    def __init__(self, generator: Generator | None = None) -> None:
        self._generator = generator

    def draft(self, batch: Batch) -> Draft:
        anchor_B1 = batch.anchor_B[:, None]
        return Draft(tokens_BW=anchor_B1, parents_BW=torch.full_like(anchor_B1, -1))

    def accept(self, batch: Batch, draft: Draft, target_logits_BWV: Tensor) -> Verdict:
        token_B = self.first_token(batch, target_logits_BWV[:, 0])
        one_B = torch.ones_like(token_B)
        return Verdict(commit_lens_B=one_B, tokens_BC=token_B[:, None], path_BC=torch.zeros_like(token_B)[:, None])

    def first_token(self, batch: Batch, target_logits_BV: Tensor) -> Tensor:
        greedy_B = target_logits_BV.argmax(-1)
        if self._generator is None:
            return greedy_B
        scaled_BV = target_logits_BV / batch.temperatures_B.clamp(min=1e-5)[:, None]
        drawn_B = torch.multinomial(scaled_BV.softmax(-1), 1, generator=self._generator)[:, 0]
        return torch.where(batch.greedy_B, greedy_B, drawn_B)
