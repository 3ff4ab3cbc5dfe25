"""The greedy accept as the verify graph's epilogue: the eager accept over static buffers.

Shape letters: B requests (here the graph's batch size), S = G + 1 verify stride, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specsync_core import decisions, replay
from specsync_dspark.accept import Finalised, accept_greedy, finalise

if TYPE_CHECKING:
    from specsync_core import SpecTpSync


class AcceptEpilogue:
    """Greedy accept, agreement and finalise over static buffers; on a GPU a captured graph (``dspark-accept-graph``).

    For batches whose every row is greedy: sampling needs draws that are kept out of the verify graph.
    """

    def __init__(
        self,
        sync: SpecTpSync,
        *,
        max_batch: int,
        stride: int,
        vocab_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the buffers. Nothing is captured yet: see `capture`."""
        self._sync = sync
        self._agree = sync.point("dspark-accept-graph")

        def lens(value: int = 0) -> Tensor:
            return torch.full((max_batch,), value, dtype=torch.int64, device=device)

        self.candidates_BS = torch.zeros(max_batch, stride, dtype=torch.int64, device=device)
        self.target_logits_BSV = torch.zeros(max_batch, stride, vocab_size, dtype=dtype, device=device)
        self.verify_lens_B = torch.full((max_batch,), stride, dtype=torch.int32, device=device)
        self.prefix_lens_B = lens()
        self.verdict = decisions.ChainAccept(lens(), lens(), lens())
        self.finalised = Finalised(lens(1), lens(), torch.zeros_like(self.candidates_BS))
        self._replays: dict[int, replay.Replay] = {}

    def capture(self, batch_size: int) -> None:
        """Prepare for batches of exactly this size; every rank of the group at the same moment."""
        self._replays[batch_size] = replay.Replay(
            lambda: self._epilogue(batch_size), self.candidates_BS.device, sync=self._sync
        )

    def accept(
        self,
        candidates_BS: Tensor,
        target_logits_BSV: Tensor,
        prefix_lens_B: Tensor,
        verify_lens_B: Tensor | None = None,
    ) -> tuple[decisions.ChainAccept, Finalised]:
        """Fill the buffers, replay, and return the agreed verdict and what follows from it.

        Returns:
            Views of the static buffers: valid until the next accept.
        """
        batch, stride = candidates_BS.shape
        if batch not in self._replays or self._replays[batch].stale:
            self.capture(batch)
        self.candidates_BS[:batch].copy_(candidates_BS)
        self.target_logits_BSV[:batch].copy_(target_logits_BSV)
        self.prefix_lens_B[:batch].copy_(prefix_lens_B)
        if verify_lens_B is None:
            self.verify_lens_B[:batch].fill_(stride)
        else:
            self.verify_lens_B[:batch].copy_(verify_lens_B)
        self._replays[batch]()
        return (
            decisions.ChainAccept(*(buffer[:batch] for buffer in self.verdict)),
            Finalised(*(buffer[:batch] for buffer in self.finalised)),
        )

    def _epilogue(self, batch: int) -> None:
        candidates_BS = self.candidates_BS[:batch]
        honest = accept_greedy(candidates_BS, self.target_logits_BSV[:batch], self.verify_lens_B[:batch])
        verdict = decisions.ChainAccept(*self._agree(*honest))
        finalised = finalise(candidates_BS, verdict, self.prefix_lens_B[:batch])
        for buffer, value in zip((*self.verdict, *self.finalised), (*verdict, *finalised), strict=True):
            buffer[:batch].copy_(value)
