"""Where vLLM drafts for EAGLE, EAGLE-3 and MTP. Facts about its code, read from 0.24.0 to 0.32.0; no torch here.

The draft model is sharded, and the draft KV of a step comes from the tokens of the one before, so each step is
synchronised. Probabilities beside the tokens are not: they weigh only in the verdict, which is group rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specsync_core import BroadcastPoint, EngineFacts

KNOWN = ">=0.24,<0.33"
METHODS = frozenset({"eagle", "eagle3", "mtp"})
PROPOSERS = "vllm.v1.spec_decode"


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The points of both runners; none for another engine or another method."""
    if engine.engine != "vllm" or engine.algorithm not in (None, *METHODS):
        return ()
    return (*_v1(), *_v2())


def _v1() -> Sequence[BroadcastPoint]:
    """Step 3.5's MTP drafts in a method of its own; its kin inherit the base's."""
    step = BroadcastPoint(
        target=f"{PROPOSERS}.llm_base_proposer.SpecDecodeBaseProposer._sample_draft_tokens",
        when="after",
        sites=("vllm-draft-step",),
        site_of=lambda call: "vllm-draft-step" if call.result[0].numel() else None,
        tensors_of=lambda call: (call.result[0],),
        versions=KNOWN,
        signature=("self", "hidden_states", "sampling_metadata"),
        only_if_imported=True,
        proof="draft",
    )
    own = replace(
        step,
        target=f"{PROPOSERS}.step3p5.Step3p5MTPProposer._sample_draft_tokens_for_step",
        signature=(*step.signature, "spec_step_idx"),
    )
    return step, own


def _v2() -> Sequence[BroadcastPoint]:
    """May be captured: a whole draft step, or the whole loop of them, is one graph there."""
    behind = ("idx_mapping", "temperature", "seeds", "draft_step", "draft_logits")
    oldest = BroadcastPoint(
        target="vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.sample_draft",
        when="after",
        sites=("vllm-draft-step",),
        site_of=lambda call: "vllm-draft-step" if call.result.numel() else None,
        tensors_of=lambda call: (call.result,),
        versions=">=0.24,<0.29",
        signature=("self", "hidden_states", "positions", *behind),
        capture="any-communicator",
        only_if_imported=True,
        proof="draft",
    )
    newer = ("self", "hidden_states", "sample_src_positions", *behind)
    return (
        oldest,
        replace(oldest, versions=">=0.29,<0.32", signature=newer),
        replace(oldest, versions="==0.32.0", signature=(*newer, "spec_step_idx")),
    )
