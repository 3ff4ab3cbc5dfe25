"""The heads' candidates as the tail of a captured draft graph.

Shape letters: B requests, G heads, K candidates per head, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specsync_core import replay

if TYPE_CHECKING:
    from specsync_core import SpecTpSync


def candidates(sync: SpecTpSync, logits_BGV: Tensor, topk: int) -> Tensor:
    """Each head's likeliest tokens, agreed (site ``medusa-heads``): int64 ``[B, G, K]``."""
    agreed_BGK: Tensor = sync.sync("medusa-heads", logits_BGV.topk(topk, dim=-1).indices)
    return agreed_BGK


class CapturedHeads:
    """`candidates` over static buffers: a graph on a GPU, a plain call elsewhere.

    A graph replays kernels on the addresses that it was captured with. So everything goes through buffers that live as
    long as this object, and the broadcast is part of the graph.
    """

    def __init__(
        self, sync: SpecTpSync, *, max_batch: int, heads: int, topk: int, vocab_size: int, device: torch.device
    ) -> None:
        self._sync = sync
        self._topk = topk
        self.logits_BGV = torch.zeros(max_batch, heads, vocab_size, device=device)
        self.candidates_BGK = torch.zeros(max_batch, heads, topk, dtype=torch.int64, device=device)
        self._replays: dict[int, replay.Replay] = {}

    def draft(self, logits_BGV: Tensor) -> Tensor:
        """Fill the buffer, replay, and return a view of the agreed candidates: valid until the next draft."""
        batch = logits_BGV.shape[0]
        if batch not in self._replays:
            self._replays[batch] = replay.Replay(lambda: self._tail(batch), self.logits_BGV.device)
        self.logits_BGV[:batch].copy_(logits_BGV)
        self._replays[batch]()
        return self.candidates_BGK[:batch]

    def _tail(self, batch: int) -> None:
        self.candidates_BGK[:batch].copy_(candidates(self._sync, self.logits_BGV[:batch], self._topk))
