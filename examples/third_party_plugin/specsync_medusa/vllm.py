"""Where vLLM drafts for Medusa. Facts about its code, read at 0.32.0; no torch here.

vLLM takes the likeliest token of every head: one path, no tree. Its verify is the model runner's own, whatever drafted,
and is synchronised by the built-in plugin ``vllm`` (sites ``vllm-tokens`` and ``vllm-verdict``).
"""

from __future__ import annotations

from collections.abc import Sequence

from specsync_core import BroadcastPoint, EngineFacts, Facts

POLICY = "all,-vllm-draft-block"


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The drafted block; none for another engine or another method."""
    if engine.engine != "vllm" or engine.algorithm not in (None, "medusa"):
        return ()
    block = BroadcastPoint(
        target="vllm.v1.spec_decode.medusa.MedusaProposer.propose",
        when="after",
        sites=("medusa-block",),
        # Without a request there is nothing to agree on.
        site_of=lambda call: "medusa-block" if call.result.numel() else None,
        tensors_of=lambda call: (call.result,),
        versions="==0.32.0",
        signature=("self", "num_speculative_tokens", "target_hidden_states", "sampling_metadata", "slot_mappings"),
        # A worker that runs Medusa has imported it.
        only_if_imported=True,
        # The built-in plugin hooks the same function. Where an operator turns its site on, it settles the decision.
        unless="vllm-draft-block",
        proof="draft",
    )
    return (block,)


def policy(facts: Facts) -> str | None:
    """Every site but the built-in one for the same decision; None where Medusa does not run."""
    runs_here = isinstance(facts, EngineFacts) and facts.engine == "vllm" and facts.algorithm == "medusa"
    return POLICY if runs_here else None
