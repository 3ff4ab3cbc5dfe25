"""Drafts of vLLM that belong to no algorithm plugin. Facts about its code, read from 0.24.0 to 0.32.0; no torch here.

A draft model is sharded, so each of its steps is synchronised: the draft KV of a step comes from the tokens of the
one before. What the host looks up is either looked up by group rank 0 alone, or by every rank and then replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specsync_core import BroadcastPoint, EngineFacts, no_tensors, vllm_draft_steps

KNOWN = ">=0.24,<0.33"
PROPOSERS = "vllm.v1.spec_decode"
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The points of both runners; none for another engine or another method."""
    if engine.engine != "vllm":
        return ()
    found = {
        "ngram": [*_looked_up("ngram_proposer.NgramProposer", _NGRAM), _ngram_v2()],
        "suffix": _looked_up("suffix_decoding.SuffixDecodingProposer", _SUFFIX),
        "ngram_gpu": [_ngram_gpu(), _ngram_v2()],
        "medusa": [_medusa()],
        "draft_model": vllm_draft_steps(),
    }
    return [point for method, of_it in found.items() if engine.algorithm in (None, method) for point in of_it]


_NGRAM = ("self", "num_speculative_tokens", "sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu", "slot_mappings")
_SUFFIX = ("self", "num_speculative_tokens", "input_batch", "sampled_token_ids", "slot_mappings")


def _looked_up(name: str, signature: tuple[str, ...]) -> list[BroadcastPoint]:
    led = BroadcastPoint(
        target=f"{PROPOSERS}.{name}.propose",
        when="after",
        sites=("vllm-draft-lead",),
        site_of=lambda _: "vllm-draft-lead",
        tensors_of=no_tensors,
        versions=KNOWN,
        signature=signature,
        only_if_imported=True,
        rows=True,
        leads=True,
        proof="draft",
    )
    rows = replace(
        led,
        sites=("vllm-draft-rows",),
        site_of=lambda _: "vllm-draft-rows",
        leads=False,
        unless="vllm-draft-lead",
    )
    return [led, rows]


def _ngram_gpu() -> BroadcastPoint:
    """V1: the drafts, and how many of each row are valid."""
    return BroadcastPoint(
        target=f"{PROPOSERS}.ngram_proposer_gpu.NgramProposerGPU.propose",
        when="after",
        sites=("vllm-draft-block",),
        site_of=lambda _: "vllm-draft-block",
        tensors_of=lambda call: call.result,
        versions=KNOWN,
        signature=(
            *("self", "num_speculative_tokens", "num_tokens_no_spec", "token_ids_gpu"),
            *("valid_sampled_token_ids_gpu", "valid_sampled_tokens_count"),
        ),
        only_if_imported=True,
        proof="draft",
    )


def _medusa() -> BroadcastPoint:
    return BroadcastPoint(
        target=f"{PROPOSERS}.medusa.MedusaProposer.propose",
        when="after",
        sites=("vllm-draft-block",),
        site_of=lambda call: "vllm-draft-block" if call.result.numel() else None,
        tensors_of=lambda call: (call.result,),
        versions=KNOWN,
        signature=("self", "num_speculative_tokens", "target_hidden_states", "sampling_metadata", "slot_mappings"),
        only_if_imported=True,
        proof="draft",
    )


def _ngram_v2() -> BroadcastPoint:
    known = (
        *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
        *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
        *("dp_sync_state", "dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens"),
    )
    return BroadcastPoint(
        target=f"{SPECULATORS}.ngram.speculator.NgramGPUSpeculator.propose",
        when="after",
        sites=("vllm-draft-block",),
        site_of=lambda call: None if call.kwargs.get("dummy_run") else "vllm-draft-block",
        tensors_of=lambda call: (call.result,),
        versions="==0.32.0",
        signature=known,
        only_if_imported=True,
        proof="draft",
    )
