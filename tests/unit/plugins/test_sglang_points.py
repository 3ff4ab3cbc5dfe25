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


def ngram_batch(seq_len=100, requests=2, grammar=False, verify=True):
    drafts = 8
    tree = SimpleNamespace(
        draft_token=torch.zeros(requests * drafts, dtype=torch.int64),
        custom_mask=torch.ones(requests * drafts * (seq_len + drafts), dtype=torch.bool),
        positions=torch.zeros(requests * drafts, dtype=torch.int64),
        retrieve_index=torch.zeros(requests, drafts, dtype=torch.int64),
        retrieve_next_token=torch.zeros(requests, drafts, dtype=torch.int64),
        retrieve_next_sibling=torch.zeros(requests, drafts, dtype=torch.int64),
    )
    return SimpleNamespace(
        reqs=[None] * requests,
        seq_lens_cpu=torch.full((requests,), seq_len),
        has_grammar=grammar,
        forward_mode=SimpleNamespace(is_target_verify=lambda: verify),
        spec_info=tree,
    )


def ngram_sites(batch, platform):
    """The sites at which the drafts of one step agree."""
    call = Call((SimpleNamespace(draft_token_num=8), batch), {})
    found = [point for point in points("0.5.17", "ngram", platform) if "NGRAMWorker" in point.target]
    assert {point.sites for point in found} == {("eagle-ngram-draft",), ("eagle-ngram-tree",)}
    return {site for point in found if (site := point.site_of(call))}


@pytest.mark.parametrize(
    ("batch", "platform", "site"),
    [
        (ngram_batch(), "cuda", "eagle-ngram-tree"),
        (ngram_batch(), None, "eagle-ngram-tree"),
        (ngram_batch(seq_len=65_528), "cuda", "eagle-ngram-tree"),
        (ngram_batch(seq_len=65_529), "cuda", "eagle-ngram-draft"),
        (ngram_batch(seq_len=65_529), "cpu", "eagle-ngram-tree"),
        (ngram_batch(grammar=True), "cuda", "eagle-ngram-draft"),
        (ngram_batch(grammar=True), "cpu", "eagle-ngram-draft"),
    ],
)
def test_ngrams_drafts_agree_once_where_it_costs_least(batch, platform, site):
    """A mask of more than 1 MiB, and a grammar, make the hosts meet; on CPU the mask does not span the sequences."""
    assert ngram_sites(batch, platform) == {site}


def test_ngrams_tree_is_a_payload_of_its_site_and_a_prefill_has_none():
    (point,) = (point for point in points("0.5.17", "ngram") if "eagle-ngram-tree" in point.sites)
    worker = SimpleNamespace(draft_token_num=8)
    LoneSync().sync("eagle-ngram-tree", *point.tensors_of(Call((worker, ngram_batch()), {})))
    assert point.site_of(Call((worker, ngram_batch(verify=False)), {})) is None


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
