"""Where vLLM drafts for DFlash. Facts about its code, read from 0.24.0 to 0.32.0; no torch here.

The whole block comes from one forward of mask tokens, so no draft KV depends on drafted tokens, and one broadcast a
block is enough. In the V2 runner it stands behind the block's graph, not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specsync_core import BroadcastPoint, Call, EngineFacts, vllm_draft_steps

METHOD = "dflash"


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The points of both runners; none for another engine or another method."""
    if engine.engine != "vllm" or engine.algorithm not in (None, METHOD):
        return ()
    return (*vllm_draft_steps("V1"), *_v2())


def _v2() -> Sequence[BroadcastPoint]:
    given = (
        *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
        *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
    )
    behind = ("dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile")
    oldest = (*given, "num_tokens_across_dp", *behind)
    point = BroadcastPoint(
        target="vllm.v1.worker.gpu.spec_decode.dflash.speculator.DFlashSpeculator.propose",
        when="after",
        sites=("vllm-draft-block",),
        site_of=_is_real(oldest),
        tensors_of=lambda call: (call.result,),
        versions=">=0.24,<0.29",
        signature=oldest,
        only_if_imported=True,
        proof="draft",
    )
    newer = (*given, "dp_sync", *behind)
    newest = (*given, "dp_sync_state", *behind, "num_speculative_tokens")
    return (
        point,
        replace(point, versions=">=0.29,<0.32", signature=newer, site_of=_is_real(newer)),
        replace(point, versions="==0.32.0", signature=newest, site_of=_is_real(newest)),
    )


def _is_real(signature: tuple[str, ...]) -> Callable[[Call], str | None]:
    """A dummy run at start-up returns whatever the buffers hold."""
    place = signature.index("dummy_run")

    def site_of(call: Call) -> str | None:
        is_dummy = call.kwargs.get("dummy_run", len(call.args) > place and call.args[place])
        return None if is_dummy or not call.result.numel() else "vllm-draft-block"

    return site_of
