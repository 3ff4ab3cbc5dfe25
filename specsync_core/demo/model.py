"""A small tensor-parallel decoder in plain torch: weights, shards and the forward pass.

Shape letters: N tokens of one forward, D hidden size, H heads of this rank, E head size, F MLP width of this
rank, V vocabulary, R rank of the Markov head. Weights are created whole from a seed and then cut, so they do not
depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from specsync_core.demo.config import ModelConfig

Weights = dict[str, Tensor]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q_NHE, k_NHE, v_NHE) -> out_NHE``: where keys and values live is the caller's business."""


class Collectives(Protocol):
    """What the forward pass asks of its tensor-parallel group."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor, what: str) -> Tensor:
        """Sum over the ranks; may write in place. ``what`` names the call for the person who finds it hanging."""
        ...

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        """Concatenate the ranks' tensors along the last dimension."""
        ...


class Alone:
    """One rank: nothing to communicate. Used for training and for exact references."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor, what: str) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        return tensor


def init_target(config: ModelConfig, seed: int) -> Weights:
    """Create a target's whole weights, float32 on the CPU, from a seed.

    The residual stream is dominated by the embedding (the layers' outputs are scaled down), so that a cut-off copy
    of the model often agrees with it and an untrained draft is not always rejected. A byte vocabulary prefers
    printable bytes, so that untrained output is legible, if not sensible.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    hidden, heads, size = config.hidden, config.heads, config.head_size
    inward, outward = 1 / math.sqrt(hidden), 0.5 / math.sqrt(hidden * config.layers)
    weights = {
        "embed": normal(config.vocab_size, hidden, std=1.0),
        "norm": torch.ones(hidden),
        "head": normal(config.vocab_size, hidden, std=2 * inward),
    }
    for layer in range(config.layers):
        weights[f"{layer}.attention_norm"] = torch.ones(hidden)
        weights[f"{layer}.qkv"] = normal(3, heads, size, hidden, std=inward)
        weights[f"{layer}.out"] = normal(hidden, heads, size, std=outward)
        weights[f"{layer}.mlp_norm"] = torch.ones(hidden)
        weights[f"{layer}.up"] = normal(config.mlp, hidden, std=inward)
        weights[f"{layer}.down"] = normal(hidden, config.mlp, std=outward)
    if config.vocab_size == 256:
        weights["head"][[byte for byte in range(256) if not 32 <= byte < 127]] = 0
    return weights


def init_draft(config: ModelConfig, target: Weights) -> Weights:
    """Create a draft from its target: the first layers, and a Markov head that is embedding times output head.

    The mask token's embedding is zero and the block head is turned down, so that the Markov head decides
    where an untrained block knows nothing.

    Args:
        config: the draft's shape (see `ModelConfig.draft`).
    """
    kept = [f"{layer}." for layer in range(config.layers)]
    weights = {
        name: tensor.clone()
        for name, tensor in target.items()
        if name in ("embed", "norm", "head") or any(name.startswith(prefix) for prefix in kept)
    }
    weights["mask"] = torch.zeros(config.hidden)
    weights["block_head"] = 0.1 * target["head"]
    weights["markov_in"] = rms_norm(target["embed"], target["norm"])
    weights["markov_out"] = target["head"].clone()
    return weights


_SHARDED_DIM = {"embed": 0, "head": 0, "block_head": 0, "markov_out": 0, "qkv": 1, "out": 1, "up": 0, "down": 1}
"""Which dimension of a weight the ranks share; weights that are not listed are whole on every rank."""


def shard(weights: Weights, rank: int, world_size: int, device: torch.device | str = "cpu") -> Weights:
    """Cut one rank's part out of whole weights: attention by heads, MLP by columns, vocabulary by entries."""

    def cut(name: str, tensor: Tensor) -> Tensor:
        dim = _SHARDED_DIM.get(name.rpartition(".")[2])
        part = tensor if dim is None else tensor.chunk(world_size, dim)[rank]
        return part.contiguous().to(device)

    return {name: cut(name, tensor) for name, tensor in weights.items()}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotate(x_NHE: Tensor, positions_N: Tensor) -> Tensor:
    """Rotary position embedding: pairs of channels turn by an angle that grows with the position."""
    half = x_NHE.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x_NHE.device, dtype=torch.float32) / half)
    angle = (positions_N[:, None].float() * frequency)[:, None, :]
    cos, sin = angle.cos().to(x_NHE.dtype), angle.sin().to(x_NHE.dtype)
    left, right = x_NHE[..., :half], x_NHE[..., half:]
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Decoder:
    """One rank's part of a decoder. Every method is a collective of the tensor-parallel group.

    Args:
        weights: this rank's shard (`shard`), all on one device.
        collectives: `Alone`, or the group's.
    """

    def __init__(self, config: ModelConfig, weights: Weights, collectives: Collectives, name: str = "target") -> None:
        self.config = config
        self.weights = weights
        self.name = name
        self._collectives = collectives
        self._first_entry = collectives.rank * (config.vocab_size // collectives.world_size)

    @property
    def device(self) -> torch.device:
        return self.weights["embed"].device

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Vocabulary-parallel lookup, ``[N, D]``: each rank contributes its own entries. One all-reduce."""
        table = self.weights["embed"]
        local_N = tokens_N - self._first_entry
        mine_N = (local_N >= 0) & (local_N < len(table))
        x_ND = functional.embedding(local_N.clamp(0, len(table) - 1), table) * mine_N[:, None]
        x_ND = self._collectives.all_reduce(x_ND, f"{self.name} embedding")
        if "mask" not in self.weights:
            return x_ND
        return torch.where((tokens_N == self.config.mask_token)[:, None], self.weights["mask"], x_ND)

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Run the layers: ``[N, D]`` before the final norm. Two all-reduces per layer."""
        x_ND = self.embed(tokens_N)
        for layer in range(self.config.layers):
            x_ND = x_ND + self._attention(layer, x_ND, positions_N, attend)
            x_ND = x_ND + self._mlp(layer, x_ND)
        return x_ND

    def _attention(self, layer: int, x_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        qkv = self.weights[f"{layer}.qkv"]
        heads, size = qkv.shape[1:3]
        normed_ND = rms_norm(x_ND, self.weights[f"{layer}.attention_norm"])
        q, k, v = (normed_ND @ qkv.reshape(-1, qkv.shape[-1]).T).view(-1, 3, heads, size).unbind(1)
        out_NHE = attend(layer, rotate(q, positions_N), rotate(k, positions_N), v)
        partial_ND = out_NHE.flatten(1) @ self.weights[f"{layer}.out"].flatten(1).T
        return self._collectives.all_reduce(partial_ND, f"{self.name} layer {layer} attention")

    def _mlp(self, layer: int, x_ND: Tensor) -> Tensor:
        normed_ND = rms_norm(x_ND, self.weights[f"{layer}.mlp_norm"])
        inner_NF = functional.gelu(normed_ND @ self.weights[f"{layer}.up"].T)
        partial_ND = inner_NF @ self.weights[f"{layer}.down"].T
        return self._collectives.all_reduce(partial_ND, f"{self.name} layer {layer} mlp")

    def logits(self, hidden_ND: Tensor, head: str = "head") -> Tensor:
        """Vocabulary-parallel output head: float ``[N, V]``, bit-identical on every rank. One all-gather."""
        normed_ND = rms_norm(hidden_ND, self.weights["norm"])
        return self._collectives.all_gather(normed_ND @ self.weights[head].T, f"{self.name} logits")

    def markov(self, previous_N: Tensor) -> Tensor:
        """The low-rank head over the previous token: float ``[N, V]``. One all-gather."""
        partial_Nv = functional.embedding(previous_N, self.weights["markov_in"]) @ self.weights["markov_out"].T
        return self._collectives.all_gather(partial_Nv, f"{self.name} markov head")


def dense_attention(mask_BTT: Tensor) -> Attend:
    """Attention of B sequences of T tokens over themselves, without a cache; N is ``B * T``.

    Args:
        mask_BTT: bool; which tokens each token sees, itself included.
    """
    batch, length = mask_BTT.shape[:2]

    def attend(layer: int, q_NHE: Tensor, k_NHE: Tensor, v_NHE: Tensor) -> Tensor:
        q, k, v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (q_NHE, k_NHE, v_NHE))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_BTT[:, None])
        return out.transpose(1, 2).reshape(q_NHE.shape)

    return attend
