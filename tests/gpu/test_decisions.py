"""The decisions that engines capture: recorded once, replayed on inputs that change, on one GPU and between two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from specsync_dflash.draft import CapturedDraft, draft_selected
from specsync_dflash.speculator import DFlashSpeculator
from specsync_dspark.accept import accept, finalise
from specsync_dspark.draws import draft_block
from specsync_dspark.epilogue import AcceptEpilogue
from specsync_dspark.folded import FoldedSampler
from specsync_dspark.speculator import DSparkSpeculator
from specsync_eagle.tree import Tree, draft_tree
from specsync_eagle.tree_mask import spread_tree_
from specsync_eagle.verify import greedy_verdict, sampled_verdict
from torch import Tensor

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.decisions import Sampling
from specsync_core.replay import Replay
from specsync_core.testing import run_ranks
from tests.toy_models import ToyNetwork, ToyTarget, make_batch, make_context, table
from tests.unit.plugins.support import LoneSync, assert_distributed
from tests.unit.plugins.tree_masks import CASES, lengths, mask_of, trees

B, G, V = 12, 3, 32
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")


def cuda_table(*shape: int, seed: int) -> Tensor:
    return table(*shape, seed=seed, scale=2.0).cuda()


def markov(prev_B: Tensor) -> Tensor:
    return MARKOV_VV[prev_B]


MARKOV_VV = cuda_table(V, V, seed=3) if torch.cuda.is_available() else None
GREEDY, SAMPLED, MIXED = [0.0] * B, [0.9] * B, [0.0, 0.9] * (B // 2)


def sampling_of(temperatures: list[float]) -> Sampling:
    return Sampling.of(torch.tensor(temperatures, device="cuda"))


def folded(sync: Any, seed: int | None, max_batch: int = B) -> FoldedSampler:
    generator = None if seed is None else torch.Generator("cuda").manual_seed(seed)
    device = torch.device("cuda", torch.cuda.current_device())
    return FoldedSampler(sync, markov, max_batch=max_batch, gamma=G, vocab_size=V, device=device, generator=generator)


def test_the_folded_greedy_draft_replays_as_the_eager_one():
    sampler = folded(LoneSync(), None)
    for replay in range(3):
        logits_BGV, anchor_B = cuda_table(B, G, V, seed=replay), torch.full((B,), replay, device="cuda")
        eager = draft_block(LoneSync(), logits_BGV, anchor_B, markov, sampling_of(GREEDY), None)
        block = sampler.draft(logits_BGV, anchor_B, sampling_of(GREEDY))
        assert torch.equal(block.tokens_BG, eager.tokens_BG)
        assert torch.equal(block.logits_BGV, eager.logits_BGV)


def test_the_folded_sampled_draft_redraws_its_noise_at_every_replay():
    rows = 20_000
    sampler, sampling = folded(LoneSync(), 1, rows), Sampling.of(torch.full((rows,), 0.9, device="cuda"))
    logits_BGV = cuda_table(1, G, V, seed=1).expand(rows, -1, -1)
    blocks = [
        sampler.draft(logits_BGV, torch.zeros(rows, device="cuda").long(), sampling).tokens_BG.cpu().clone()
        for _ in range(3)
    ]
    assert not torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[1], blocks[2])
    probs_V = torch.softmax((logits_BGV[0, 0] + MARKOV_VV[0]) / 0.9, dim=-1).cpu()
    for tokens_BG in blocks:
        assert_distributed(tokens_BG[:, :1], probs_V)


def test_the_epilogue_replays_as_the_eager_accept():
    epilogue = AcceptEpilogue(LoneSync(), max_batch=B, stride=G + 1, vocab_size=V, device=torch.device("cuda"))
    for replay in range(3):
        candidates_BS = cuda_table(B, G + 1, V, seed=replay).argmax(-1)
        target_BSV = (
            cuda_table(B, G + 1, V, seed=replay) + torch.nn.functional.one_hot(candidates_BS.roll(-1, 1), V) * 9
        )
        lens_B, prefix_B = torch.randint(1, G + 2, (B,), device="cuda").int(), torch.full((B,), replay, device="cuda")
        eager = accept(LoneSync(), candidates_BS, target_BSV, target_BSV, sampling_of(GREEDY), verify_lens_B=lens_B)
        verdict, final = epilogue.accept(candidates_BS, target_BSV, prefix_B, lens_B)
        expected = (*eager, *finalise(candidates_BS, eager, prefix_B))
        assert all(torch.equal(*pair) for pair in zip((*verdict, *final), expected, strict=True))


def test_dflash_drafts_can_be_captured():
    captured = CapturedDraft(LoneSync(), max_batch=B, gamma=G, vocab_size=V, device=torch.device("cuda"))
    for replay in range(3):
        logits_BGV = cuda_table(B, G, V, seed=replay)
        assert torch.equal(captured.draft(logits_BGV), logits_BGV.argmax(-1))
    generator, out_BG = torch.Generator("cuda").manual_seed(1), torch.zeros(B, G, device="cuda").long()
    sampling = sampling_of(SAMPLED)
    select = Replay(
        lambda: out_BG.copy_(
            draft_selected(LoneSync(), logits_BGV, sampling, num_candidates=4, generator=generator).tokens_BG
        ),
        out_BG.device,
        generator=generator,
    )
    select()
    first_BG = out_BG.clone()
    select()
    assert not torch.equal(first_BG, out_BG)


def test_eagle_drafts_and_verifies_without_a_host_read():
    logits_VV, anchor_B = cuda_table(V, V, seed=1), torch.arange(B, device="cuda")
    generator, sampling = torch.Generator("cuda").manual_seed(1), sampling_of(MIXED)
    results: dict[str, Tensor] = {}

    def draft_and_verify() -> Tree:
        tree = draft_tree(
            LoneSync(), lambda paths_BPL: logits_VV[paths_BPL[:, :, -1]], anchor_B, depth=3, topk=3, num_drafts=8
        )
        target_BTV = logits_VV[tree.candidates_BT]
        results["tokens"] = tree.candidates_BT
        results["greedy"] = greedy_verdict(tree, target_BTV).predict
        results["sampled"] = sampled_verdict(tree, target_BTV, sampling, generator).predict
        return tree

    replay = Replay(lambda: (draft_and_verify(), None)[1], anchor_B.device, generator=generator)
    recorded = dict(results)
    anchor_B.copy_(torch.arange(B).flip(0))
    replay()
    tree = draft_and_verify()
    assert torch.equal(recorded["tokens"], tree.candidates_BT)
    assert torch.equal(recorded["greedy"], results["greedy"])


def make_sync(group: TorchGroup, sites: str) -> SpecTpSync:
    plan = resolve_plan(load_registry(), environ={"SPECSYNC_SITES": sites}, facts=Facts(platform="cuda"))
    return SpecTpSync(ParallelGroups(tp=group), plan)


def replays_between_ranks(rank: int, world_size: int) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    global MARKOV_VV
    MARKOV_VV = table(V, V, seed=3).cuda()
    group = TorchGroup(dist.new_group(backend="nccl"), cpu_group=dist.group.WORLD)
    found: dict[str, Any] = {}
    for sites in ("off", "all"):
        sync = make_sync(group, sites)
        sampler = folded(sync, rank)
        logits_BGV, anchor_B = cuda_table(B, G, V, seed=9), torch.zeros(B, device="cuda").long()
        found[f"folded, {sites}"] = [
            sampler.draft(logits_BGV, anchor_B, sampling_of(SAMPLED)).tokens_BG.tolist() for _ in range(3)
        ]
        for speculator in (DSparkSpeculator, DFlashSpeculator):
            for temperatures in (GREEDY, MIXED):
                name = f"{speculator.__name__}, {'greedy' if temperatures is GREEDY else 'mixed'}, {sites}"
                found[name] = steps(sync, speculator, rank, temperatures)
    return found


def steps(sync: SpecTpSync, speculator: Any, rank: int, temperatures: list[float]) -> list[Any]:
    device = torch.device("cuda", rank)
    target = ToyTarget((table(V, V, seed=1) + table(V, V, seed=50 + rank, scale=0.4)).to(device))
    network = ToyNetwork(V, noise=0.5, rank=rank, device=device)
    context = make_context(sync, network=network, vocab_size=V, seed=rank, max_batch=B, device=device, folded=True)
    bound, anchor_B, outputs = speculator(context), torch.arange(B, device=device), []
    for _ in range(4):
        batch = make_batch(anchor_B, torch.tensor(temperatures, device=device))
        draft = bound.draft(batch)
        verdict = bound.accept(batch, draft, target.verify(draft.tokens_BW))
        outputs += [draft.tokens_BW.tolist(), verdict.commit_lens_B.tolist(), verdict.tokens_BC.tolist()]
        anchor_B = verdict.tokens_BC.gather(1, (verdict.commit_lens_B - 1).unsqueeze(1)).squeeze(1)
    return outputs


@two_gpus
def test_captured_decisions_agree_between_ranks_and_part_without_sync():
    first, second = run_ranks(replays_between_ranks, 2, timeout_s=100)
    for name, value in first.items():
        if name.endswith("off"):
            assert second[name] != value, name
        else:
            assert second[name] == value == first[name.replace("all", "off")], name


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_trees_are_spread_into_a_mask_eagerly_and_in_a_graph(dtype: torch.dtype) -> None:
    for requests, nodes in CASES:
        length_B = lengths(requests, dtype)
        one, other, third = (trees(requests, nodes, seed) for seed in range(3))
        mask, tree_M, on_device_B = mask_of(one, length_B).cuda(), other.view(-1).cuda(), length_B.cuda()
        spread_tree_(mask, tree_M, on_device_B, nodes)
        assert torch.equal(mask.cpu(), mask_of(other, length_B)), (requests, nodes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            spread_tree_(mask, tree_M, on_device_B, nodes)
        tree_M.copy_(third.view(-1))
        graph.replay()
        assert torch.equal(mask.cpu(), mask_of(third, length_B)), (requests, nodes)
