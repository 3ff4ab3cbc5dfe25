"""SGLang 0.5.23, which has the published fix: what it leaves to each rank, and what it broadcasts itself."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from case import (
    B,
    Case,
    G,
    S,
    V,
    create_worker,
    measure_memory,
    resolve_confidences,
    sample_first_tokens,
    sampling_info,
)
from drafting import draft_steps
from scenarios_unsynced import ngram_scenario

CANDIDATES = 4
"""Of which the selector chooses, per position."""


def dspark(case: Case) -> None:
    create_worker("DSPARK")
    resolve_confidences(case)
    measure_memory(case, "DSPARK_MEM")


def dflash(case: Case) -> None:
    from sglang.srt.models import dflash  # noqa: F401 - the model registry has imported it

    worker = dflash_worker(create_worker("DFLASH"))
    for name, length in (("accept, greedy", -1.0), ("accept, greedy, simulated acceptance", 2.5)):
        simulate(length)
        case.shift_generator()
        verdicts = [accept_block(case, worker, case.candidates_BS, None) for _ in range(4)]
        case.record(name, *(tensor.tolist() for verdict in verdicts for tensor in verdict))
    simulate(-1.0)
    selected_block(case, worker)
    measure_memory(case, "DFLASH_MEM")


def simulate(length: float) -> None:
    from sglang.srt.speculative import dflash_worker_v2, spec_utils

    spec_utils.SIMULATE_ACC_LEN = dflash_worker_v2.SIMULATE_ACC_LEN = length


def dflash_worker(worker_class: type) -> object:
    from sglang.srt.layers.dp_attention import get_dp_tp_group
    from sglang.srt.speculative.spec_tp_sync import SpecTpSync

    worker = object.__new__(worker_class)
    worker.__dict__.update(
        _target_worker=None,
        _tp_sync=SpecTpSync(get_dp_tp_group()),
        _selector_sample=None,
        block_size=S,
        _use_triton_accept_bonus=True,
        _accept_bonus_buffer_cap=0,
        _accept_bonus_buffer_slot=0,
        _accept_len_buf=None,
        device="cpu",
        _draft_probs_buf=None,
        _block_verification=False,
    )
    return worker


def accept_block(case: Case, worker: object, candidates_BS: torch.Tensor, info: object) -> tuple[torch.Tensor, ...]:
    return worker._accept_block(
        candidates=candidates_BS,
        next_token_logits=case.target_BSV.reshape(-1, V).clone(),
        sampling_info=info,
        draft_input=SimpleNamespace(max_top_k=None, uniform_top_k_value=None),
        prefix_lens=case.seq_lens_B,
        bs=B,
    )[:4]  # accepted and committed lengths, bonus, output tokens; the engine keeps them in buffers of its own


def selected_block(case: Case, worker: object) -> None:
    """The selector's draws, and an accept that the engine broadcasts: its output tokens hold the draft all the same."""
    from sglang.srt.models.dflash import CandidateSelector

    selector = object.__new__(CandidateSelector)
    torch.nn.Module.__init__(selector)
    selector.top_k = CANDIDATES
    shared = torch.Generator().manual_seed(9)
    candidate_ids = torch.randint(0, V, (B, G, CANDIDATES), generator=shared)
    case.shift_generator()
    tokens, rows = selector.sample_path(
        candidate_ids=candidate_ids,
        scores=torch.randn(B, G, CANDIDATES, CANDIDATES, generator=shared),
        uniforms=torch.rand(B, G),
        temperatures=torch.ones(B),
        greedy_mask=torch.zeros(B, dtype=torch.bool),
    )
    case.record("draft, chosen by the selector", tokens)
    worker._selector_sample = (candidate_ids, rows)
    candidates_BS = torch.cat([case.anchor_B[:, None], tokens.view(B, G)], 1)
    accepted = accept_block(case, worker, candidates_BS, sampling_info(greedy_rows="none"))
    case.record("accept of the selector's block, with its output tokens", *accepted)


def eagle(case: Case) -> None:
    create_worker("EAGLE")
    draft_steps(case)
    draft_tree(case)
    verify_chain(case)
    sample_first_tokens(case)


def draft_tree(case: Case) -> None:
    from sglang.srt.speculative import eagle_utils

    def build(bonus_tokens, parent_list, top_scores_index, draft_tokens, *arguments, **options):
        case.record("draft tree", parent_list, top_scores_index, draft_tokens)

    built = eagle_utils.build_tree_kernel_efficient
    eagle_utils.build_tree_kernel_efficient_func = lambda *arguments, **options: None
    torch.manual_seed(11 + case.rank)
    parents, scores = torch.randint(0, 4, (B, 3)), torch.randint(0, 8, (B, G))
    drafted = torch.randint(0, V, (B, G))
    built(case.anchor_B, parents, scores, drafted, case.seq_lens_B, int(case.seq_lens_B.sum()), 2, 3, S)
    build(None, parents, scores, drafted)


def verify_chain(case: Case) -> None:
    """EAGLE, MTP, STANDALONE and NGRAM: the greedy verdict and simulated acceptance, of a chain of drafts."""
    from sglang.kernels.ops.speculative import spec_tree
    from sglang.srt.speculative import eagle_utils, spec_utils

    names = (
        *("predicts", "accept_index", "accept_token_num", "candidates"),
        *("retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "target_predict"),
    )

    def verify_greedy(**given):  # the Triton kernel that ships with the engine, in the interpreter
        spec_tree.verify_tree_greedy_triton(*(given[name] for name in names))
        return given["predicts"], given["accept_index"], given["accept_token_num"]

    eagle_utils.verify_tree_greedy_func = verify_greedy
    eagle_utils.get_spec = lambda: SimpleNamespace(
        speculative_use_rejection_sampling=False, speculative_use_block_verification=False
    )
    next_token_BS = torch.arange(1, S + 1).repeat(B, 1)
    next_token_BS[:, -1] = -1
    verify_input = SimpleNamespace(
        draft_token=case.candidates_BS.reshape(-1),
        draft_token_num=S,
        max_tree_depth=S,
        retrieve_index=torch.arange(B * S).view(B, S),
        retrieve_next_token=next_token_BS,
        retrieve_next_sibling=torch.full((B, S), -1),
        tree_topk=1,
        draft_probs=None,
    )
    batch = SimpleNamespace(
        device="cpu",
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=case.seq_lens_B,
        sampling_info=sampling_info(greedy_rows="all"),
        return_logprob=False,
    )
    for name, length in (("verify, greedy", -1.0), ("verify, simulated acceptance", 2.5)):
        spec_utils.SIMULATE_ACC_LEN = length
        case.shift_generator()
        logits = case.target_BSV.reshape(-1, V)
        verdicts = [
            eagle_utils.eagle_sample(verify_input, batch, SimpleNamespace(next_token_logits=logits.clone()))
            for _ in range(4)
        ]
        case.record(name, *(tensor for verdict in verdicts for tensor in verdict))
    spec_utils.SIMULATE_ACC_LEN = -1.0


def ngram(case: Case) -> None:
    ngram_scenario(case)
