"""DFlash bound to an engine: draft a block in one forward, accept, first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specsync_core import Batch, Draft, SpeculatorContext, Verdict, can_capture, decisions
from specsync_dflash import accept as accepts
from specsync_dflash.draft import CapturedDraft, draft_greedy, draft_selected


@dataclass(frozen=True)
class _DraftState:
    sampling: decisions.Sampling
    selector_probs_BGV: Tensor | None


class DFlashSpeculator:
    """The reference DFlash of the demo engine.

    Eagerly, a selector drafts for batches that sample. Folded, the block's argmax is the tail of the draft graph:
    drafts are greedy then, and batches that sample take target-only rejection.
    """

    def __init__(self, context: SpeculatorContext, *, num_candidates: int = 4) -> None:
        """Pass the memory gate (site ``dflash-mem``), which decides on the group's minimum of free memory."""
        self.width = context.gamma + 1
        self._context = context
        self._num_candidates = num_candidates
        self._captured: CapturedDraft | None = None
        free_gib = context.sync.available_memory_gb("dflash-mem", context.device, context.gpu_id)
        if context.folded and can_capture(free_gib):
            self._captured = CapturedDraft(
                context.sync,
                max_batch=context.max_batch,
                gamma=context.gamma,
                vocab_size=context.vocab_size,
                device=context.device,
            )

    def draft(self, batch: Batch) -> Draft:
        sampling = decisions.Sampling.of(batch.temperatures_B)
        tokens_BG, selector_probs_BGV = self._draft_block(batch, sampling)
        candidates_BS = torch.cat((batch.anchor_B.unsqueeze(1), tokens_BG), dim=1)
        return Draft(
            tokens_BW=candidates_BS,
            parents_BW=decisions.chain_parents(candidates_BS),
            state=_DraftState(sampling, selector_probs_BGV),
        )

    def _draft_block(self, batch: Batch, sampling: decisions.Sampling) -> tuple[Tensor, Tensor | None]:
        context = self._context
        logits_BGV = context.network.block_logits(batch, context.gamma)
        if self._captured is not None:
            return self._captured.draft(logits_BGV), None
        if sampling.all_greedy:
            return draft_greedy(context.sync, logits_BGV), None
        block = draft_selected(
            context.sync,
            logits_BGV,
            sampling,
            num_candidates=self._num_candidates,
            generator=context.generator,
        )
        return block.tokens_BG, block.probs_BGV

    def accept(self, batch: Batch, draft: Draft, target_logits_BWV: Tensor) -> Verdict:
        context, state = self._context, cast(_DraftState, draft.state)
        verdict = accepts.accept(
            context.sync,
            draft.tokens_BW,
            target_logits_BWV,
            state.sampling,
            selector_probs_BGV=state.selector_probs_BGV,
            generator=context.generator,
        )
        if context.simulated_accept_len is not None:
            verdict = accepts.simulate(
                context.sync, target_logits_BWV, mean_len=context.simulated_accept_len, generator=context.generator
            )
        return decisions.chain_verdict(draft.tokens_BW, verdict.accept_len, verdict.bonus)

    def first_token(self, batch: Batch, target_logits_BV: Tensor) -> Tensor:
        """Site ``dflash-target``: agreed before the draft path sees it."""
        context = self._context
        tokens_B = decisions.sample_tokens(
            target_logits_BV, decisions.Sampling.of(batch.temperatures_B), context.generator
        )
        agreed_B: Tensor = context.sync.sync("dflash-target", tokens_B)
        return agreed_B
