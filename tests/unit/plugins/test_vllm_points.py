"""Points in vLLM: which a method gets, and how they take their values. No engine is imported."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specsync_core import Call, EngineFacts, load_registry, plugin_manager
from specsync_core.engines.known import VLLM
from specsync_core.engines.start import find_points
from specsync_core.engines.vllm_points import V1_STEP, V2_STEP

REGISTRY = load_registry()
METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model", "medusa", "eagle", "eagle3", "mtp", "dflash", "dspark")


def points(method, version="0.32.0"):
    facts = EngineFacts(engine="vllm", version=version, algorithm=method, platform="cuda")
    return find_points(plugin_manager(), facts, VLLM.versions)


def the(method, ending, version="0.32.0"):
    (found,) = [point for point in points(method, version).points if point.target.endswith(ending)][:1]
    return found


@pytest.mark.parametrize("version", VLLM.versions)
@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_tokens_gate_seed_and_a_draft(method, version):
    found = points(method, version)
    assert found.problems == ()
    sites = {site for point in found.points for site in point.sites}
    assert {"vllm-tokens", "vllm-verdict", "vllm-seed", "vllm-drafter-gate"} <= sites
    if method != "dspark" or version == "0.32.0":
        assert any(point.proof == "draft" for point in found.points)


@pytest.mark.parametrize("method", METHODS)
def test_sites_exist_and_every_point_waits_for_the_engines_import(method):
    for point in points(method).points:
        assert point.only_if_imported
        for slug in point.sites:
            assert REGISTRY.site(slug).kind == ("consensus" if point.op or point.leads else "broadcast")


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_methods_that_draft_with_a_sharded_model_share_the_steps(method):
    for version in VLLM.versions:
        targets = [point.target for point in points(method, version).points if point.sites == ("vllm-draft-step",)]
        assert [targets.count(step) for step in (V1_STEP, V2_STEP)] == [1, 1]


def test_one_signature_of_each_target_fits_a_version():
    for version in VLLM.versions:
        for method in METHODS:
            seen = {}
            for point in points(method, version).points:
                assert seen.setdefault(point.target, point.signature) == point.signature


@pytest.mark.parametrize("method", ["custom_class", "extract_hidden_states", "mlp_speculator"])
def test_a_method_whose_drafts_are_not_known_is_refused(method):
    assert points(method).problems == (f"no installed plugin knows where vllm 0.32.0 decides for {method}",)


def test_an_unknown_version_is_a_problem():
    assert "vllm 0.40.0 is not known" in points("eagle", "0.40.0").problems[0]


def test_tokens_are_taken_from_the_samplers_output():
    point = the("eagle", "GPUModelRunner._sample")
    tokens = torch.tensor([[1, -1]], dtype=torch.int32)
    call = Call((), {}, SimpleNamespace(sampled_token_ids=tokens))
    assert point.site_of(call) == "vllm-tokens"
    assert point.tensors_of(call)[0] is tokens


def test_what_the_v2_runner_left_unwritten_is_no_divergence():
    point = the("eagle", "gpu.model_runner.GPUModelRunner.sample")
    tokens, sampled, rejected = torch.tensor([[5, 6, 77], [8, 99, 99]]), torch.tensor([2, 1]), torch.tensor([1, 2])
    call = Call((), {}, (SimpleNamespace(sampled_token_ids=tokens), sampled, rejected))
    assert point.site_of(call) == "vllm-verdict"
    taken = point.tensors_of(call)
    assert taken[0] is tokens
    assert taken[1:] == (sampled, rejected)
    assert tokens.tolist() == [[5, 6, 0], [8, 0, 0]]


def test_a_seed_is_synced_in_place_unless_the_request_brought_it():
    point = the("eagle", "SamplingStates.add_request")
    seeds = np.array([1, 2, 3], dtype=np.int64)
    states = SimpleNamespace(seeds=SimpleNamespace(np=seeds))
    call = Call((states, 1, SimpleNamespace(seed=None)), {}, True)
    (tensor,) = point.tensors_of(call)
    tensor.fill_(9)
    assert seeds.tolist() == [1, 9, 3]
    assert point.site_of(call) == "vllm-seed"
    assert point.site_of(Call((states, 1, SimpleNamespace(seed=5)), {}, True)) is None


def test_counts_are_agreed_on_before_the_scheduler_output_is_cut():
    point = the("ngram_gpu", "update_scheduler_for_invalid_drafts")
    waited, counts = [], torch.tensor([3, 1, 2])
    output = SimpleNamespace(scheduled_cached_reqs=SimpleNamespace(req_ids=["a", "gone", "b"]))
    event = SimpleNamespace(synchronize=lambda: waited.append(True))
    call = Call((event, counts, output, {"a": 2, "b": 0}), {})
    assert point.value_of(call) == [2, 3]
    assert waited == [True]
    point.put(call, [0, 1])
    assert counts.tolist() == [1, 1, 0]


def test_an_agreed_budget_replaces_the_one_that_the_manager_keeps():
    point = the("dspark", "get_num_tokens")
    manager = SimpleNamespace(_batch_budget=({"a": 3}, {"a": 1, "b": 1}, 2))
    point.put(Call((manager, {}, {}), {}, 4), 3)
    assert manager._batch_budget == ({"a": 3}, {"a": 1, "b": 1}, 1)


@pytest.mark.parametrize("version", ["0.24.0", "0.31.0", "0.32.0"])
def test_a_dummy_run_of_a_block_is_left_alone(version):
    point = the("dflash", "DFlashSpeculator.propose", version)
    drafts = torch.zeros(1, 3)
    real = {name: None for name in point.signature if name != "dummy_run"}
    assert point.site_of(Call((), real, drafts)) == "vllm-draft-block"
    assert point.site_of(Call((), {**real, "dummy_run": True}, drafts)) is None
    positional = tuple(name == "dummy_run" for name in point.signature)
    assert point.site_of(Call(positional, {}, drafts)) is None
