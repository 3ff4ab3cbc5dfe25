"""Where SGLang decides for DSpark. Facts about its code, read from the wheels of 0.5.16 to 0.5.23; no torch here.

From 0.5.19 on the engine broadcasts these sites itself; what is left there is the clock that decides about the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specsync_core import BroadcastPoint, Call, EngineFacts, Facts, Scope, no_tensors

PARTS = "sglang.srt.speculative.dspark_components"
UNSYNCED = ">=0.5.16,<0.5.19"
SYNCED = ">=0.5.19,<0.5.24"
KNOWN = ">=0.5.16,<0.5.24"

DRAWS = ("dspark-draft-greedy", "dspark-draft-sample", "dspark-draft-multinomial")
GRAPH_DRAWS = ("dspark-graph-sample", "dspark-graph-greedy")
ACCEPTS = ("dspark-accept-greedy", "dspark-accept-sample")
SAMPLE_BLOCK = ("self", "base_logits", "first_prev_tokens", "hidden_states", "sampler")
ACCEPT_GREEDY = ("candidates", "target_logits", "verify_num_draft_tokens", "cutoff_verify_lens")
SAMPLER = (
    *("self", "logits_output", "sampling_info", "return_logprob"),
    *("top_logprobs_nums", "token_ids_logprobs", "positions"),
)


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The points of every known version; none for another engine or another algorithm."""
    if engine.engine != "sglang" or engine.algorithm not in (None, "dspark"):
        return ()
    accepts = (*_accepts(), *_accepts_in_graph(), _simulated_accept())
    found = (*_drafts(), *accepts, *_start_up_and_prefill(), *_plan(), _synced_by_the_engine())
    return found if engine.dp_attention is False else (*found, _memory_gate_of_a_lone_rank())


def policy(facts: Facts) -> str | None:
    """MiniMax-M3's draft and accept logits come out of an all-gather, equal on every rank: only draws can differ.

    The engine's own override says so for its later releases.
    """
    is_dspark = isinstance(facts, EngineFacts) and facts.engine == "sglang" and facts.algorithm == "dspark"
    return "rng" if is_dspark and facts.model and "minimax-m3" in facts.model.lower() else None


def _drafts() -> Sequence[BroadcastPoint]:
    """Each draw, before the next step's logits are formed from it: the callback that every Markov head calls."""
    eager = Scope(
        target=f"{PARTS}.dspark_draft.sample_draft_block",
        value_of=_eager_draw,
        signature=("base_logits", "anchor_tokens", "draft_hidden", "sampling_info", "markov_head", "device"),
    )
    # Folded into the draft graph; 0.5.16 folds only the greedy head, in another module.
    folded = Scope(f"{PARTS}.dspark_draft_sampler.DsparkDraftSampler.__call__", _folded_draw, _HIDDEN_AND_IDS)
    greedy = Scope(f"{PARTS}.dspark_draft.DsparkDraftSampler.__call__", _folded_draw, _HIDDEN_AND_IDS)
    heads = ("dspark.VanillaMarkov", "dspark.RNNHead", "deepseek_v4_dspark.DSparkV4MarkovHead")
    point = BroadcastPoint(
        target="",
        when="callback",
        callback="sampler",
        sites=(*DRAWS, *GRAPH_DRAWS),
        site_of=_scope,
        tensors_of=_result,
        versions="",
        signature=SAMPLE_BLOCK,
        capture="engine-communicator",
        only_if_imported=True,
        proof="draft",
    )
    return [
        replace(point, target=f"sglang.srt.models.{head}.sample_block", versions=versions, within=(eager, graph))
        for head in heads
        for versions, graph in (("==0.5.16", greedy), (">=0.5.17,<0.5.19", folded))
    ]


_HIDDEN_AND_IDS = ("self", "hidden_states", "input_ids")


def _eager_draw(call: Call) -> str:
    from sglang.srt.environ import envs

    info = call.kwargs["sampling_info"]
    if info is None or info.is_all_greedy:
        return "dspark-draft-greedy"
    return "dspark-draft-sample" if envs.SGLANG_DSPARK_FAST_SAMPLING.get() else "dspark-draft-multinomial"


def _folded_draw(call: Call) -> str:
    return "dspark-graph-sample" if getattr(call.args[0], "folded_sampling", False) else "dspark-graph-greedy"


def _accepts() -> Sequence[BroadcastPoint]:
    return [
        BroadcastPoint(
            target=f"{PARTS}.dspark_verify.accept_draft_tokens",
            when="after",
            sites=ACCEPTS,
            site_of=_eager_accept,
            tensors_of=_results,
            versions=UNSYNCED,
            signature=(
                *("candidates", "target_logits", "draft_block", "sampling_info", "draft_input"),
                *("gamma", "verify_num_draft_tokens", "cutoff_layout"),
            ),
            proof="accept",
        )
    ]


def _simulated_accept() -> BroadcastPoint:
    """0.5.18 draws the forced length after the accept, from each rank's own generator; what came before agrees already.

    Earlier releases force the same length on every rank, later ones broadcast after it.
    """
    return BroadcastPoint(
        target=f"{PARTS}.dspark_verify.TargetVerifyExecutor._simulated_correct_len",
        when="after",
        sites=("dspark-accept-simulated",),
        site_of=lambda _: "dspark-accept-simulated",
        tensors_of=lambda call: (call.result, call.result.clone(), call.result.clone()),  # the last two are not read
        versions="==0.5.18",
        signature=("self", "bs", "dtype", "device"),
    )


def _eager_accept(call: Call) -> str:
    info = call.kwargs["sampling_info"]
    return ACCEPTS[0] if info is None or info.is_all_greedy else ACCEPTS[1]


def _accepts_in_graph() -> Sequence[BroadcastPoint]:
    """The epilogue that the verify graph holds. The eager greedy accept calls the same function, without the scope."""
    epilogue = Scope(
        target=f"{PARTS}.dspark_verify.DsparkVerifyEpilogue._accept",
        value_of=lambda _: "dspark-accept-graph",
        signature=("self", "input_ids", "seq_lens", "verify_lens", "bs"),
    )
    point = BroadcastPoint(
        target="",
        when="after",
        sites=("dspark-accept-graph",),
        site_of=_scope,
        tensors_of=_results,
        versions="",
        signature=ACCEPT_GREEDY,
        capture="engine-communicator",
        within=(epilogue,),
        proof="accept",
    )
    kernels = {
        "==0.5.16": f"{PARTS}.kernels.dspark_accept",
        ">=0.5.17,<0.5.19": "sglang.kernels.ops.speculative.dspark.dspark_accept",
    }
    return [
        replace(point, target=f"{module}.accept_greedy_triton", versions=versions)
        for versions, module in kernels.items()
    ]


def _start_up_and_prefill() -> Sequence[BroadcastPoint]:
    return [
        BroadcastPoint(
            target="sglang.srt.utils.common.get_available_gpu_memory",
            when="after",
            sites=("dspark-mem",),
            site_of=lambda _: "dspark-mem",
            tensors_of=no_tensors,
            versions=UNSYNCED,
            signature=("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
            op="min",
            # Elsewhere the engine reads it for its log, on some ranks only.
            callers=(f"{PARTS}.dspark_worker_v2", f"{PARTS}.dspark_draft_sampler"),
        ),
        BroadcastPoint(
            target="sglang.srt.layers.sampler.Sampler.forward",
            when="after",
            sites=("dspark-target",),
            site_of=lambda _: "dspark-target",
            tensors_of=_result,
            versions=UNSYNCED,
            signature=SAMPLER,
            proof="target",
        ),
    ]


def _memory_gate_of_a_lone_rank() -> BroadcastPoint:
    """The engine turns every site off where an attention group has one rank, the memory gate too (SG #39886).

    But the gate decides about graphs that the whole capture group takes part in.
    """
    return BroadcastPoint(
        target="sglang.srt.speculative.spec_tp_sync.SpecTpSync.available_memory_gb",
        when="after",
        sites=("dspark-mem",),
        site_of=lambda call: "dspark-mem" if _is_left_to_each_rank(call) else None,
        tensors_of=no_tensors,
        versions=SYNCED,
        signature=("self", "site", "device", "gpu_id", "group"),
        op="min",
    )


def _is_left_to_each_rank(call: Call) -> bool:
    """Whether the engine's own broadcast group has one rank, where several capture together."""
    return bool(call.args[0]._tp_group.world_size == 1 and call.kwargs["group"].world_size > 1)


def _plan() -> Sequence[BroadcastPoint]:
    """The engine broadcasts the plan itself, but a rank whose confidences are late makes none, by its own clock."""
    return [
        BroadcastPoint(
            target=f"{PARTS}.dspark_planner.DSparkVerifyPlanner._schedule_verify_lens",
            when="engine",
            sites=("dspark-plan",),
            site_of=lambda _: "dspark-plan",
            tensors_of=no_tensors,
            versions=KNOWN,
            signature=("self", "req_pool_indices", "prefix_lens", "device", "confidence", "budget"),
        ),
        BroadcastPoint(
            target="sglang.srt.managers.overlap_utils.ConfidenceRelay.resolve",
            when="before",
            sites=("dspark-plan",),
            site_of=lambda _: "dspark-plan",
            tensors_of=no_tensors,
            versions=KNOWN,
            signature=("self", "batch", "stream", "publish_ready"),
            wait_for=_wait_for_confidences,
        ),
    ]


def _wait_for_confidences(call: Call) -> None:
    """Wait for the copy whose event `resolve` only queries: an event that is late on one rank changes its path."""
    from sglang.srt.managers.overlap_utils import CONFIDENCE_RELAY_RING_DEPTH, CONFIDENCE_RELAY_RING_LAG

    relay: Any = call.args[0]
    if relay.copy_done is not None and relay.ring_pos >= CONFIDENCE_RELAY_RING_LAG:
        relay.copy_done[(relay.ring_pos - CONFIDENCE_RELAY_RING_LAG) % CONFIDENCE_RELAY_RING_DEPTH].synchronize()


def _synced_by_the_engine() -> BroadcastPoint:
    return BroadcastPoint(
        target="sglang.srt.speculative.spec_tp_sync.SpecTpSync.sync",
        when="engine",
        sites=(
            *("dspark-mem", *DRAWS, *GRAPH_DRAWS, *ACCEPTS, "dspark-accept-graph"),
            *("dspark-accept-simulated", "dspark-target"),
        ),
        site_of=lambda _: None,
        tensors_of=no_tensors,
        versions=SYNCED,
        signature=("self", "site", "values"),
    )


def _scope(call: Call) -> str | None:
    return call.scope


def _result(call: Call) -> Sequence[Any]:
    return (call.result,)


def _results(call: Call) -> Sequence[Any]:
    results: Sequence[Any] = call.result
    return results
