"""Where SGLang decides for DFlash. Facts about its code, read from the wheels of 0.5.16 to 0.5.23; no torch here.

From 0.5.19 on the engine broadcasts the accept, the prefill and the memory gate itself. It leaves the draft, whose
tokens become output tokens, and simulated acceptance, which is drawn after the accept was broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specsync_core import BroadcastPoint, Call, EngineFacts, no_tensors

SPECULATIVE = "sglang.srt.speculative"
WORKER = f"{SPECULATIVE}.dflash_worker_v2"
UNSYNCED = ">=0.5.16,<0.5.19"
SYNCED = ">=0.5.19,<0.5.24"
KNOWN = ">=0.5.16,<0.5.24"


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The points of every known version; none for another engine or another algorithm."""
    if engine.engine != "sglang" or engine.algorithm not in (None, "dflash"):
        return ()
    found = (*_accepts(), *_start_up_and_prefill(), *_drafts(), *_selected_drafts(), *_simulated(), _synced())
    return found if engine.dp_attention is False else (*found, _memory_gate_of_a_lone_rank())


def _accepts() -> Sequence[BroadcastPoint]:
    """Greedy accepts: what the pure function of the argmax gets. Sampling: what came out."""
    return [
        _point(
            "sglang.kernels.ops.speculative.dflash._compute_dflash_accept_bonus_triton_unchecked",
            "before",
            "dflash-accept-greedy",
            lambda call: (call.argument("target_top1", _TRITON_ACCEPT),),
            UNSYNCED,
            _TRITON_ACCEPT,
            proof="accept",
        ),
        _point(
            f"{SPECULATIVE}.dflash_utils.compute_dflash_correct_drafts_and_bonus",
            "before",
            "dflash-accept-greedy",
            lambda call: (call.kwargs["target_predict"],),
            UNSYNCED,
            ("candidates", "target_predict"),
            proof="accept",
        ),
        _point(
            f"{SPECULATIVE}.dflash_utils.compute_dflash_sampling_correct_drafts_and_bonus",
            "after",
            "dflash-accept-sample",
            _results,
            UNSYNCED,
            (
                *("candidates", "next_token_logits", "sampling_info", "max_top_k", "uniform_top_k_value"),
                *("threshold_single", "threshold_acc", "uniform_samples"),
                *("uniform_samples_for_final_sampling", "use_sparse_topk"),
            ),
            proof="accept",
        ),
    ]


_TRITON_ACCEPT = (
    *("candidates", "target_top1", "accept_lens_out", "commit_lens_out", "bonus_ids_out"),
    *("out_tokens_out", "prefix_lens", "new_seq_lens_out"),
)


def _start_up_and_prefill() -> Sequence[BroadcastPoint]:
    return [
        replace(
            _point(
                "sglang.srt.utils.common.get_available_gpu_memory",
                "after",
                "dflash-mem",
                no_tensors,
                UNSYNCED,
                ("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
            ),
            op="min",
            # Elsewhere the engine reads it for its log, on some ranks only.
            callers=(WORKER,),
        ),
        _point(
            "sglang.srt.layers.sampler.Sampler.forward",
            "after",
            "dflash-target",
            _result,
            UNSYNCED,
            (
                *("self", "logits_output", "sampling_info", "return_logprob"),
                *("top_logprobs_nums", "token_ids_logprobs", "positions"),
            ),
            proof="target",
        ),
    ]


def _memory_gate_of_a_lone_rank() -> BroadcastPoint:
    """The engine turns every site off where an attention group has one rank, the memory gate too (SG #39886)."""
    point = _point(
        f"{SPECULATIVE}.spec_tp_sync.SpecTpSync.available_memory_gb",
        "after",
        "dflash-mem",
        no_tensors,
        SYNCED,
        ("self", "site", "device", "gpu_id", "group"),
    )
    return replace(point, op="min", site_of=lambda call: "dflash-mem" if _is_left_to_each_rank(call) else None)


def _is_left_to_each_rank(call: Call) -> bool:
    """Whether the engine's own broadcast group has one rank, where several capture together."""
    return bool(call.args[0]._tp_group.world_size == 1 and call.kwargs["group"].world_size > 1)


def _drafts() -> Sequence[BroadcastPoint]:
    """The greedy block: one argmax per position, eager or folded into the draft graph (SG #40246)."""
    head = ("self", "hidden_states", "lm_head", "chunk_size")
    eager = f"{WORKER}.DFlashWorkerV2._greedy_sample_from"
    rollout = (
        *("draft_hidden", "bonus_tokens", "target_embedding", "lm_head_weight", "prefix_gru", "embed_proj"),
        *("vocab_size", "shift_label", "candidate_pool_size", "tp_group", "lm_head_org_vocab_start"),
        *("lm_head_num_org", "lm_head_num_org_padded"),
    )
    draft = "dflash-draft-greedy"
    folded = replace(
        _point(
            f"{WORKER}._DflashDraftSampler.__call__",
            "after",
            draft,
            _folded_block,
            UNSYNCED,
            ("self", "hidden_states", "input_ids"),
            proof="draft",
        ),
        capture="engine-communicator",
    )
    vocabulary_parallel = _point(f"{eager}_vocab_parallel_head", "after", draft, _block, UNSYNCED, head, proof="draft")
    domino = replace(
        _point(f"{SPECULATIVE}.domino_utils.domino_greedy_rollout", "after", draft, _result, "", rollout),
        capture="engine-communicator",
    )
    return [
        folded,
        replace(folded, versions=SYNCED, proof=None),  # other kinds of draft came in, so none is sure to run
        vocabulary_parallel,
        replace(vocabulary_parallel, versions=SYNCED, proof=None),
        _point(f"{eager}_quantized_head", "after", draft, _block, ">=0.5.18,<0.5.24", head),
        replace(domino, versions=">=0.5.20,<0.5.22", signature=(*rollout, "prefer_tp_candidate_pool")),
        replace(domino, versions=">=0.5.22,<0.5.24", signature=(*rollout, "in_cuda_graph")),
    ]


def _block(call: Call) -> Sequence[Any]:
    """The drafted tokens, as the worker reshapes them: the block's first position is the anchor."""
    return (call.result.view(-1, int(call.args[0].block_size) - 1),)


def _folded_block(call: Call) -> Sequence[Any]:
    sampler = call.args[0]
    hidden_states = call.argument("hidden_states", ("self", "hidden_states", "input_ids"))
    batch, drafted = hidden_states.shape[0] // sampler.block_size, sampler.block_size - 1
    return (sampler.out[: batch * drafted].view(batch, drafted),)


def _selected_drafts() -> Sequence[BroadcastPoint]:
    """Drafts that a head chooses among candidates, with uniforms from the rank's own generator."""
    selector = "dflash-draft-selector"
    lattice = (
        *("self", "token_embeddings", "candidate_tokens", "candidate_log_probs", "pass_hidden", "anchor_hidden"),
        *("anchor_valid", "uniforms", "temperatures", "greedy_mask", "already_projected"),
    )
    return [
        replace(point, capture="engine-communicator", only_if_imported=True)
        for point in (
            _point(
                "sglang.srt.models.dflash.CandidateSelector.sample_path",
                "after",
                selector,
                _first_result,
                SYNCED,
                ("self", "candidate_ids", "scores", "uniforms", "temperatures", "greedy_mask"),
            ),
            _point(
                "sglang.srt.models.lilicorr.LiLiCorrHead.select_with_proposal",
                "after",
                selector,
                _first_result,
                ">=0.5.21,<0.5.24",
                lattice,
            ),
        )
    ]


def _simulated() -> Sequence[BroadcastPoint]:
    """Forced acceptance lengths, drawn from a generator of each rank's own and written in place after the accept."""
    known = (
        *("candidates", "target_predict", "accept_len", "commit_lens", "bonus", "out_tokens"),
        *("simulate_acc_len", "simulate_acc_method", "simulate_acc_token_mode"),
    )
    point = _point(
        f"{SPECULATIVE}.dflash_utils.apply_dflash_simulated_acceptance",
        "after",
        "dflash-accept-simulated",
        lambda call: tuple(call.kwargs[name] for name in ("accept_len", "bonus", "commit_lens", "out_tokens")),
        ">=0.5.17,<0.5.22",
        (*known, "fixed_token_id"),
    )
    return [
        point,
        replace(point, versions=">=0.5.22,<0.5.24", signature=(*known, "next_token_logits", "fixed_token_id")),
    ]


def _synced() -> BroadcastPoint:
    return replace(
        _point(
            f"{SPECULATIVE}.spec_tp_sync.SpecTpSync.sync", "engine", "", no_tensors, SYNCED, ("self", "site", "values")
        ),
        sites=("dflash-mem", "dflash-selector", "dflash-accept-sample", "dflash-accept-greedy", "dflash-target"),
    )


def _point(
    target: str,
    when: Any,
    site: str,
    tensors_of: Any,
    versions: str,
    signature: tuple[str, ...],
    proof: str | None = None,
) -> BroadcastPoint:
    """A point of one site, to which every call belongs."""
    return BroadcastPoint(
        target=target,
        when=when,
        sites=(site,),
        site_of=lambda _: site,
        tensors_of=tensors_of,
        versions=versions,
        signature=signature,
        proof=proof,
    )


def _result(call: Call) -> Sequence[Any]:
    return (call.result,)


def _first_result(call: Call) -> Sequence[Any]:
    return (call.result[0],)


def _results(call: Call) -> Sequence[Any]:
    results: Sequence[Any] = call.result
    return results
