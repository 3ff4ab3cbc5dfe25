"""The draft model as algorithms see it: `specsync_core.algorithm.DraftNetwork` over a small decoder.

Shape letters as in `specsync_core.algorithm`: B requests, G drafted tokens, P paths, L tokens per path, T nodes of
one forward, C committed tokens at most per step, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specsync_core.algorithm import Batch
from specsync_core.demo.cache import KVCache, Rows, causal, forward, side_by_side
from specsync_core.demo.model import Decoder

FindRows = Callable[[Sequence[int]], Rows]
"""The cache rows of requests, by request id: slots and lengths before the anchor."""


class DraftModel:
    """A draft decoder with its own KV cache over the committed tokens. Every method is a collective.

    Args:
        cache: the draft's own, rows as in the target's.
        find_rows: the engine's table of requests.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, find_rows: FindRows) -> None:
        self._decoder = decoder
        self._cache = cache
        self._find_rows = find_rows

    def extend(self, rows: Rows, tokens_BC: Tensor, index_N: Tensor | None = None) -> None:
        """Compute the KV of newly committed tokens.

        The decode loop passes all C columns whatever was accepted, as engines with static shapes do: what lies
        behind the accepted tokens is overwritten by the next step and never seen.
        """
        depth_BC, sees_BCC = causal(tokens_BC.shape[0], tokens_BC.shape[1], tokens_BC.device)
        forward(self._decoder, self._cache, rows, tokens_BC, depth_BC, sees_BCC, index_N)

    def block_logits(self, batch: Batch, gamma: int) -> Tensor:
        """One forward over the anchor and ``gamma - 1`` mask tokens that all see each other: float ``[B, G, V]``."""
        size = len(batch.request_ids)
        tokens_BG = torch.full((size, gamma), self._decoder.config.mask_token, device=batch.anchor_B.device)
        tokens_BG[:, 0] = batch.anchor_B
        depth_BG, _ = causal(size, gamma, tokens_BG.device)
        sees_BGG = torch.ones(size, gamma, gamma, dtype=torch.bool, device=tokens_BG.device)
        hidden_ND = forward(
            self._decoder, self._cache, self._find_rows(batch.request_ids), tokens_BG, depth_BG, sees_BGG
        )
        return self._decoder.logits(hidden_ND, head="block_head").view(size, gamma, -1)

    def markov_logits(self, prev_B: Tensor) -> Tensor:
        """What the previous token alone says about the next one: float ``[B, V]``."""
        return self._decoder.markov(prev_B.long())

    def path_logits(self, batch: Batch, paths_BPL: Tensor) -> Tensor:
        """Causal draft of the next token behind each path: float ``[B, P, V]``. Paths do not see each other."""
        size, paths, length = paths_BPL.shape
        depth_BL, sees_BLL = causal(size, length, paths_BPL.device)
        sees_BTT = side_by_side(sees_BLL[0], paths).expand(size, -1, -1)
        tokens_BT, depth_BT = paths_BPL.reshape(size, -1), depth_BL.repeat(1, paths)
        hidden_ND = forward(
            self._decoder, self._cache, self._find_rows(batch.request_ids), tokens_BT, depth_BT, sees_BTT
        )
        last_BPD = hidden_ND.view(size, paths, length, -1)[:, :, -1]
        return self._decoder.logits(last_BPD.flatten(0, 1)).view(size, paths, -1)
