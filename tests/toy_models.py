"""A target and a draft network as tables of logits, so small that every probability is known.

The target is a first-order Markov chain: its logits behind a token depend on that token alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specsync_core import Batch, Speculator, SpeculatorContext


def table(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass(frozen=True)
class ToyTarget:
    logits_VV: Tensor

    @classmethod
    def seeded(cls, vocab_size: int, seed: int = 1) -> ToyTarget:
        return cls(table(vocab_size, vocab_size, seed=seed))

    def verify(self, tokens_BW: Tensor) -> Tensor:
        return self.logits_VV[tokens_BW]

    def probabilities(self, temperature: float) -> Tensor:
        return torch.softmax(self.logits_VV / temperature, dim=-1)

    def greedy(self, anchor: int, length: int) -> list[int]:
        tokens = []
        for _ in range(length):
            anchor = int(self.logits_VV[anchor].argmax())
            tokens.append(anchor)
        return tokens


class ToyNetwork:
    """A draft network of another opinion than the target's; `noise` is this rank's own float noise."""

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 2,
        max_gamma: int = 8,
        noise: float = 0.0,
        rank: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        def noisy(*shape: int, offset: int) -> Tensor:
            own = table(*shape, seed=1000 + 10 * rank + offset, scale=noise)
            return (table(*shape, seed=seed + offset) + own).to(device)

        self.block_VGV = noisy(vocab_size, max_gamma, vocab_size, offset=0)
        self.markov_VV = noisy(vocab_size, vocab_size, offset=1)
        self.path_VV = noisy(vocab_size, vocab_size, offset=2)

    def block_logits(self, batch: Batch, gamma: int) -> Tensor:
        return self.block_VGV[batch.anchor_B, :gamma]

    def markov_logits(self, prev_B: Tensor) -> Tensor:
        return self.markov_VV[prev_B]

    def path_logits(self, batch: Batch, paths_BPL: Tensor) -> Tensor:
        return self.path_VV[paths_BPL[:, :, -1]]


def make_batch(anchor_B: Tensor, temperatures_B: Tensor, prefix_lens_B: Tensor | None = None) -> Batch:
    return Batch(
        request_ids=tuple(range(anchor_B.shape[0])),
        anchor_B=anchor_B,
        prefix_lens_B=torch.zeros_like(anchor_B) if prefix_lens_B is None else prefix_lens_B,
        temperatures_B=temperatures_B,
    )


def make_context(
    sync, *, network=None, gamma=3, vocab_size=5, max_batch=8, seed=0, device="cpu", **options
) -> SpeculatorContext:
    return SpeculatorContext(
        sync=sync,
        network=network if network is not None else ToyNetwork(vocab_size, device=device),
        gamma=gamma,
        vocab_size=vocab_size,
        max_batch=max_batch,
        device=torch.device(device),
        gpu_id=torch.device(device).index or 0,
        generator=torch.Generator(device).manual_seed(seed),
        **options,
    )


def decode(speculator: Speculator, target: ToyTarget, anchor_B: Tensor, temperatures_B: Tensor, tokens: int) -> Tensor:
    """Run steps until every row has committed so many tokens behind its anchor: int64 ``[B, tokens]``."""
    rows = anchor_B.shape[0]
    out_BN = torch.full((rows, tokens + speculator.width), -1, dtype=torch.int64)
    lens_B = torch.zeros(rows, dtype=torch.int64)
    while int(lens_B.min()) < tokens:
        batch = make_batch(anchor_B, temperatures_B, lens_B)
        draft = speculator.draft(batch)
        verdict = speculator.accept(batch, draft, target.verify(draft.tokens_BW))
        for column in range(verdict.tokens_BC.shape[1]):
            committed_B = column < verdict.commit_lens_B
            place_B = (lens_B + column).clamp(max=out_BN.shape[1] - 1)
            new_B = torch.where(committed_B & (lens_B + column < tokens), verdict.tokens_BC[:, column], -1)
            kept_B = out_BN.gather(1, place_B.unsqueeze(1)).squeeze(1)
            out_BN.scatter_(1, place_B.unsqueeze(1), torch.where(new_B >= 0, new_B, kept_B).unsqueeze(1))
        last_B = verdict.commit_lens_B - 1
        anchor_B = verdict.tokens_BC.gather(1, last_B.unsqueeze(1)).squeeze(1)
        lens_B = lens_B + verdict.commit_lens_B
    return out_BN[:, :tokens]
