"""DSpark bound to an engine: draft a block, plan, accept, first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specsync_core import (
    Batch,
    Draft,
    SpeculatorContext,
    Verdict,
    can_capture,
    can_fold_sampling,
    decisions,
    folded_sampling_bytes,
)
from specsync_dspark import accept as accepts
from specsync_dspark.draws import DraftBlock, draft_block
from specsync_dspark.epilogue import AcceptEpilogue
from specsync_dspark.folded import FoldedSampler
from specsync_dspark.planner import CostTable, VerifyLimits, VerifyPlanner, step_confidence

DEFAULT_COSTS = CostTable(
    batch_tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    steps_per_second=(100.0, 99.0, 97.0, 93.0, 86.0, 75.0, 60.0, 43.0, 27.0),
)
"""A step's fixed cost, and a little more for each token: the shape of a memory-bound verify."""


@dataclass(frozen=True)
class _DraftState:
    block: DraftBlock
    sampling: decisions.Sampling


class DSparkSpeculator:
    """The reference DSpark of the demo engine."""

    def __init__(
        self, context: SpeculatorContext, *, costs: CostTable = DEFAULT_COSTS, fast_sampling: bool = True
    ) -> None:
        """Pass the memory gate (site ``dspark-mem``) and build what it lets through.

        Both decisions come from the group's minimum of free memory: if some ranks captured or folded and others
        did not, one batch would take two different paths.
        """
        self.width = context.gamma + 1
        self._context = context
        self._fast_sampling = fast_sampling
        self._planner = VerifyPlanner(costs, VerifyLimits(max_len=self.width))
        self._greedy_sampler: FoldedSampler | None = None
        self._sampler: FoldedSampler | None = None
        self._epilogue: AcceptEpilogue | None = None
        free_gib = context.sync.available_memory_gb("dspark-mem", context.device, context.gpu_id)
        if context.folded and can_capture(free_gib):
            self._fold(free_gib)

    def _fold(self, free_gib: float) -> None:
        context = self._context
        needed_bytes = folded_sampling_bytes(context.max_batch, context.gamma, context.vocab_size, 4)
        self._greedy_sampler = self._folded_sampler(None)
        if can_fold_sampling("auto", free_gib, needed_bytes):
            self._sampler = self._folded_sampler(context.generator)
        self._epilogue = AcceptEpilogue(
            context.sync,
            max_batch=context.max_batch,
            stride=self.width,
            vocab_size=context.vocab_size,
            device=context.device,
        )

    def _folded_sampler(self, generator: torch.Generator | None) -> FoldedSampler:
        context = self._context
        return FoldedSampler(
            context.sync,
            context.network.markov_logits,
            max_batch=context.max_batch,
            gamma=context.gamma,
            vocab_size=context.vocab_size,
            device=context.device,
            generator=generator,
        )

    def draft(self, batch: Batch) -> Draft:
        sampling = decisions.Sampling.of(batch.temperatures_B)
        block = self._draft_block(batch, sampling)
        candidates_BS = torch.cat((batch.anchor_B.unsqueeze(1), block.tokens_BG), dim=1)
        confidence_BG = step_confidence(block.logits_BGV)
        return Draft(
            tokens_BW=candidates_BS,
            parents_BW=decisions.chain_parents(candidates_BS),
            verify_lens_B=self._planner.plan(self._context.sync, batch.request_ids, confidence_BG),
            state=_DraftState(block, sampling),
        )

    def _draft_block(self, batch: Batch, sampling: decisions.Sampling) -> DraftBlock:
        context = self._context
        base_logits_BGV = context.network.block_logits(batch, context.gamma)
        folded = self._greedy_sampler if sampling.all_greedy else self._sampler
        if folded is not None:
            return folded.draft(base_logits_BGV, batch.anchor_B, sampling)
        return draft_block(
            context.sync,
            base_logits_BGV,
            batch.anchor_B,
            context.network.markov_logits,
            sampling,
            context.generator,
            fast_sampling=self._fast_sampling,
        )

    def accept(self, batch: Batch, draft: Draft, target_logits_BWV: Tensor) -> Verdict:
        state = cast(_DraftState, draft.state)
        verdict = self._accept(batch, draft, target_logits_BWV, state)
        if self._context.simulated_accept_len is not None:
            verdict = accepts.simulate(
                self._context.sync,
                verdict,
                target_logits_BWV,
                mean_len=self._context.simulated_accept_len,
                verify_lens_B=draft.verify_lens_B,
                generator=self._context.generator,
            )
        return decisions.chain_verdict(draft.tokens_BW, verdict.correct_len, verdict.bonus)

    def _accept(
        self, batch: Batch, draft: Draft, target_logits_BWV: Tensor, state: _DraftState
    ) -> decisions.ChainAccept:
        if self._epilogue is not None and state.sampling.all_greedy:
            verdict, _ = self._epilogue.accept(
                draft.tokens_BW, target_logits_BWV, batch.prefix_lens_B, draft.verify_lens_B
            )
            return verdict
        return accepts.accept(
            self._context.sync,
            draft.tokens_BW,
            target_logits_BWV,
            state.block.logits_BGV,
            state.sampling,
            verify_lens_B=draft.verify_lens_B,
            generator=self._context.generator,
        )

    def first_token(self, batch: Batch, target_logits_BV: Tensor) -> Tensor:
        """Site ``dspark-target``: agreed before the draft path sees it."""
        context = self._context
        tokens_B = decisions.sample_tokens(
            target_logits_BV, decisions.Sampling.of(batch.temperatures_B), context.generator
        )
        agreed_B: Tensor = context.sync.sync("dspark-target", tokens_B)
        return agreed_B
