"""A decode step of DSpark's shape: a Markov draft of ``GAMMA`` tokens, a plan, an accept; how it syncs is a parameter.

Shape letters: B requests, G drafted tokens, S = G + 1, V vocabulary, R rank of the Markov head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

GAMMA = 7
VOCABULARY = 129_280
MARKOV_RANK = 64

Sync = Callable[[str, Sequence[Tensor]], object]
"""Takes a site's slug and its tensors; overwrites them with group rank 0's."""
Draw = Callable[[Tensor], Tensor]
"""Takes logits ``[B, V]`` and returns the tokens ``[B]`` that all ranks hold."""


class Step:
    """Static inputs of one batch size. Calling a method runs the step on the current stream; it can be captured."""

    def __init__(self, batch: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device).bfloat16()

        self.base_BGV = noise(batch, GAMMA, VOCABULARY)
        self.embed_VR = noise(VOCABULARY, MARKOV_RANK)
        self.head_RV = noise(MARKOV_RANK, VOCABULARY)
        self.anchor_B = torch.randint(VOCABULARY, (batch,), generator=generator, device=device)
        self.confidence_BG = torch.rand(batch, GAMMA, generator=generator, device=device)
        self.target_BS = torch.randint(VOCABULARY, (batch, GAMMA + 1), generator=generator, device=device)

    def __call__(self, sync: Sync, draw: Draw | None = None) -> None:
        """Run the step; ``draw`` draws and syncs at once, None draws by argmax and then syncs."""
        drafted, previous_B = [], self.anchor_B
        for position in range(GAMMA):
            logits_BV = self.base_BGV[:, position] + self.embed_VR[previous_B] @ self.head_RV
            if draw is not None:
                previous_B = draw(logits_BV)
            else:
                previous_B = logits_BV.argmax(dim=-1)
                sync("dspark-draft-greedy", (previous_B,))
            drafted.append(previous_B)
        survival_BG = self.confidence_BG.cumprod(dim=1)
        verify_lens_B = (survival_BG > 0.3).sum(dim=1, dtype=torch.int32) + 1
        sync("dspark-plan", (verify_lens_B,))
        draft_BG = torch.stack(drafted, dim=1)
        run_B = (draft_BG == self.target_BS[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        correct_len_B = torch.minimum(run_B, (verify_lens_B - 1).long())
        bonus_B = self.target_BS.gather(1, correct_len_B.unsqueeze(1)).squeeze(1)
        sync("dspark-accept-greedy", (correct_len_B, bonus_B, run_B - correct_len_B))
