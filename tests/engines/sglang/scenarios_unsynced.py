"""SGLang 0.5.17, which synchronises next to nothing: its own decision functions on inputs that differ by rank."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch
from case import (
    B,
    Case,
    G,
    S,
    V,
    create_worker,
    resolve_confidences,
    sample_first_tokens,
    sampling_info,
    starve,
)
from drafting import draft_steps

RANK, HIDDEN = 8, 16
"""Of the Markov heads."""


def dspark(case: Case) -> None:
    from sglang.srt.models import deepseek_v4_dspark, dspark  # noqa: F401 - the model registry has imported both

    create_worker("DSPARK")
    heads = markov_heads()
    with torch.no_grad():
        draft_blocks(case, heads)
        folded_blocks(case, heads["vanilla"])
    accepts(case)
    accepts_in_graph(case)
    sample_first_tokens(case)
    dspark_memory_gates(case)
    resolve_confidences(case)


def markov_heads() -> dict[str, torch.nn.Module]:
    from sglang.srt.models.dspark import GatedMarkovHead, RNNHead, VanillaMarkov

    torch.manual_seed(1)
    return {
        "vanilla": VanillaMarkov(vocab_size=V, markov_rank=RANK),
        "gated": GatedMarkovHead(vocab_size=V, markov_rank=RANK, hidden_size=HIDDEN),
        "rnn": RNNHead(vocab_size=V, markov_rank=RANK, hidden_size=HIDDEN),
    }


def base_logits(case: Case) -> torch.Tensor:
    return torch.randn(B, G, V, generator=torch.Generator().manual_seed(2)) * 0.3 + case.noise(B, G, V, scale=0.5)


def draft_blocks(case: Case, heads: dict[str, torch.nn.Module]) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.speculative.dspark_components.dspark_draft import sample_draft_block

    hidden_BGH = torch.randn(B, G, HIDDEN, generator=torch.Generator().manual_seed(3))
    for head_name, head in heads.items():
        for draw in ("greedy", "sample", "multinomial"):
            case.shift_generator()
            with envs.SGLANG_DSPARK_FAST_SAMPLING.override(draw == "sample"):
                block = sample_draft_block(
                    base_logits=base_logits(case),
                    anchor_tokens=case.anchor_B,
                    draft_hidden=hidden_BGH,
                    sampling_info=None if draw == "greedy" else sampling_info(greedy_rows="none"),
                    markov_head=head,
                    device=torch.device("cpu"),
                )
            case.record(f"draft, {draw}, {head_name} head", block.draft_tokens)
            if head_name == "vanilla":
                prev_BG = torch.cat([case.anchor_B[:, None], block.draft_tokens[:, :-1]], 1)
                expected = base_logits(case) + head.compute_step_bias(prev_BG, None)
                assert torch.allclose(expected, block.corrected_logits), "logits were not formed from the agreed token"


def folded_blocks(case: Case, head: torch.nn.Module) -> None:
    """What the draft graph captures, run eagerly."""
    from sglang.srt.speculative.dspark_components.dspark_draft_sampler import DsparkDraftSampler

    model = SimpleNamespace(
        markov_head=head,
        lm_head=SimpleNamespace(org_vocab_size=V, weight=torch.zeros(V, HIDDEN)),
        compute_base_logits=lambda _: (base_logits(case).reshape(-1, V), None),
    )
    for folds_sampling in (True, False):
        sampler = DsparkDraftSampler(model=model, gamma=G, max_bs=B, device="cpu", folded_sampling=folds_sampling)
        sampler.stage_sampling_params(bs=B, sampling_info=sampling_info(greedy_rows="none"))
        case.shift_generator()
        ids_BG = torch.zeros(B, G, dtype=torch.long)
        ids_BG[:, 0] = case.anchor_B
        sampler(torch.zeros(B * G, HIDDEN), ids_BG.reshape(-1))
        case.record(f"draft in the graph, {'sample' if folds_sampling else 'greedy'}", sampler.out)


def accepts(case: Case) -> None:
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult
    from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor

    executor = object.__new__(TargetVerifyExecutor)
    executor.gamma, executor.verify_num_draft_tokens = G, S
    executor._simulate_acc_len, executor.verify_epilogue = 0.0, None
    capped = SimpleNamespace(verify_lens=torch.full((B,), G, dtype=torch.int32))
    paths = {
        "greedy": ("all", None),
        "greedy, capped": ("all", capped),
        "sample": ("none", None),
        "mixed": ("some", capped),
    }
    for name, (rows, layout) in paths.items():
        info = None if rows == "all" else sampling_info(greedy_rows=rows)
        block = DraftBlockResult(
            draft_tokens=case.draft_BG,
            corrected_logits=torch.randn(B, G, V, generator=torch.Generator().manual_seed(4)),
            temperatures=torch.ones(B),
            greedy_mask=torch.ones(B, dtype=torch.bool) if info is None else (info.top_ks <= 1).view(-1),
        )
        case.shift_generator()
        verdict = executor.accept_and_finalize(
            folded_accept=False,
            bs=B,
            verify_ids_2d=case.candidates_BS,
            target_logits=case.target_BSV.reshape(-1, V).clone(),
            draft_block=block,
            sampling_info=info,
            draft_input=SimpleNamespace(max_top_k=None, uniform_top_k_value=None),
            layout=layout,
            prefix_lens=case.seq_lens_B,
            draft_tokens=case.draft_BG,
        )
        case.record(f"accept, {name}", *finals(verdict))


def finals(verdict: object) -> list[torch.Tensor]:
    """What is derived from a verdict, and the verdict: all of it must agree."""
    names = ("correct_len", "bonus", "commit_lens", "new_seq_lens", "out_tokens")
    return [getattr(verdict, name) for name in names]


def accepts_in_graph(case: Case) -> None:
    """The epilogue that the verify graph captures, run eagerly."""
    from sglang.srt.speculative.dspark_components import dspark_verify

    def scatter(*, compact, verify_lens, out, stride, fill_value):  # the interpreter rejects a mask of the kernel
        out.fill_(fill_value)
        start = 0
        for request, length in enumerate(verify_lens.tolist()):
            out[request * stride : request * stride + length] = compact[start : start + length]
            start += length

    dspark_verify.scatter_compact_to_strided_into = scatter
    epilogue = dspark_verify.DsparkVerifyEpilogue(max_bs=B, verify_num_draft_tokens=S, device="cpu")
    epilogue.strided_logits = case.target_BSV.reshape(-1, V).clone()
    epilogue.draft_tokens_buf.copy_(case.draft_BG.reshape(-1))
    epilogue._accept(case.candidates_BS.reshape(-1), case.seq_lens_B, torch.full((B,), S), B)
    case.record("accept in the graph", *finals(epilogue.read_accept(B)))


def dspark_memory_gates(case: Case) -> None:
    from sglang.srt.speculative.dspark_components import dspark_draft_sampler, dspark_worker_v2

    captured: list[bool] = []
    worker = object.__new__(dspark_worker_v2.DSparkWorkerV2)
    worker.__dict__.update(
        _target_worker=None,
        _decode_graph_allowed=True,
        device="cpu",
        gpu_id=0,
        _draft_dp_context_enabled=False,
        draft_model_runner=SimpleNamespace(capture_tail_hooks=[]),
        _proposer=SimpleNamespace(attach_draft_sampler=lambda _: None),
        _draft_worker=SimpleNamespace(
            init_cuda_graphs=lambda capture_decode_cuda_graph: captured.append(capture_decode_cuda_graph)
        ),
        _maybe_build_draft_sampler=lambda: None,
    )
    dspark_worker_v2.is_cuda = lambda: True
    starve(case, 0.5)
    worker.init_cuda_graphs()
    case.record("capture the draft graph", captured[0])

    torch.cuda.current_device = lambda: 0
    starve(case, 1.0000001)  # enough to capture, too little for the buffers of sampling
    model = SimpleNamespace(lm_head=SimpleNamespace(org_vocab_size=V, weight=torch.zeros(1)))
    folds = dspark_draft_sampler._resolve_folded_sampling(
        model=model, gamma=G, max_bs=B, device="cpu", tp_rank=case.rank
    )
    case.record("fold sampling into the draft graph", folds)


def dflash(case: Case) -> None:
    create_worker("DFLASH")
    dflash_accepts(case)
    dflash_drafts(case)
    simulated_acceptance(case)
    sample_first_tokens(case)
    dflash_memory_gate(case)


def dflash_accepts(case: Case) -> None:
    from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton
    from sglang.srt.speculative import dflash_utils, dflash_worker_v2

    argmax_BS = case.target_BSV.argmax(-1)
    greedy = dflash_utils.compute_dflash_correct_drafts_and_bonus(
        candidates=case.candidates_BS, target_predict=argmax_BS.clone()
    )
    case.record("accept, greedy, torch", *greedy)
    outs = {
        "accept_lens_out": torch.empty(B, dtype=torch.int32),
        "commit_lens_out": torch.empty(B, dtype=torch.int32),
        "bonus_ids_out": torch.empty(B, dtype=torch.int64),
        "out_tokens_out": torch.empty(B, S, dtype=torch.int64),
        "new_seq_lens_out": torch.empty(B, dtype=torch.int64),
    }
    dflash_worker_v2._compute_dflash_accept_bonus_triton_unchecked(
        candidates=case.candidates_BS, target_top1=argmax_BS.clone(), prefix_lens=case.seq_lens_B, **outs
    )
    case.record("accept, greedy, triton", *outs.values())
    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = True
    dflash_utils.tree_speculative_sampling_target_only = chain_speculative_sampling_triton
    case.shift_generator()
    sampled = dflash_utils.compute_dflash_sampling_correct_drafts_and_bonus(
        candidates=case.candidates_BS,
        next_token_logits=case.target_BSV.reshape(-1, V).clone(),
        sampling_info=sampling_info(greedy_rows="none"),
        threshold_single=1.0,
        threshold_acc=1.0,
    )
    case.record("accept, sample", *sampled)


def dflash_drafts(case: Case) -> None:
    """The greedy block, on a rank whose hidden states are another's: eager, and as the draft graph captures it."""
    from sglang.srt.speculative import dflash_worker_v2

    weight_VH = torch.randn(V, HIDDEN, generator=torch.Generator().manual_seed(5))
    hidden = torch.randn(B * S, HIDDEN, generator=torch.Generator().manual_seed(6)) + case.noise(B * S, HIDDEN)
    sampler = dflash_worker_v2._DflashDraftSampler(
        weight=weight_VH, block_size=S, num_org=V, org_vocab_start=0, max_bs=B
    )
    sampler(hidden)
    case.record("draft in the graph, greedy", sampler.out)

    worker = object.__new__(dflash_worker_v2.DFlashWorkerV2)
    buffers = ("local_max_buf", "local_arg_buf")
    worker.__dict__.update(block_size=S, _draft_greedy_local_cap=0)
    worker.__dict__.update({f"_draft_greedy_{name}": None for name in buffers})
    dflash_worker_v2.get_tp_group = lambda: SimpleNamespace(world_size=1)
    shard = SimpleNamespace(
        num_org_elements=V,
        num_org_elements_padded=V,
        num_added_elements=0,
        org_vocab_start_index=0,
        added_vocab_start_index=V,
    )
    head = SimpleNamespace(weight=weight_VH, shard_indices=shard)
    tokens = worker._greedy_sample_from_vocab_parallel_head(hidden_states=hidden[: B * G], lm_head=head)
    case.record("draft, greedy", tokens)


def simulated_acceptance(case: Case) -> None:
    from sglang.srt.speculative.dflash_utils import apply_dflash_simulated_acceptance

    case.shift_generator()
    accept_len_B = torch.zeros(B, dtype=torch.int32)
    commit_lens_B, bonus_B = accept_len_B.clone(), torch.zeros(B, dtype=torch.int64)
    out_tokens_BS = torch.zeros(B, S, dtype=torch.int64)
    for _ in range(3):
        apply_dflash_simulated_acceptance(
            candidates=case.candidates_BS,
            target_predict=case.target_BSV.argmax(-1),
            accept_len=accept_len_B,
            commit_lens=commit_lens_B,
            bonus=bonus_B,
            out_tokens=out_tokens_BS,
            simulate_acc_len=2.5,
            simulate_acc_method="multinomial",
            simulate_acc_token_mode="real-draft-token",
        )
    case.record("simulated acceptance", accept_len_B, commit_lens_B, bonus_B, out_tokens_BS)


def dflash_memory_gate(case: Case) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.speculative import dflash_worker_v2

    captured: list[bool] = []
    worker = object.__new__(dflash_worker_v2.DFlashWorkerV2)
    worker.__dict__.update(
        _target_worker=None,
        device="cpu",
        gpu_id=0,
        draft_model_runner=SimpleNamespace(capture_tail_hooks=[]),
        _draft_worker=SimpleNamespace(
            init_cuda_graphs=lambda capture_decode_cuda_graph: captured.append(capture_decode_cuda_graph)
        ),
        _maybe_build_draft_sampler=lambda: None,
    )
    backend = f"not {Backend.DISABLED}"
    graphs = SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=backend)))
    )
    dflash_worker_v2.get_exec = lambda: graphs
    dflash_worker_v2.is_cuda = lambda: True
    starve(case, 0.5)
    worker.init_cuda_graphs()
    case.record("capture the draft graph", captured[0])


def eagle(case: Case) -> None:
    from sglang.srt.speculative import eagle_utils

    create_worker("EAGLE")
    eagle_utils._is_xpu = True  # the Triton kernels, in the interpreter
    draft_steps(case)
    verify_input, batch = draft_tree(case)
    verify_tree(case, verify_input, batch)
    sample_first_tokens(case)


def draft_tree(case: Case) -> tuple[object, SimpleNamespace]:
    from sglang.srt.speculative import eagle_utils, eagle_worker_common

    top_k, steps, nodes = 2, 3, 6
    torch.manual_seed(11 + case.rank)
    scores = [torch.rand(B, 1, top_k), *(torch.rand(B, top_k, top_k) for _ in range(steps - 1))]
    tokens = [torch.randint(0, V, (B, count)) for count in (top_k, *[top_k * top_k] * (steps - 1))]
    parents = [torch.arange(-1, top_k).repeat(B, 1)]
    parents += [torch.arange(top_k).repeat(B, 1) + top_k * top_k * (step - 1) + top_k for step in range(1, steps)]
    parent_list, scores_index, drafted = eagle_utils.organize_draft_results(scores, tokens, parents, nodes)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=case.seq_lens_B,
        seq_lens_sum=int(case.seq_lens_B.sum()),
        device="cpu",
        sampling_info=sampling_info(greedy_rows="all"),
    )
    target = SimpleNamespace(
        model_runner=SimpleNamespace(attn_backend=SimpleNamespace(verify_mask=None, max_context_len=64))
    )
    verify_input = eagle_worker_common.build_eagle_verify_input(
        batch,
        SimpleNamespace(bonus_tokens=case.anchor_B.clone()),
        parent_list,
        scores_index,
        drafted,
        None,
        target_worker=target,
        topk=top_k,
        num_steps=steps,
        num_draft_tokens=nodes,
        tree_mask_mode=eagle_utils.TreeMaskMode.FULL_MASK,
        device="cpu",
    )
    names = (
        "draft_token",
        "custom_mask",
        "positions",
        "retrieve_index",
        "retrieve_next_token",
        "retrieve_next_sibling",
    )
    case.record("draft tree, and what is built from it", *(getattr(verify_input, name) for name in names))
    return verify_input, batch


def verify_tree(case: Case, verify_input: object, batch: SimpleNamespace) -> None:
    from sglang.srt.speculative import eagle_worker_common, spec_utils

    nodes = verify_input.draft_token_num
    logits = torch.randn(B, nodes, V, generator=torch.Generator().manual_seed(7))
    drafted_BT = verify_input.draft_token.view(B, nodes)
    logits.scatter_add_(2, drafted_BT.roll(-1, 1)[..., None], torch.full((B, nodes, 1), 3.0))
    logits = (logits + case.noise(B, nodes, V)).reshape(-1, V)
    for name, simulated_length in (("verify, greedy", -1.0), ("verify, simulated acceptance", 2.5)):
        spec_utils.SIMULATE_ACC_LEN = simulated_length
        case.shift_generator()
        verdicts = [
            eagle_worker_common.eagle_sample(verify_input, batch, SimpleNamespace(next_token_logits=logits.clone()))
            for _ in range(4)
        ]
        case.record(name, *(tensor for verdict in verdicts for tensor in verdict))
    spec_utils.SIMULATE_ACC_LEN = -1.0


def ngram(case: Case) -> None:
    ngram_scenario(case)


def ngram_scenario(case: Case) -> None:
    """Drafts from a corpus that differs between ranks, and a corpus that another thread loads."""
    from sglang.srt.speculative import external_corpus_manager

    worker = ngram_worker(case, create_worker("NGRAM"))
    batch = ngram_batch()
    worker._prepare_for_speculative_decoding(batch)
    tree = batch.spec_info
    links = tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling
    case.record("drafts and their tree on the device", batch.input_ids, tree.custom_mask, tree.positions, *links)
    batch = ngram_batch()
    batch.has_grammar = True
    case.record("drafts matched on the host, with a grammar", *worker._prepare_draft_tokens(batch))

    loaded: list[str] = []
    manager = external_corpus_manager.ExternalCorpusManager(SlowLoader(case.rank, loaded), lambda *_: None)
    manager.add(SimpleNamespace(corpus_id="more", token_chunks=[[1]]))
    time.sleep(0.3)  # the step that comes next; rank 0's loader has ended by then
    case.record("corpus takes part after the request", list(loaded))


def ngram_worker(case: Case, worker_class: type) -> object:
    """A worker whose corpus drafts something else on every rank: a chain on rank 0, elsewhere all from the anchor."""
    from sglang.srt.speculative import ngram_worker as module

    module.assign_extend_cache_locs_func = module.prepare_mamba_track_for_verify = lambda *_, **__: None
    module._is_cpu = False  # as on a GPU, the attention mask spans the sequences
    worker = object.__new__(worker_class)
    worker.draft_token_num, worker.max_trie_depth, worker.enable_overlap = S, 8, False
    worker.max_batch_size, worker.device = B, "cpu"
    worker._init_preallocated_tensors()
    drafted = torch.cat([case.anchor_B[:, None], case.draft_BG + case.rank], 1).reshape(-1).numpy()
    chain, star = torch.ones(S, S).tril().bool(), torch.eye(S).bool()
    star[:, 0] = True
    mask = (star if case.rank else chain).repeat(B, 1, 1).reshape(-1).numpy()
    worker.ngram_corpus = SimpleNamespace(synchronize=lambda: None, batch_get=lambda *_: (drafted.copy(), mask.copy()))
    return worker


def ngram_batch() -> SimpleNamespace:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    request = SimpleNamespace(rid="a", origin_input_ids=[1, 2], origin_input_ids_unpadded=[1, 2], output_ids=[3])
    ones_B = torch.ones(B, dtype=torch.int64)
    return SimpleNamespace(
        reqs=[request] * B,
        forward_mode=ForwardMode.DECODE,
        has_grammar=False,
        grammar_needs_sync=lambda: True,
        seq_lens=ones_B.cumsum(0) * 3,
        seq_lens_cpu=ones_B.cumsum(0) * 3,
        req_pool_indices=ones_B,
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        spec_info=SimpleNamespace(accept_tokens=torch.zeros(B * S, dtype=torch.int64), accept_lens=ones_B),
    )


class SlowLoader:
    """A worker that loads at once on rank 0 and takes its time elsewhere."""

    def __init__(self, rank: int, loaded: list[str]) -> None:
        self.rank, self.loaded = rank, loaded

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        time.sleep(0.0 if self.rank == 0 else 1.5)
        self.loaded.append(corpus_id)
        return len(token_chunks)
