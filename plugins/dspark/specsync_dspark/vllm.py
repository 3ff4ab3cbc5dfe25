"""Where vLLM drafts for DSpark, which only its V2 runner has. Facts about its code, read at 0.32.0; no torch here.

The block is drawn inside one graph, token after token, and no draft KV depends on drafted tokens: the broadcast stands
behind the graph. Until then a rank's later draws may follow tokens that the others do not have; the target verifies
group rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsync_core import BroadcastPoint, Call, EngineFacts

_SIGNATURE = (
    *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
    *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
    *("dp_sync_state", "dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens"),
)


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The block; none for another engine or another method."""
    if engine.engine != "vllm" or engine.algorithm not in (None, "dspark"):
        return ()
    block = BroadcastPoint(
        target="vllm.v1.worker.gpu.spec_decode.dflash.speculator.DFlashSpeculator.propose",
        when="after",
        sites=("vllm-draft-block",),
        site_of=_site_of,
        tensors_of=lambda call: (call.result,),
        versions="==0.32.0",
        signature=_SIGNATURE,
        only_if_imported=True,
        proof="draft",
    )
    return (block,)


def _site_of(call: Call) -> str | None:
    """A dummy run at start-up returns whatever the buffers hold."""
    place = _SIGNATURE.index("dummy_run")
    is_dummy = call.kwargs.get("dummy_run", len(call.args) > place and call.args[place])
    return None if is_dummy or not call.result.numel() else "vllm-draft-block"
