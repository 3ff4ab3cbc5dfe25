"""The three algorithms as an engine binds them, on a toy target whose every probability is known."""

import sys
from dataclasses import replace

import pytest
import specsync_dflash
import specsync_dspark
import specsync_eagle
import torch
from specsync_dspark.planner import CostTable
from specsync_dspark.speculator import DSparkSpeculator

from tests.toy_models import ToyTarget, decode, make_batch, make_context
from tests.unit.plugins.support import REGISTRY, LoneSync, assert_distributed

ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (plugin.specsync_algorithm() for plugin in (specsync_dspark, specsync_dflash, specsync_eagle))
}
WAYS = {
    "dspark eager": ("dspark", {}),
    "dspark multinomial": ("dspark", {"multinomial": True}),
    "dspark folded": ("dspark", {"folded": True}),
    "dflash selector": ("dflash", {}),
    "dflash folded": ("dflash", {"folded": True}),
    "eagle": ("eagle", {}),
}


def bind(way, sync, *, seed=0, **options):
    name, own = WAYS[way]
    options = {**own, **options}
    if options.pop("multinomial", False):
        return DSparkSpeculator(make_context(sync, seed=seed, **options), fast_sampling=False)
    return ALGORITHMS[name].bind(make_context(sync, seed=seed, **options))


@pytest.mark.parametrize("way", WAYS)
def test_greedy_output_is_plain_greedy_decoding(way):
    target = ToyTarget.seeded(5)
    anchor_B = torch.arange(5)
    tokens_BN = decode(bind(way, LoneSync()), target, anchor_B, torch.zeros(5), 12)
    assert tokens_BN.tolist() == [target.greedy(anchor, 12) for anchor in range(5)]


@pytest.mark.parametrize("way", WAYS)
def test_sampled_rows_of_a_mixed_batch_follow_the_target_and_greedy_rows_decode_greedily(way):
    rows, greedy_rows, temperature = 40_000, 20, 0.9
    target = ToyTarget.seeded(5)
    anchor_B = torch.zeros(rows + greedy_rows).long()
    temperatures_B = torch.cat((torch.full((rows,), temperature), torch.zeros(greedy_rows)))
    speculator = bind(way, LoneSync(), seed=11, max_batch=rows + greedy_rows)
    tokens_BN = decode(speculator, target, anchor_B, temperatures_B, 2)
    probs_VV = target.probabilities(temperature)
    assert_distributed(tokens_BN[:rows, :1], probs_VV[0])
    assert_distributed(tokens_BN[:rows], probs_VV[0].unsqueeze(1) * probs_VV)
    assert tokens_BN[rows:].tolist() == [target.greedy(0, 2)] * greedy_rows


def test_a_plan_that_cuts_blocks_short_leaves_the_targets_distribution_as_it_is():
    """Which drafts are verified must not depend on what they are: a plan by their own probability fails here."""
    rows, temperature, sync = 60_000, 0.9, LoneSync()
    target = ToyTarget.seeded(5)
    # A step's time grows with its tokens, so that of drafts only the likelier half is worth it.
    sizes = tuple(range(rows, 4 * rows + 1, rows // 20))
    costs = CostTable(sizes, tuple(1e6 / (rows + size) for size in sizes))
    speculator = DSparkSpeculator(make_context(sync, max_batch=rows), costs=costs)
    temperatures_B = torch.full((rows,), temperature)
    tokens_BN = decode(speculator, target, torch.zeros(rows).long(), temperatures_B, 6)
    plans = [tensors[0] for slug, tensors in sync.calls if slug == "dspark-plan"]
    assert min(len(set(plan.tolist())) for plan in plans[1:]) > 1
    probs_VV = target.probabilities(temperature)
    ahead_V = torch.linalg.matrix_power(probs_VV, 4)[0]
    assert_distributed(tokens_BN[:, 3:4], ahead_V)
    for first, second in ((3, 4), (4, 5)):
        ahead_V = torch.linalg.matrix_power(probs_VV, first + 1)[0]
        assert_distributed(tokens_BN[:, [first, second]], ahead_V.unsqueeze(1) * probs_VV)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_and_its_verdict_keep_the_contract(way, temperature):
    target, sync = ToyTarget.seeded(5), LoneSync()
    speculator = bind(way, sync)
    batch = make_batch(torch.arange(4), torch.full((4,), temperature))
    draft = speculator.draft(batch)
    assert draft.tokens_BW.shape == draft.parents_BW.shape == (4, speculator.width)
    assert torch.equal(draft.tokens_BW[:, 0], batch.anchor_B)
    assert (draft.parents_BW[:, 0] == -1).all()
    assert (draft.parents_BW[:, 1:] < torch.arange(1, speculator.width)).all()
    assert (draft.parents_BW[:, 1:] >= 0).all()
    verdict = speculator.accept(batch, draft, target.verify(draft.tokens_BW))
    for row, length in enumerate(verdict.commit_lens_B.tolist()):
        path, tokens = verdict.path_BC[row].tolist(), verdict.tokens_BC[row].tolist()
        assert length >= 1
        assert path[0] == 0
        for before, node, token in zip(path, path[1:length], tokens, strict=False):
            assert int(draft.parents_BW[row, node]) == before
            assert int(draft.tokens_BW[row, node]) == token
        assert set(path[length:]) | set(tokens[length:]) <= {-1}
        assert min(tokens[:length]) >= 0
        if draft.verify_lens_B is not None:
            assert length <= int(draft.verify_lens_B[row])
    assert {part.dtype for part in (verdict.commit_lens_B, verdict.tokens_BC, verdict.path_BC)} == {torch.int64}


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_batch_passes_through(way):
    speculator, empty = bind(way, LoneSync()), make_batch(torch.zeros(0).long(), torch.zeros(0))
    draft = speculator.draft(empty)
    verdict = speculator.accept(empty, draft, ToyTarget.seeded(5).verify(draft.tokens_BW))
    assert verdict.commit_lens_B.shape == (0,)
    assert speculator.first_token(empty, torch.zeros(0, 5)).shape == (0,)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_token_is_agreed(name):
    rows = 20_000
    sync = LoneSync()
    speculator = ALGORITHMS[name].bind(make_context(sync))
    logits_BV = ToyTarget.seeded(5).logits_VV[0].expand(rows, 5)
    tokens_B = speculator.first_token(make_batch(torch.zeros(rows).long(), torch.full((rows,), 0.9)), logits_BV)
    assert_distributed(tokens_B.unsqueeze(1), ToyTarget.seeded(5).probabilities(0.9)[0])
    assert sync.slugs[-1] == f"{name}-target"
    sync.overwrite = {f"{name}-target": lambda tokens: tokens.fill_(3)}
    greedy = make_batch(torch.zeros(2).long(), torch.zeros(2))
    assert speculator.first_token(greedy, logits_BV[:2]).tolist() == [3, 3]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_simulated_acceptance_replaces_the_verdict_and_is_agreed_last(way, temperature):
    target, sync = ToyTarget.seeded(5), LoneSync()
    speculator = bind(way, sync, simulated_accept_len=1.0)
    batch = make_batch(torch.arange(4), torch.full((4,), temperature))
    draft = speculator.draft(batch)
    if draft.verify_lens_B is not None:
        draft = replace(draft, verify_lens_B=torch.full((4,), 3, dtype=torch.int32))
    verdict = speculator.accept(batch, draft, target.verify(draft.tokens_BW))
    assert verdict.commit_lens_B.tolist() == [2] * 4
    assert sync.slugs[-1] == f"{WAYS[way][0]}-accept-simulated"
    assert sync.slugs[-2] != sync.slugs[-1]


def test_folding_follows_the_memory_that_the_group_has():
    needed_gib = 80 / 2**30  # noise of 5 and logits of 15 float32
    folded = {0.99: (False, False, False), 1.0: (True, False, True), 1.0 + needed_gib: (True, True, True)}
    for free_gib, parts in folded.items():
        sync = LoneSync(free_gib=free_gib)
        speculator = DSparkSpeculator(make_context(sync, max_batch=1, gamma=3, vocab_size=5, folded=True))
        found = (speculator._greedy_sampler, speculator._sampler, speculator._epilogue)
        assert tuple(part is not None for part in found) == parts
        assert sync.slugs == ["dspark-mem"]


def test_without_memory_to_capture_the_draft_stays_eager():
    for way, eager_site in (("dspark folded", "dspark-draft-greedy"), ("dflash folded", "dflash-draft-greedy")):
        sync = LoneSync(free_gib=0.5)
        decode(bind(way, sync), ToyTarget.seeded(5), torch.zeros(2).long(), torch.zeros(2), 3)
        assert eager_site in sync.slugs
        assert not any("-graph" in slug for slug in sync.slugs)


def test_every_declared_site_of_the_three_algorithms_has_a_caller():
    seen = set()
    target = ToyTarget.seeded(5)
    for way in WAYS:
        for temperature in (0.0, 0.9):
            for simulated in (None, 1.5):
                sync = LoneSync()
                speculator = bind(way, sync, simulated_accept_len=simulated)
                anchor_B, temperatures_B = torch.zeros(2).long(), torch.full((2,), temperature)
                speculator.first_token(make_batch(anchor_B, temperatures_B), target.logits_VV[:2])
                decode(speculator, target, anchor_B, temperatures_B, 4)
                seen.update(sync.slugs)
    # Decided in a real engine only: a tree built in one place, drafts matched on the host, a corpus loaded by a thread.
    in_engines = {"eagle-draft-tree", "eagle-ngram-draft", "eagle-ngram-tree", "eagle-ngram-corpus"}
    declared = {site.slug for site in REGISTRY.sites if site.algorithm in ALGORITHMS} - in_engines
    assert declared - seen == set(), "declared, but nothing calls sync there"
    assert seen - declared == set()


def test_plugins_import_no_torch():
    import subprocess

    code = (
        "import sys, specsync_dspark, specsync_dflash, specsync_eagle, specsync_eagle.rocm\n"
        "for plugin in (specsync_dspark, specsync_dflash, specsync_eagle): plugin.specsync_algorithm()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
