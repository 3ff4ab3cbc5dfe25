"""What a speculative algorithm offers to an engine that runs it: draft, accept, first token.

The demo engine runs any algorithm through these types; a plugin returns an `Algorithm` from its
``specsync_algorithm`` hook. Shape letters: B requests, W verify width (nodes per request, the anchor
first), C committed tokens at most per step, P draft paths per request, G drafted tokens, V vocabulary.
Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specsync_core.sync import SpecTpSync


@dataclass(frozen=True)
class Batch:
    """The requests that one step decodes. Tensors are on the engine's device."""

    request_ids: tuple[int, ...]
    anchor_B: Tensor
    """int64: the last committed token of each request; its KV is not computed yet."""
    prefix_lens_B: Tensor
    """int64: committed tokens before the anchor, all with KV."""
    temperatures_B: Tensor
    """float32: 0 or less means greedy."""

    @property
    def greedy_B(self) -> Tensor:  # noqa: N802 - a tensor with its shape suffix
        """bool: which rows decode greedily."""
        return self.temperatures_B <= 0


class DraftNetwork(Protocol):
    """The draft model as an algorithm sees it. Every method is a collective of the tensor-parallel group."""

    def block_logits(self, batch: Batch, gamma: int) -> Tensor:
        """One forward over ``[anchor, mask, ..., mask]`` of gamma positions: float ``[B, G, V]``, where
        position i predicts the (i+1)-th token after the anchor."""
        ...

    def markov_logits(self, prev_B: Tensor) -> Tensor:
        """What the previous token alone says about the next one: float ``[B, V]``."""
        ...

    def path_logits(self, batch: Batch, paths_BPL: Tensor) -> Tensor:
        """Causal draft of the next token behind each path (paths begin with the anchor): float ``[B, P, V]``."""
        ...


@dataclass(frozen=True)
class Draft:
    """What is to be verified in one target forward."""

    tokens_BW: Tensor
    """int64; column 0 is the anchor."""
    parents_BW: Tensor
    """int64: index of each node's parent, -1 for the anchor; parents come before children."""
    verify_lens_B: Tensor | None = None
    """int32: only the first so many nodes of a request are verified; None verifies all. Chains only."""
    state: object = None
    """Whatever the algorithm's own accept needs of its draft (probabilities, masks)."""


@dataclass(frozen=True)
class Verdict:
    """What a step commits."""

    commit_lens_B: Tensor
    """int64: tokens committed, the bonus included; at least 1."""
    tokens_BC: Tensor
    """int64: the committed tokens, accepted drafts then the bonus; -1 behind the end."""
    path_BC: Tensor
    """int64: nodes whose KV is kept, the anchor first; ``commit_lens_B`` of them, -1 behind the end."""


class Speculator(Protocol):
    """One algorithm, bound to an engine. Every method calls ``sync`` for each of its decisions."""

    width: int
    """W: nodes per request in a verify forward."""

    def draft(self, batch: Batch) -> Draft: ...

    def accept(self, batch: Batch, draft: Draft, target_logits_BWV: Tensor) -> Verdict: ...

    def first_token(self, batch: Batch, target_logits_BV: Tensor) -> Tensor:
        """The token after prefill: int64 ``[B]``. ``batch.anchor_B`` has no meaning yet."""
        ...


@dataclass(frozen=True)
class SpeculatorContext:
    """What an engine hands to an algorithm when it binds it."""

    sync: SpecTpSync
    network: DraftNetwork
    gamma: int
    """Drafted tokens per block, or the depth of the tree."""
    vocab_size: int
    max_batch: int
    device: torch.device
    gpu_id: int
    generator: torch.Generator
    """This rank's own generator, on ``device``: ranks may hold different states."""
    folded: bool = False
    """Draft and accept the way a captured graph does: static buffers, the folded sites."""
    simulated_accept_len: float | None = None
    """Force this mean number of accepted drafts per step (a benchmark knob); None accepts honestly."""


DraftKind = Literal["block", "causal"]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, by name, and how to bind it to an engine."""

    name: str
    summary: str
    draft_kind: DraftKind
    """Which draft network it needs: ``block_logits`` and ``markov_logits``, or ``path_logits``."""
    bind: Callable[[SpeculatorContext], Speculator]
