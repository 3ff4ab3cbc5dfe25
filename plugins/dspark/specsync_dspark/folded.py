"""The block draft folded into the draft graph: the eager chain over static buffers.

Shape letters: B requests (here the graph's batch size), G drafted tokens per block, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from specsync_core import decisions, replay
from specsync_dspark.draws import DraftBlock, Markov

if TYPE_CHECKING:
    from specsync_core import SpecTpSync


class FoldedSampler:
    """Draw a block over static buffers; on a GPU the whole chain is a captured graph.

    Two variants. With a generator, *sample* (site ``dspark-graph-sample``): an exponential race whose noise the
    graph redraws from that generator at every replay, so that ranks can differ even on identical logits; greedy
    rows race on noise 1. Without one, *greedy* (site ``dspark-graph-greedy``): the argmax alone, which float noise
    and shard boundaries can still move.

    The broadcast is part of the captured chain, once per drafted token, before the next step's logits are formed. Where
    the transport can, it is the draw itself.
    """

    def __init__(
        self,
        sync: SpecTpSync,
        markov: Markov,
        *,
        max_batch: int,
        gamma: int,
        vocab_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        generator: Generator | None = None,
    ) -> None:
        """Allocate the buffers. Nothing is captured yet: see `capture`.

        The sample variant's logits and noise take ``folded_sampling_bytes`` of memory.
        """
        self.site = "dspark-graph-greedy" if generator is None else "dspark-graph-sample"
        self._sync = sync
        self._markov = markov
        self._generator = generator
        self.logits_BGV = torch.zeros(max_batch, gamma, vocab_size, dtype=dtype, device=device)
        self.tokens_BG = torch.zeros(max_batch, gamma, dtype=torch.int64, device=device)
        self.anchor_B = torch.zeros(max_batch, dtype=torch.int64, device=device)
        if generator is not None:
            self.noise_BV = torch.ones(max_batch, vocab_size, dtype=torch.float32, device=device)
            self.temperatures_B = torch.ones(max_batch, dtype=torch.float32, device=device)
            self.greedy_B = torch.ones(max_batch, dtype=torch.bool, device=device)
        self._replays: dict[int, replay.Replay] = {}

    def capture(self, batch_size: int) -> None:
        """Prepare for batches of exactly this size; every rank of the group at the same moment.

        On a GPU this runs the chain, collectives included, and records it. A size that was not prepared is
        prepared by its first `draft`.
        """
        self._replays[batch_size] = replay.Replay(
            lambda: self._chain(batch_size), self.logits_BGV.device, generator=self._generator, sync=self._sync
        )

    def draft(self, base_logits_BGV: Tensor, anchor_B: Tensor, sampling: decisions.Sampling) -> DraftBlock:
        """Fill the buffers, replay, and return what the chain drew.

        Args:
            base_logits_BGV: float; one forward of the draft model over the block.
            anchor_B: int64; the last committed token of each request.
            sampling: ignored by the greedy variant.

        Returns:
            Views of the static buffers: valid until the next draft.
        """
        batch = anchor_B.shape[0]
        if batch not in self._replays or self._replays[batch].stale:
            self.capture(batch)
        # After the capture, whose warm-up runs overwrite the logits in place.
        self.logits_BGV[:batch].copy_(base_logits_BGV)
        self.anchor_B[:batch].copy_(anchor_B)
        if self._generator is not None:
            self.temperatures_B[:batch].copy_(sampling.temperatures_B)
            self.greedy_B[:batch].copy_(sampling.greedy_B)
        self._replays[batch]()
        return DraftBlock(self.tokens_BG[:batch], self.logits_BGV[:batch])

    def _chain(self, batch: int) -> None:
        prev_B = self.anchor_B[:batch]
        for step in range(self.tokens_BG.shape[1]):
            step_logits_BV = self.logits_BGV[:batch, step]
            step_logits_BV.add_(self._markov(prev_B))
            prev_B = self._sync.draw(self.site, self._scores(step_logits_BV, batch))
            self.tokens_BG[:batch, step].copy_(prev_B)

    def _scores(self, step_logits_BV: Tensor, batch: int) -> Tensor:
        """What the draw takes the argmax of."""
        if self._generator is None:
            return step_logits_BV
        noise_BV = self.noise_BV[:batch]
        noise_BV.exponential_(generator=self._generator).clamp_(min=decisions.MIN_NOISE)
        noise_BV.masked_fill_(self.greedy_B[:batch].unsqueeze(1), 1.0)
        return decisions.race_scores(step_logits_BV, self.temperatures_B[:batch], noise_BV)
