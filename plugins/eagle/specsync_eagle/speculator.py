"""EAGLE bound to an engine: draft a tree, verify it, first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from specsync_core import Batch, Draft, SpeculatorContext, Verdict, decisions
from specsync_eagle.tree import Tree, candidates_in_tree, draft_tree
from specsync_eagle.verify import simulate, tree_verdict, verify_tree


@dataclass(frozen=True)
class _DraftState:
    tree: Tree
    sampling: decisions.Sampling


class EagleSpeculator:
    """The reference EAGLE of the demo engine. It has no memory gate and nothing folded."""

    def __init__(self, context: SpeculatorContext, *, topk: int = 3, drafts_per_level: int = 3) -> None:
        """Size the tree: ``gamma`` levels, ``topk`` children per node, and the best of all candidates."""
        self._context = context
        self._topk = min(topk, context.vocab_size)
        self._num_drafts = min(drafts_per_level * context.gamma, candidates_in_tree(context.gamma, self._topk))
        self.width = self._num_drafts + 1

    def draft(self, batch: Batch) -> Draft:
        context = self._context
        tree = draft_tree(
            context.sync,
            lambda paths_BPL: context.network.path_logits(batch, paths_BPL),
            batch.anchor_B,
            depth=context.gamma,
            topk=self._topk,
            num_drafts=self._num_drafts,
        )
        state = _DraftState(tree, decisions.Sampling.of(batch.temperatures_B))
        return Draft(tokens_BW=tree.candidates_BT, parents_BW=tree.parents_BT, state=state)

    def accept(self, batch: Batch, draft: Draft, target_logits_BWV: Tensor) -> Verdict:
        context, state = self._context, cast(_DraftState, draft.state)
        verdict = verify_tree(context.sync, state.tree, target_logits_BWV, state.sampling, context.generator)
        if context.simulated_accept_len is not None:
            verdict = simulate(
                context.sync,
                state.tree,
                target_logits_BWV,
                mean_len=context.simulated_accept_len,
                generator=context.generator,
            )
        return tree_verdict(state.tree, verdict)

    def first_token(self, batch: Batch, target_logits_BV: Tensor) -> Tensor:
        """Site ``eagle-target``: agreed before the draft path sees it."""
        context = self._context
        sampling = decisions.Sampling.of(batch.temperatures_B)
        tokens_B = decisions.sample_tokens(target_logits_BV, sampling, context.generator)
        agreed_B: Tensor = context.sync.sync("eagle-target", tokens_B)
        return agreed_B
