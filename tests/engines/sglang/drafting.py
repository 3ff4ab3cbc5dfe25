"""EAGLE's own draft loop over a draft model whose logits differ by rank: which tokens each step feeds to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from case import B, Case, V

STEPS = 3


def draft_steps(case: Case) -> None:
    """With a top-k of 2 the loop selects among a step's candidates; a chain of 1 has a path of its own on GPUs."""
    from sglang.srt.speculative import eagle_worker_v2

    eagle_worker_v2.get_spec = lambda: SimpleNamespace(speculative_use_rejection_sampling=False)
    for top_k in (2, 1):
        eagle_worker_v2._is_cuda = top_k == 1  # its kernel is a Triton one, which the interpreter runs
        model = DraftModel(case)
        worker = draft_worker(eagle_worker_v2.EagleDraftWorker, model, top_k)
        worker.draft_forward(batch(case, top_k))
        case.record(f"draft, what each step feeds, top-k {top_k}", *model.fed)
    eagle_worker_v2._is_cuda = False


class DraftModel:
    """The next token's logits are a function of the last token's id, and of the rank."""

    canary_manager = None
    model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Tiny"]), model_is_mrope=False)

    def __init__(self, case: Case) -> None:
        self.case = case
        self.fed: list[torch.Tensor] = []
        self.table_VV = torch.randn(V, V, generator=torch.Generator().manual_seed(21))

    def forward(self, batch: Any) -> Any:
        self.fed.append(batch.input_ids.clone())
        logits = self.table_VV[batch.input_ids] + self.case.noise(len(batch.input_ids), V)
        hidden = torch.zeros(len(batch.input_ids), 1)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden))


def draft_worker(worker_class: type, model: DraftModel, top_k: int) -> Any:
    worker = object.__new__(worker_class)
    worker.__dict__.update(
        topk=top_k,
        speculative_num_steps=STEPS,
        speculative_num_draft_tokens=top_k * STEPS,
        hot_token_id=None,
        index_share_for_mtp_iteration=False,
        seed_dsa_topk_from_draft_extend=False,
        draft_runner=model,
        draft_attn_backend=SimpleNamespace(attn_backends=[None] * STEPS),
        _topk1_parents_prealloc=torch.arange(-1, STEPS - 1).repeat(B if top_k == 1 else 0, 1),
        _topk1_score_indices_prealloc=torch.arange(STEPS).repeat(B, 1),
    )
    return worker


def batch(case: Case, top_k: int) -> Any:
    """A batch whose first candidates this rank chose itself, at the end of the step before."""
    shared_BV = torch.randn(B, V, generator=torch.Generator().manual_seed(22))
    topk_p, topk_index = (shared_BV + case.noise(B, V)).softmax(-1).topk(top_k)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        batch_size=B,
        moe_num_token_non_padded=None,
        positions=case.seq_lens_B.repeat_interleave(top_k),
        out_cache_loc=torch.arange(B * top_k * STEPS),
        sampling_info=SimpleNamespace(temperatures=torch.ones(B, 1), is_all_greedy=True),
        spec_info=SimpleNamespace(topk_p=topk_p, topk_index=topk_index, hidden_states=torch.zeros(B, 1)),
    )
