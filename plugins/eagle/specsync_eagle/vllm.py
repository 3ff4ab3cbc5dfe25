"""Where vLLM drafts for EAGLE, EAGLE-3 and MTP. Facts about its code, read from 0.24.0 to 0.32.0; no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specsync_core import BroadcastPoint, EngineFacts, vllm_draft_steps

METHODS = frozenset({"eagle", "eagle3", "mtp"})


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The points of both runners; none for another engine or another method."""
    if engine.engine != "vllm" or engine.algorithm not in (None, *METHODS):
        return ()
    (step,) = vllm_draft_steps("V1")
    own = replace(  # Step 3.5's MTP drafts in a method of its own; its kin inherit the base's
        step,
        target="vllm.v1.spec_decode.step3p5.Step3p5MTPProposer._sample_draft_tokens_for_step",
        signature=(*step.signature, "spec_step_idx"),
    )
    return (step, own, *vllm_draft_steps("V2"))
