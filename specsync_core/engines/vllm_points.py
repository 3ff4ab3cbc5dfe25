"""Points in vLLM that several plugins share. Facts about its code, read from 0.24.0 to 0.32.0; no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from specsync_core.hookspecs import BroadcastPoint

V1_STEP = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer._sample_draft_tokens"
V2_STEP = "vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.sample_draft"


def vllm_draft_steps(runner: Literal["V1", "V2"] | None = None) -> Sequence[BroadcastPoint]:
    """Return where vLLM takes one step of a sharded draft model, at site ``vllm-draft-step``.

    The draft KV of a step comes from the tokens of the one before, so each step is synchronised. Probabilities beside
    the tokens are not: they weigh only in the verdict, which is group rank 0's, made from its own tokens and its own
    probabilities.

    Args:
        runner: one of the model runners; None is both.

    Graph: the V2 runner may capture a step, or the whole loop of them.
    """
    points = {"V1": (_v1(),), "V2": _v2()}
    return (*points["V1"], *points["V2"]) if runner is None else points[runner]


def _v1() -> BroadcastPoint:
    return BroadcastPoint(
        target=V1_STEP,
        when="after",
        sites=("vllm-draft-step",),
        site_of=lambda call: "vllm-draft-step" if call.result[0].numel() else None,
        tensors_of=lambda call: (call.result[0],),
        versions=">=0.24,<0.33",
        signature=("self", "hidden_states", "sampling_metadata"),
        only_if_imported=True,
        proof="draft",
    )


def _v2() -> Sequence[BroadcastPoint]:
    behind = ("idx_mapping", "temperature", "seeds", "draft_step", "draft_logits")
    oldest = replace(
        _v1(),
        target=V2_STEP,
        site_of=lambda call: "vllm-draft-step" if call.result.numel() else None,
        tensors_of=lambda call: (call.result,),
        versions=">=0.24,<0.29",
        signature=("self", "hidden_states", "positions", *behind),
        capture="any-communicator",
    )
    newer = ("self", "hidden_states", "sample_src_positions", *behind)
    return (
        oldest,
        replace(oldest, versions=">=0.29,<0.32", signature=newer),
        replace(oldest, versions="==0.32.0", signature=(*newer, "spec_step_idx")),
    )
