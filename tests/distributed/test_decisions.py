"""Every site of the built-in algorithms on real ranks that start apart: from other logits, noise and generators.

A scenario is one reference function on values of this rank alone; it returns the decision and all that follows from
it. Where its site is on, every rank must return what group rank 0 returns alone; where only that site is off, the
ranks must differ, or the scenario could not fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from specsync_dflash import accept as dflash_accept
from specsync_dflash.draft import draft_greedy, draft_selected
from specsync_dflash.speculator import DFlashSpeculator
from specsync_dspark import accept as dspark_accept
from specsync_dspark.draws import draft_block
from specsync_dspark.epilogue import AcceptEpilogue
from specsync_dspark.folded import FoldedSampler
from specsync_dspark.planner import VerifyLimits, survival, verify_lens
from specsync_dspark.speculator import DSparkSpeculator
from specsync_eagle import verify as eagle_verify
from specsync_eagle.speculator import EagleSpeculator
from specsync_eagle.tree import Tree, draft_tree
from torch import Tensor

import specsync_core.sync
from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, decisions, load_registry, resolve_plan
from specsync_core.decisions import Sampling
from specsync_core.testing import run_ranks
from tests.toy_models import ToyNetwork, ToyTarget, make_batch, make_context, table

B, G, V = 16, 3, 12
CPU = torch.device("cpu")
GREEDY, MIXED = torch.zeros(B), torch.tensor([0.0, 0.8] * (B // 2))

Scenario = Callable[[SpecTpSync, int], Any]


def own_table(seed: int, *shape: int, offset: int = 0) -> Tensor:
    """Values of this rank alone."""
    return table(*shape, seed=1000 * (seed + 1) + offset, scale=2.0)


def own_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shared_candidates() -> Tensor:
    return torch.randint(V, (B, G + 1), generator=torch.Generator().manual_seed(5))


def agreeable_target(seed: int) -> Tensor:
    """Target logits that accept a part of the shared candidates, another part on every rank."""
    likely_BSV = torch.zeros(B, G + 1, V).scatter_(2, shared_candidates().roll(-1, 1).unsqueeze(2), 4.0)
    return likely_BSV + own_table(seed, B, G + 1, V)


def markov(prev_B: Tensor) -> Tensor:
    return table(V, V, seed=3)[prev_B]


def eager_draft(sync: SpecTpSync, seed: int, *, temperatures_B: Tensor, fast: bool = True) -> Tensor:
    logits_BGV, anchor_B = own_table(seed, B, G, V), torch.zeros(B).long()
    sampling = Sampling.of(temperatures_B)
    return draft_block(sync, logits_BGV, anchor_B, markov, sampling, own_generator(seed), fast_sampling=fast).tokens_BG


def folded_draft(sync: SpecTpSync, seed: int, *, sampled: bool) -> list[Tensor]:
    sampler = FoldedSampler(
        sync,
        markov,
        max_batch=B,
        gamma=G,
        vocab_size=V,
        device=CPU,
        generator=own_generator(seed) if sampled else None,
    )
    logits_BGV = table(B, G, V, seed=4) if sampled else own_table(seed, B, G, V)  # noise alone parts the ranks
    return [
        sampler.draft(logits_BGV, torch.full((B,), replay), Sampling.of(MIXED)).tokens_BG.clone() for replay in (0, 1)
    ]


def dspark_plan(sync: SpecTpSync, seed: int) -> Tensor:
    return verify_lens(sync, survival(own_table(seed, B, G).sigmoid()), B, VerifyLimits(max_len=G + 1))


def dspark_eager_accept(sync: SpecTpSync, seed: int, *, temperatures_B: Tensor) -> list[Tensor]:
    verdict = dspark_accept.accept(
        sync,
        shared_candidates(),
        agreeable_target(seed),
        own_table(seed, B, G, V, offset=1),
        Sampling.of(temperatures_B),
        verify_lens_B=torch.tensor([4, 3, 2, 1] * (B // 4), dtype=torch.int32),
        generator=own_generator(seed),
    )
    return [*verdict, *dspark_accept.finalise(shared_candidates(), verdict, torch.arange(B) * 10)]


def dspark_epilogue(sync: SpecTpSync, seed: int) -> list[Tensor]:
    epilogue = AcceptEpilogue(sync, max_batch=B, stride=G + 1, vocab_size=V, device=CPU)
    verdict, finalised = epilogue.accept(shared_candidates(), agreeable_target(seed), torch.arange(B) * 10)
    return [*verdict, *finalised]


def dspark_simulated(sync: SpecTpSync, seed: int) -> list[Tensor]:
    zeros_B = torch.zeros(B).long()
    honest = decisions.ChainAccept(zeros_B, zeros_B, zeros_B)  # agreed before
    verdict = dspark_accept.simulate(sync, honest, agreeable_target(seed), mean_len=1.5, generator=own_generator(seed))
    return [*verdict, *dspark_accept.finalise(shared_candidates(), verdict, zeros_B)]


def dflash_selector_draft(sync: SpecTpSync, seed: int) -> Tensor:
    sampling = Sampling.of(MIXED)
    return draft_selected(
        sync, own_table(seed, B, G, V), sampling, num_candidates=4, generator=own_generator(seed)
    ).tokens_BG


def dflash_verdict(sync: SpecTpSync, seed: int, *, temperatures_B: Tensor, selected: bool = False) -> list[Tensor]:
    verdict = dflash_accept.accept(
        sync,
        shared_candidates(),
        agreeable_target(seed),
        Sampling.of(temperatures_B),
        selector_probs_BGV=own_table(seed, B, G, V, offset=1).softmax(-1) if selected else None,
        generator=own_generator(seed),
    )
    return chain_state(*verdict)


def dflash_simulated(sync: SpecTpSync, seed: int) -> list[Tensor]:
    return chain_state(
        *dflash_accept.simulate(sync, agreeable_target(seed), mean_len=1.5, generator=own_generator(seed))
    )


def chain_state(accept_len: Tensor, bonus: Tensor) -> list[Tensor]:
    return [accept_len, bonus, *vars(decisions.chain_verdict(shared_candidates(), accept_len, bonus)).values()]


def shared_tree() -> Tree:
    parents_T = torch.tensor([-1, 0, 0, 1, 1, 2, 3])
    tokens_BT = torch.tensor([0, 1, 2, 3, 4, 5, 6]).expand(B, -1)
    return Tree.from_parents(tokens_BT, parents_T.expand(B, -1), depth=3, max_children=2)


def own_tree_target(seed: int) -> Tensor:
    return own_table(seed, B, 7, V) + torch.where(torch.arange(V) < 7, 3.0, 0.0)


def eagle_tree_draft(sync: SpecTpSync, seed: int) -> list[Tensor]:
    logits_VV = own_table(seed, V, V)
    tree = draft_tree(
        sync, lambda paths_BPL: logits_VV[paths_BPL[:, :, -1]], torch.arange(B) % V, depth=3, topk=3, num_drafts=8
    )
    return [tree.candidates_BT, tree.parents_BT, tree.retrieve_next_token_BT, tree.retrieve_next_sibling_BT]


def eagle_verdict(sync: SpecTpSync, seed: int, *, temperatures_B: Tensor) -> list[Tensor]:
    verdict = eagle_verify.verify_tree(
        sync, shared_tree(), own_tree_target(seed), Sampling.of(temperatures_B), own_generator(seed)
    )
    return [*verdict, *vars(eagle_verify.tree_verdict(shared_tree(), verdict)).values()]


def eagle_simulated(sync: SpecTpSync, seed: int) -> list[Tensor]:
    verdict = eagle_verify.simulate(
        sync, shared_tree(), own_tree_target(seed), mean_len=1.5, generator=own_generator(seed)
    )
    return [*verdict, *vars(eagle_verify.tree_verdict(shared_tree(), verdict)).values()]


def first_token(sync: SpecTpSync, seed: int, *, speculator: Any) -> Tensor:
    batch = make_batch(torch.zeros(B).long(), MIXED)
    return speculator(make_context(sync, vocab_size=V, seed=seed)).first_token(batch, own_table(seed, B, V))


def memory_gate(sync: SpecTpSync, seed: int, *, speculator: Any) -> list[str]:
    """Only group rank 0 has the memory to capture. What matters is the sites that a step then takes."""
    specsync_core.sync.free_memory_gib = lambda device, gpu_id: 2.0 if seed == 0 else 0.5
    bound = speculator(make_context(sync, vocab_size=V, folded=True))
    return [name for name, part in vars(bound).items() if isinstance(part, (FoldedSampler, AcceptEpilogue))] + [
        str(getattr(bound, "_captured", None) is not None)
    ]


SCENARIOS: dict[str, Scenario] = {
    "dspark-draft-greedy": partial(eager_draft, temperatures_B=GREEDY),
    "dspark-draft-sample": partial(eager_draft, temperatures_B=MIXED),
    "dspark-draft-multinomial": partial(eager_draft, temperatures_B=MIXED, fast=False),
    "dspark-graph-sample": partial(folded_draft, sampled=True),
    "dspark-graph-greedy": partial(folded_draft, sampled=False),
    "dspark-plan": dspark_plan,
    "dspark-accept-greedy": partial(dspark_eager_accept, temperatures_B=GREEDY),
    "dspark-accept-sample": partial(dspark_eager_accept, temperatures_B=MIXED),
    "dspark-accept-graph": dspark_epilogue,
    "dspark-accept-simulated": dspark_simulated,
    "dspark-target": partial(first_token, speculator=DSparkSpeculator),
    "dflash-draft-greedy": lambda sync, seed: draft_greedy(sync, own_table(seed, B, G, V)),
    "dflash-draft-selector": dflash_selector_draft,
    "dflash-selector": partial(dflash_verdict, temperatures_B=MIXED, selected=True),
    "dflash-accept-sample": partial(dflash_verdict, temperatures_B=MIXED),
    "dflash-accept-greedy": partial(dflash_verdict, temperatures_B=GREEDY),
    "dflash-accept-simulated": dflash_simulated,
    "dflash-target": partial(first_token, speculator=DFlashSpeculator),
    "eagle-draft": eagle_tree_draft,
    "eagle-verify-greedy": partial(eagle_verdict, temperatures_B=GREEDY),
    "eagle-verify-sample": partial(eagle_verdict, temperatures_B=MIXED),
    "eagle-accept-simulated": eagle_simulated,
    "eagle-target": partial(first_token, speculator=EagleSpeculator),
}
GATES: dict[str, Scenario] = {
    "dspark-mem": partial(memory_gate, speculator=DSparkSpeculator),
    "dflash-mem": partial(memory_gate, speculator=DFlashSpeculator),
}
IN_ENGINES = {"eagle-draft-tree", "eagle-ngram-draft", "eagle-ngram-tree", "eagle-ngram-corpus"}
"""Decided in a real engine only; tests/engines has them."""
DECODERS = {
    "dspark eager": (DSparkSpeculator, {}),
    "dspark folded": (DSparkSpeculator, {"folded": True}),
    "dflash selector": (DFlashSpeculator, {}),
    "dflash folded": (DFlashSpeculator, {"folded": True}),
    "eagle": (EagleSpeculator, {}),
}


class Nudge:
    """A fault on one rank just before one site: every value that it brings is moved."""

    def __init__(self, slug: str, active: bool) -> None:
        self.slug, self.active = slug, active

    def before(self, site, tensors, step):
        if self.active and site.slug == self.slug:
            for tensor in tensors:
                tensor.add_(1)

    def after(self, site, tensors, step):
        pass


def make_sync(group: TorchGroup, sites: str, *taps: Any) -> SpecTpSync:
    plan = resolve_plan(load_registry(), environ={"SPECSYNC_SITES": sites}, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=group), plan, taps=taps)


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return [plain(part) for part in value] if isinstance(value, list) else value


def run_scenarios(rank: int, world_size: int, members: list[int]) -> dict[str, dict[str, Any]] | None:
    process_group = dist.new_group(members, sort_ranks=False)
    if rank not in members:
        return None
    group = TorchGroup(process_group)
    seed = group.rank_in_group
    found: dict[str, dict[str, Any]] = {}
    for slug, scenario in {**SCENARIOS, **GATES}.items():
        nudge = Nudge(slug, active=seed == 1)
        found[slug] = {
            "alone": plain(scenario(make_sync(group, "off"), seed)),
            "on": plain(scenario(make_sync(group, slug), seed)),
            "off": plain(scenario(make_sync(group, f"all,-{slug}"), seed)),
            "nudged": plain(scenario(make_sync(group, slug, nudge), seed)),
        }
    return found


def run_decoders(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    group = TorchGroup()
    found: dict[str, dict[str, Any]] = {}
    for way, (speculator, options) in DECODERS.items():
        for name, temperatures_B in (("greedy", GREEDY), ("mixed", MIXED)):
            found[f"{way}, {name}"] = {
                sites: plain(decode_on(make_sync(group, sites), rank, speculator, options, temperatures_B))
                for sites in ("off", "all")
            }
    return found


def decode_on(sync: SpecTpSync, rank: int, speculator: Any, options: Any, temperatures_B: Tensor) -> list[Tensor]:
    """Whole steps, on a target and a draft network whose every output has this rank's own float noise."""
    network = ToyNetwork(V, noise=0.5, rank=rank)
    target = ToyTarget(table(V, V, seed=1) + own_table(rank, V, V) * 0.2)
    bound = speculator(make_context(sync, network=network, vocab_size=V, seed=rank, max_batch=B, **options))
    # Differing lengths would leave one rank in a step more than its peers; a fixed number of steps cannot.
    anchor_B, outputs = torch.arange(B) % V, []
    for _ in range(4):
        batch = make_batch(anchor_B, temperatures_B)
        draft = bound.draft(batch)
        verdict = bound.accept(batch, draft, target.verify(draft.tokens_BW))
        outputs += [draft.tokens_BW, verdict.commit_lens_B, verdict.tokens_BC, verdict.path_BC]
        anchor_B = verdict.tokens_BC.gather(1, (verdict.commit_lens_B - 1).unsqueeze(1)).squeeze(1)
    return outputs


@pytest.fixture(scope="module", params=[[0, 1], [0, 1, 2], [2, 1]], ids=["two ranks", "three ranks", "part of three"])
def members(request):
    """The last group begins with global rank 2, and global rank 0 is not in it."""
    return request.param


@pytest.fixture(scope="module")
def scenarios(members):
    by_rank = run_ranks(run_scenarios, max(members) + 1, timeout_s=100, args=(members,))
    return [by_rank[rank] for rank in members]


def test_every_site_has_a_scenario():
    algorithms = {"dspark", "dflash", "eagle"}
    declared = {site.slug for site in load_registry().sites if site.algorithm in algorithms}
    assert declared - IN_ENGINES == {*SCENARIOS, *GATES}


@pytest.mark.parametrize("slug", SCENARIOS)
def test_a_site_that_is_on_makes_rank_zeros_decision_everyones(scenarios, slug):
    alone = scenarios[0][slug]["alone"]
    for rank, found in enumerate(scenarios):
        assert found[slug]["on"] == alone, f"group rank {rank}"


@pytest.mark.parametrize("slug", SCENARIOS)
def test_a_fault_just_before_a_site_never_reaches_what_follows_from_it(scenarios, slug):
    alone = scenarios[0][slug]["alone"]
    for rank, found in enumerate(scenarios):
        assert found[slug]["nudged"] == alone, f"group rank {rank}"


@pytest.mark.parametrize("slug", [*SCENARIOS, *GATES])
def test_a_site_that_is_off_lets_the_ranks_part(scenarios, slug):
    for rank, found in enumerate(scenarios[1:], start=1):
        assert found[slug]["off"] != scenarios[0][slug]["off"], f"group rank {rank} decided as rank 0 did"


@pytest.mark.parametrize("slug", GATES)
def test_a_gate_follows_the_rank_with_the_least_memory(scenarios, slug):
    assert scenarios[0][slug]["alone"] != scenarios[1][slug]["alone"]
    for found in scenarios:
        assert found[slug]["on"] == scenarios[1][slug]["alone"]


def test_whole_steps_agree_with_every_site_on_and_part_with_none():
    first, second = run_ranks(run_decoders, 2, timeout_s=60)
    for case, by_sites in first.items():
        assert second[case]["all"] == by_sites["all"] == by_sites["off"], case
        assert second[case]["off"] != by_sites["off"], case
