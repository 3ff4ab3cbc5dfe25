"""What every plugin says of SGLang: for each known version one set of points, over sites that exist."""

from collections import Counter
from types import SimpleNamespace

import pytest
import specsync_dflash
import specsync_dspark
import specsync_eagle
import specsync_eagle.rocm
import torch

from specsync_core import Call, EngineFacts, Facts
from specsync_core.engines.known import SGLANG, coverage
from specsync_core.engines.versions import is_among
from tests.unit.plugins.support import REGISTRY, LoneSync
from tests.unit.plugins.tree_masks import mask_of

PLUGINS = (specsync_dspark, specsync_dflash, specsync_eagle, specsync_eagle.rocm)
FIXED = SGLANG.versions[3:]


def points(version, algorithm=None, platform="cuda", engine="sglang"):
    facts = EngineFacts(engine=engine, version=version, algorithm=algorithm, platform=platform)
    found = [point for plugin in PLUGINS for point in plugin.specsync_broadcast_points(facts)]
    return [point for point in found if is_among(version, point.versions)]


def synced_by(version, **facts):
    return {each.site: str(each) for each in coverage(points(version, **facts), REGISTRY)}


@pytest.mark.parametrize("version", SGLANG.versions)
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_no_target_is_hooked_twice_for_one_site(version, platform):
    found = points(version, platform=platform)
    hooked = Counter((point.target, site) for point in found if point.when != "engine" for site in point.sites)
    assert [pair for pair, count in hooked.items() if count > 1] == []
    assert {site for point in found for site in point.sites} <= {site.slug for site in REGISTRY.sites}


@pytest.mark.parametrize("version", SGLANG.versions[:3])
def test_before_the_fix_specsync_has_every_published_site_but_those_that_do_not_exist(version):
    by = synced_by(version)
    absent = {site.slug for site in REGISTRY.sites if site.number <= 16 and by[site.slug] == "not at all"}
    assert absent == {"dflash-selector"}
    assert by["dspark-plan"] == "engine and specsync"


@pytest.mark.parametrize("version", FIXED)
def test_with_the_fix_no_published_site_is_broadcast_twice(version):
    by = synced_by(version)
    published = {site.slug: by[site.slug] for site in REGISTRY.sites if site.number <= 16}
    # By specsync the wait for the plan's confidences, and the gates that the engine leaves to attention groups of one.
    assert {published.pop(site) for site in ("dspark-plan", "dspark-mem", "dflash-mem")} == {"engine and specsync"}
    assert set(published.values()) == {"engine"}


@pytest.mark.parametrize(
    ("version", "who"), [("0.5.17", "not at all"), ("0.5.18", "specsync"), ("0.5.19", "engine"), ("0.5.23", "engine")]
)
def test_dsparks_forced_length_is_drawn_by_each_rank_in_one_release(version, who):
    """0.5.17 forces the same length everywhere; 0.5.19 broadcasts after it."""
    assert synced_by(version)["dspark-accept-simulated"] == who


def test_dsparks_forced_length_is_a_payload_of_its_site():
    (point,) = (point for point in points("0.5.18") if "dspark-accept-simulated" in point.sites)
    LoneSync().sync("dspark-accept-simulated", *point.tensors_of(Call((), {}, torch.ones(4, dtype=torch.int32))))


@pytest.mark.parametrize("version", SGLANG.versions)
def test_the_gaps_that_the_fix_leaves_are_specsyncs(version):
    by = synced_by(version)
    gaps = {
        "eagle-verify-greedy",
        "eagle-draft",
        "eagle-draft-tree",
        "eagle-target",
        "eagle-accept-simulated",
        "eagle-ngram-corpus",
    }
    assert {by[site] for site in gaps} == {"specsync"}
    assert by["eagle-verify-sample"] == "engine"
    assert by["dflash-draft-greedy"] == "specsync"
    if version in FIXED:
        assert by["dflash-draft-selector"] == "specsync"


@pytest.mark.parametrize(
    ("algorithm", "plugins"),
    [("dspark", {"dspark"}), ("dflash", {"dflash"}), ("ngram", {"eagle"}), ("standalone", {"eagle"}), ("other", set())],
)
def test_only_the_algorithm_in_use_is_hooked(algorithm, plugins):
    sites = {site for point in points("0.5.17", algorithm) for site in point.sites}
    assert {REGISTRY.site(site).algorithm for site in sites} == plugins


def test_a_tree_is_for_algorithms_that_draft_one_and_a_corpus_for_ngram():
    trees, corpora = ({site for point in points("0.5.17", name) for site in point.sites} for name in ("eagle", "ngram"))
    assert "eagle-draft-tree" in trees - corpora
    assert {"eagle-ngram-draft", "eagle-ngram-tree", "eagle-ngram-corpus"} <= corpora - trees


DRAFTS = 3


def ngram_step(tree_BNN, seq_lens, grammar=False, verify=True):
    """A call of the preparation on a device: the engine has made the attention mask from this rank's own tree."""
    requests = len(seq_lens)
    links_BN = torch.zeros(requests, DRAFTS, dtype=torch.int64)
    tree = SimpleNamespace(
        draft_token=torch.zeros(requests * DRAFTS, dtype=torch.int64),
        custom_mask=mask_of(tree_BNN, torch.tensor(seq_lens)),
        positions=torch.zeros(requests * DRAFTS, dtype=torch.int64),
        retrieve_index=links_BN,
        retrieve_next_token=links_BN + 1,
        retrieve_next_sibling=links_BN + 2,
    )
    batch = SimpleNamespace(
        reqs=[None] * requests,
        seq_lens=torch.tensor(seq_lens),
        has_grammar=grammar,
        forward_mode=SimpleNamespace(is_target_verify=lambda: verify),
        spec_info=tree,
    )
    masks = [None] * requests + [tree_BNN.reshape(-1).clone()]
    return Call((SimpleNamespace(draft_token_num=DRAFTS, tree_mask_batch=masks), batch), {})


CHAIN, STAR = torch.ones(DRAFTS, DRAFTS).tril().bool(), torch.eye(DRAFTS).bool()


@pytest.mark.parametrize(
    ("grammar", "verify", "sites"),
    [(False, True, {"eagle-ngram-tree"}), (True, True, {"eagle-ngram-draft"}), (False, False, set())],
)
def test_ngrams_drafts_agree_on_the_device_and_with_a_grammar_on_the_host(grammar, verify, sites):
    step = ngram_step(CHAIN.repeat(2, 1, 1), [5, 9], grammar, verify)
    found = [point for point in points("0.5.17", "ngram") if "NGRAMWorker" in point.target]
    assert {point.sites for point in found} == {("eagle-ngram-draft",), ("eagle-ngram-tree",)}
    assert {site for point in found if (site := point.site_of(step))} == sites


def test_ngrams_agreed_tree_is_written_into_the_mask_that_spans_the_sequences():
    (point,) = (point for point in points("0.5.17", "ngram") if "eagle-ngram-tree" in point.sites)
    theirs = torch.stack((CHAIN, STAR, CHAIN))
    step, right = ngram_step(torch.stack((STAR, STAR, CHAIN)), [5, 9, 1]), ngram_step(theirs, [5, 9, 1])
    before = step.args[1].spec_info.custom_mask.clone()
    point.derive(step)
    assert torch.equal(step.args[1].spec_info.custom_mask, before), "without a change it changes nothing"

    def as_group_rank_0s(tokens, tree_mask, *rest):
        tree_mask.copy_(theirs.reshape(-1))

    tensors = point.tensors_of(step)
    LoneSync(overwrite={"eagle-ngram-tree": as_group_rank_0s}).sync("eagle-ngram-tree", *tensors)
    point.derive(step)
    assert torch.equal(step.args[1].spec_info.custom_mask, right.args[1].spec_info.custom_mask)
    assert {tuple(tensor.shape) for tensor in tensors} == {(9,), (27,), (3, 3)}, "sizes do not grow with the sequences"


def test_another_engine_has_none_of_them():
    assert points("0.5.17", engine="vllm") == []


@pytest.mark.parametrize(
    ("facts", "policy"),
    [
        (EngineFacts(engine="sglang", algorithm="dspark", model="/models/MiniMax-M3.1"), "rng"),
        (EngineFacts(engine="sglang", algorithm="dspark", model="Qwen"), None),
        (EngineFacts(engine="sglang", algorithm="eagle", model="MiniMax-M3"), None),
        (EngineFacts(engine="sglang", algorithm="dspark"), None),
        (Facts(model="MiniMax-M3"), None),
    ],
)
def test_minimax_m3_with_dspark_syncs_what_is_drawn(facts, policy):
    assert specsync_dspark.specsync_policy(facts) == policy
