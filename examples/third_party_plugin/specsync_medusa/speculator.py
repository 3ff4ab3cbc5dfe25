"""Medusa bound to an engine: draft a tree, accept a path of it. Every decision is agreed on at its site."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from specsync_core import Batch, Draft, SpeculatorContext, Verdict, can_capture, decisions
from specsync_medusa import acceptance
from specsync_medusa.heads import CapturedHeads, candidates
from specsync_medusa.tree import sparse_tree


class MedusaSpeculator:
    """The reference Medusa of the demo engine.

    The demo's draft network has no Medusa heads. Its block of masks gives what they give: for each of the next
    ``gamma`` positions a distribution that knows nothing of the tokens between.
    """

    def __init__(self, context: SpeculatorContext, *, topk: int = 3, nodes_per_head: int = 4) -> None:
        """Pass the memory gate (site ``medusa-mem``), which decides on the group's minimum of free memory."""
        self._context = context
        self._topk = min(topk, context.vocab_size)
        self._shape = sparse_tree(context.gamma, self._topk, nodes_per_head * context.gamma, context.device)
        self.width = self._shape.width
        self._captured: CapturedHeads | None = None
        free_gib = context.sync.available_memory_gb("medusa-mem", context.device, context.gpu_id)
        if context.folded and can_capture(free_gib):
            self._captured = CapturedHeads(
                context.sync,
                max_batch=context.max_batch,
                heads=context.gamma,
                topk=self._topk,
                vocab_size=context.vocab_size,
                device=context.device,
            )

    def draft(self, batch: Batch) -> Draft:
        logits_BGV = self._context.network.block_logits(batch, self._context.gamma)
        if self._captured is not None:
            agreed_BGK = self._captured.draft(logits_BGV)
        else:
            agreed_BGK = candidates(self._context.sync, logits_BGV, self._topk)
        return Draft(
            tokens_BW=self._shape.candidates(batch.anchor_B, agreed_BGK),
            parents_BW=self._shape.parents_W.expand(len(batch.request_ids), -1),
            state=decisions.Sampling.of(batch.temperatures_B),
        )

    def accept(self, batch: Batch, draft: Draft, target_logits_BWV: Tensor) -> Verdict:
        agreed = self._accept(draft, target_logits_BWV)
        if (mean_len := self._context.simulated_accept_len) is not None:
            forced = acceptance.simulate(self._shape, target_logits_BWV, mean_len, self._context.generator)
            agreed = acceptance.TreeAccept(*self._context.sync.sync("medusa-accept-simulated", *forced))
        return acceptance.verdict(self._shape, draft.tokens_BW, agreed)

    def _accept(self, draft: Draft, target_logits_BWV: Tensor) -> acceptance.TreeAccept:
        """The site depends on what the requests asked for, which is the same on every rank."""
        context, sampling = self._context, cast(decisions.Sampling, draft.state)
        if sampling.all_greedy:
            own = acceptance.accept_greedy(self._shape, draft.tokens_BW, target_logits_BWV)
            return acceptance.TreeAccept(*context.sync.sync("medusa-accept-greedy", *own))
        own = acceptance.accept_typical(self._shape, draft.tokens_BW, target_logits_BWV, sampling, context.generator)
        return acceptance.TreeAccept(*context.sync.sync("medusa-accept-typical", *own))

    def first_token(self, batch: Batch, target_logits_BV: Tensor) -> Tensor:
        """Site ``medusa-target``: agreed before the draft path sees it."""
        context = self._context
        sampling = decisions.Sampling.of(batch.temperatures_B)
        tokens_B = decisions.sample_tokens(target_logits_BV, sampling, context.generator)
        agreed_B: Tensor = context.sync.sync("medusa-target", tokens_B)
        return agreed_B
