"""Where vLLM's model runners decide. Facts about its code, read from 0.24.0 to 0.32.0; no torch here.

The V1 runner marks rejected drafts by -1 in one tensor; the V2 runner returns counts beside it. Every state that the
next step is made from (positions, sequence lengths, the tokens of other requests in the batch) follows from these.
The number of KV-cache blocks is no point: the engine takes the smallest of all ranks by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specsync_core import BroadcastPoint, Call, EngineFacts, no_tensors

KNOWN = ">=0.24,<0.33"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification.AdaptiveVerificationManager"

METHODS = frozenset(
    (
        *("ngram", "ngram_gpu", "suffix", "draft_model", "medusa"),
        *("eagle", "eagle3", "mtp", "dflash", "dspark"),
    )
)
"""The values of ``speculative_config.method`` whose drafts are known; any other is refused."""


def points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The points of both runners; none for another engine or a method that is not known."""
    if engine.engine != "vllm" or (engine.algorithm is not None and engine.algorithm not in METHODS):
        return ()
    found = [_tokens(), _gate(), _verdict(), _seed()]
    if engine.algorithm in (None, "ngram_gpu"):
        found.append(_trimmed_counts())
    if engine.algorithm in (None, "dspark"):
        found += [_confidence(), _adaptive_count()]
    return found


def _tokens() -> BroadcastPoint:
    return BroadcastPoint(
        target=f"{V1_RUNNER}.GPUModelRunner._sample",
        when="after",
        sites=("vllm-tokens",),
        site_of=lambda call: "vllm-tokens" if call.result.sampled_token_ids.numel() else None,
        tensors_of=lambda call: (call.result.sampled_token_ids,),
        versions=KNOWN,
        signature=("self", "logits", "spec_decode_metadata"),
        only_if_imported=True,
        proof="verdict",
    )


def _verdict() -> BroadcastPoint:
    return BroadcastPoint(
        target=f"{V2_RUNNER}.GPUModelRunner.sample",
        when="after",
        sites=("vllm-verdict",),
        site_of=lambda call: "vllm-verdict" if call.result[1].numel() else None,
        tensors_of=_written,
        versions=KNOWN,
        signature=("self", "hidden_states", "input_batch", "grammar_output"),
        only_if_imported=True,
        proof="verdict",
    )


def _written(call: Call) -> Sequence[Any]:
    """The triple. Nothing was written behind the tokens that count: zeros there, or chance passes for divergence."""
    import torch

    output, num_sampled, num_rejected = call.result
    tokens = output.sampled_token_ids
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    tokens.masked_fill_(columns >= num_sampled.unsqueeze(1), 0)
    return tokens, num_sampled, num_rejected


def _gate() -> BroadcastPoint:
    """A rank whose drafter stays out leaves the others alone in its all-reduce: the one that hangs at once."""
    return BroadcastPoint(
        target=f"{V1_RUNNER}.GPUModelRunner._input_fits_in_drafter",
        when="after",
        sites=("vllm-drafter-gate",),
        site_of=lambda _: "vllm-drafter-gate",
        tensors_of=no_tensors,
        versions=KNOWN,
        signature=("self", "common_attn_metadata"),
        only_if_imported=True,
        op="all",
        proof="gate",
    )


def _seed() -> BroadcastPoint:
    known = ("self", "req_idx", "sampling_params")

    def seed(call: Call) -> Sequence[Any]:
        """The request's seed, as a tensor on the memory that the engine copies to its device later."""
        import torch

        states, index = call.argument("self", known), call.argument("req_idx", known)
        return (torch.from_numpy(states.seeds.np)[index : index + 1],)

    return BroadcastPoint(
        target="vllm.v1.worker.gpu.sample.states.SamplingStates.add_request",
        when="after",
        sites=("vllm-seed",),
        # A seed that the request brings is the same on every rank.
        site_of=lambda call: "vllm-seed" if call.argument("sampling_params", known).seed is None else None,
        tensors_of=seed,
        versions=KNOWN,
        signature=known,
        only_if_imported=True,
    )


def _trimmed_counts() -> BroadcastPoint:
    """How many drafts of each request are valid, before the scheduler's output is cut to that."""
    known = ("num_valid_draft_tokens_event", "num_valid_draft_tokens_cpu", "scheduler_output", "req_id_to_index")

    def indices(call: Call) -> list[int]:
        requests = call.argument("scheduler_output", known).scheduled_cached_reqs.req_ids
        of = call.argument("req_id_to_index", known)
        return [of[request] for request in requests if request in of]

    def value_of(call: Call) -> list[int]:
        call.argument("num_valid_draft_tokens_event", known).synchronize()  # the copy to the host may be on its way
        counts = call.argument("num_valid_draft_tokens_cpu", known)
        return [int(counts[index]) for index in indices(call)]

    def put(call: Call, agreed: Sequence[int]) -> None:
        counts = call.argument("num_valid_draft_tokens_cpu", known)
        for index, count in zip(indices(call), agreed, strict=True):
            counts[index] = count

    return BroadcastPoint(
        target=f"{V1_RUNNER}.update_scheduler_for_invalid_drafts",
        when="before",
        sites=("vllm-token-count",),
        site_of=lambda _: "vllm-token-count",
        tensors_of=no_tensors,
        versions=KNOWN,
        signature=known,
        only_if_imported=True,
        op="root",
        value_of=value_of,
        put=put,
    )


def _confidence() -> BroadcastPoint:
    known = ("self", "confidence_probs", "input_batch")

    def confidences(call: Call) -> Sequence[Any]:
        return (call.argument("confidence_probs", known)[: call.argument("input_batch", known).num_reqs],)

    return BroadcastPoint(
        target=f"{ADAPTIVE}.record_confidences",
        when="before",
        sites=("vllm-confidence",),
        site_of=lambda call: "vllm-confidence" if call.argument("input_batch", known).num_reqs else None,
        tensors_of=confidences,
        versions=">=0.28,<0.33",
        signature=known,
        only_if_imported=True,
    )


def _adaptive_count() -> BroadcastPoint:
    """The chosen budget; the manager keeps it aside for the cut that follows in the same step."""

    def put(call: Call, agreed: Sequence[int]) -> None:
        manager = call.args[0]
        drafts, others, _ = manager._batch_budget
        manager._batch_budget = drafts, others, agreed - sum(others.values())  # type: ignore[operator]

    return BroadcastPoint(
        target=f"{ADAPTIVE}.get_num_tokens",
        when="after",
        sites=("vllm-token-count",),
        site_of=lambda _: "vllm-token-count",
        tensors_of=no_tensors,
        versions=">=0.28,<0.33",
        signature=("self", "num_tokens_per_req", "draft_tokens"),
        only_if_imported=True,
        op="root",
        value_of=lambda call: call.result,
        put=put,
    )
