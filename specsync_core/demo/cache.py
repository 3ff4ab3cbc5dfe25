"""The key-value cache of one rank's own heads, and forwards that read and write it.

Shape letters: B requests, T tokens per request in one forward, N tokens that are really computed, L cache
positions, H heads of this rank, E head size, W nodes per request, C committed tokens at most per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from specsync_core.demo.model import Attend, Decoder


@dataclass(frozen=True)
class Rows:
    """Which cache rows a forward works on, and how far each is filled. Host and device copies of the same facts."""

    slots_B: Tensor
    """int64: the request's row of the cache."""
    lens_B: Tensor
    """int64: committed positions with KV; the forward writes behind them."""
    longest: int
    """The largest of ``lens_B``, known to the host without asking the device."""


class KVCache:
    """Keys and values of ``slots`` rows of ``max_len`` positions for every layer of a decoder."""

    def __init__(self, decoder: Decoder, slots: int, max_len: int) -> None:
        heads, size = decoder.weights["0.qkv"].shape[1:3]
        shape = (2, decoder.config.layers, slots, max_len, heads, size)
        self._kv = torch.zeros(shape, dtype=decoder.weights["embed"].dtype, device=decoder.device)
        self.max_len = max_len

    def attend(self, rows: Rows, sees_BTT: Tensor, index_N: Tensor) -> Attend:
        """Attention over the committed positions of each row and over this forward's own tokens.

        Token t of a request is written at position ``lens_B + t``, whatever its place in the sequence is.

        Args:
            sees_BTT: bool; which of this forward's tokens each of them sees, itself included.
            index_N: int64; the tokens that are computed, as indices into ``B * T``.
        """
        batch, width = sees_BTT.shape[:2]
        length = min(self.max_len, _round_up(rows.longest + width, 32))
        mask_BTL = _mask(rows.lens_B, sees_BTT, length)
        slots_N = rows.slots_B[index_N // width]
        places_N = rows.lens_B[index_N // width] + index_N % width

        def attend(layer: int, q_NHE: Tensor, k_NHE: Tensor, v_NHE: Tensor) -> Tensor:
            keys, values = self._kv[0, layer], self._kv[1, layer]
            keys[slots_N, places_N], values[slots_N, places_N] = k_NHE, v_NHE
            q = q_NHE.new_zeros(batch * width, *q_NHE.shape[1:]).index_copy(0, index_N, q_NHE)
            out_BHTE = functional.scaled_dot_product_attention(
                q.view(batch, width, *q.shape[1:]).transpose(1, 2),
                keys[rows.slots_B, :length].transpose(1, 2),
                values[rows.slots_B, :length].transpose(1, 2),
                attn_mask=mask_BTL[:, None],
            )
            return out_BHTE.transpose(1, 2).flatten(0, 1)[index_N]

        return attend

    def keep_path(self, rows: Rows, path_BC: Tensor) -> None:
        """Move the KV of the accepted nodes to where their tokens belong: right behind the committed positions.

        Args:
            path_BC: int64; nodes of the forward before, in the order of the sequence; -1 behind the end.
        """
        column_C = torch.arange(path_BC.shape[1], device=path_BC.device)
        start_B1 = rows.lens_B[:, None]
        source_BC = start_B1 + torch.where(path_BC < 0, column_C, path_BC)
        slots_B1 = rows.slots_B[:, None]
        self._kv[:, :, slots_B1, start_B1 + column_C] = self._kv[:, :, slots_B1, source_BC]


def _mask(lens_B: Tensor, sees_BTT: Tensor, length: int) -> Tensor:
    """bool ``[B, T, L]``: committed positions are seen by all, this forward's own tokens as ``sees_BTT`` says."""
    width = sees_BTT.shape[1]
    offset_B1L = (torch.arange(length, device=lens_B.device) - lens_B[:, None])[:, None]
    own_BTL = sees_BTT.gather(2, offset_B1L.clamp(0, width - 1).expand(-1, width, -1))
    return (offset_B1L < 0) | (own_BTL & (offset_B1L < width))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def forward(
    decoder: Decoder,
    cache: KVCache,
    rows: Rows,
    tokens_BT: Tensor,
    depth_BT: Tensor,
    sees_BTT: Tensor,
    index_N: Tensor | None = None,
) -> Tensor:
    """Run a decoder over new tokens behind the committed ones and write their KV.

    Args:
        tokens_BT: int64.
        depth_BT: int64; a token's place in its sequence, counted from the first uncommitted position.
        sees_BTT: bool; which of these tokens each of them sees, itself included.
        index_N: int64; compute only these, as indices into ``B * T``; None computes all.

    Returns:
        Hidden states ``[N, D]`` before the final norm.

    Raises:
        IndexError: the new tokens do not fit behind ``rows.longest``.
    """
    width = tokens_BT.shape[1]
    if rows.longest + width > cache.max_len:
        raise IndexError(
            f"{decoder.name}: {width} tokens behind {rows.longest} committed ones do not fit into the KV cache's"
            f" {cache.max_len} positions; this rank's lengths are not what its scheduler admitted"
        )
    if index_N is None:
        index_N = torch.arange(tokens_BT.numel(), device=tokens_BT.device)
    positions_BT = rows.lens_B[:, None] + depth_BT
    attend = cache.attend(rows, sees_BTT, index_N)
    return decoder.hidden(tokens_BT.flatten()[index_N], positions_BT.flatten()[index_N], attend)


def causal(batch: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depths ``[B, T]`` and visibility ``[B, T, T]`` of plain sequences."""
    depth_BT = torch.arange(width, device=device).expand(batch, width)
    return depth_BT, torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(batch, width, width)


def side_by_side(sees_LL: Tensor, count: int) -> Tensor:
    """Visibility ``[count * L, count * L]`` of equal sequences that do not see each other."""
    length = len(sees_LL)
    same = torch.eye(count, dtype=torch.bool, device=sees_LL.device)
    return (same[:, None, :, None] & sees_LL[None, :, None, :]).reshape(count * length, count * length)


def tree(parents_BW: Tensor) -> tuple[Tensor, Tensor]:
    """Depths ``[B, W]`` and visibility ``[B, W, W]`` (itself and its ancestors) of trees.

    Args:
        parents_BW: int64; index of each node's parent, -1 for the first; parents come before children.
    """
    batch, width = parents_BW.shape
    sees_BWW = torch.eye(width, dtype=torch.bool, device=parents_BW.device).repeat(batch, 1, 1)
    row_B = torch.arange(batch, device=parents_BW.device)
    for node in range(1, width):
        sees_BWW[:, node] |= sees_BWW[row_B, parents_BW[:, node]]
    return sees_BWW.sum(2) - 1, sees_BWW


def pad_to_tier(lengths: Sequence[int], width: int, tier: int) -> list[int]:
    """Indices into ``B * width`` of each request's first tokens, repeated up to the next multiple of ``tier``.

    CUDA-graph engines pad in the same way: a few sizes are captured, the total picks one.
    """
    index = [row * width + column for row, length in enumerate(lengths) for column in range(length)]
    return index + index[:1] * (_round_up(len(index), tier) - len(index))
