import sys
from types import ModuleType, SimpleNamespace

import pytest
import specsync_eagle
import specsync_eagle.rocm as rocm
import torch
from specsync_eagle.sglang import VERIFY

from specsync_core import Call, EngineFacts
from specsync_core.engines.versions import is_among
from tests.unit.plugins.support import REGISTRY, LoneSync


def points(platform, version="0.5.17", engine="sglang"):
    """The hooked points of the verify, by the plugin that has them."""
    facts = EngineFacts(platform=platform, engine=engine, version=version)
    return {
        name: [
            point
            for point in plugin.specsync_broadcast_points(facts)
            if point.target == VERIFY and point.when != "engine" and is_among(version, point.versions)
        ]
        for name, plugin in (("eagle", specsync_eagle), ("rocm", rocm))
    }


@pytest.fixture(autouse=True)
def simulated_length(monkeypatch):
    """Stand in for the engine's module that holds the forced acceptance length; a value above 0 is in force."""
    module = SimpleNamespace(SIMULATE_ACC_LEN=-1.0)
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.spec_utils", module)
    return module


def call(*, all_greedy, batch=2, draft_probs=None, by_name=False):
    arguments = {
        "verify_input": SimpleNamespace(draft_probs=draft_probs),
        "batch": SimpleNamespace(sampling_info=SimpleNamespace(is_all_greedy=all_greedy)),
        "logits_output": None,
    }
    result = (
        torch.arange(batch * 4, dtype=torch.int32),
        torch.full((batch,), 3, dtype=torch.int32),
        torch.zeros((batch, 3) if batch else (0,), dtype=torch.int32),
    )
    return Call(() if by_name else tuple(arguments.values()), arguments if by_name else {}, result)


@pytest.mark.parametrize("platform", ["cuda", "cpu", "rocm", "xpu", None])
def test_one_plugin_has_the_verify_on_every_platform(platform):
    found = points(platform)
    owner, other = ("rocm", "eagle") if platform == "rocm" else ("eagle", "rocm")
    assert [point.target for point in found[owner]] == [VERIFY]
    assert found[other] == []


def test_rocm_asks_for_the_engines_communicator_inside_a_capture():
    assert [point.capture for point in points("rocm")["rocm"]] == ["engine-communicator"]
    assert [point.capture for point in points("cuda")["eagle"]] == ["never"]


def test_other_engines_have_no_point():
    assert points("rocm", engine="vllm") == {"eagle": [], "rocm": []}


@pytest.mark.parametrize("version", [f"0.5.{patch}" for patch in range(16, 24)])
def test_each_known_version_has_one_point(version):
    assert len(points("cuda", version)["eagle"]) == 1


def test_an_unknown_version_has_none_to_match():
    assert points("cuda", "9.9")["eagle"] == []


def test_simulated_acceptance_has_its_own_site_whatever_the_path(simulated_length):
    (point,) = points("cuda")["eagle"]
    simulated_length.SIMULATE_ACC_LEN = 2.5
    assert point.site_of(call(all_greedy=False)) == "eagle-accept-simulated"
    assert point.site_of(call(all_greedy=True)) == "eagle-accept-simulated"


@pytest.mark.parametrize("version", ["0.5.16", "0.5.17", "0.5.23"])
def test_the_tensors_are_those_of_the_result_in_the_registrys_order(version):
    (point,) = points("cuda", version)["eagle"]
    made = call(all_greedy=True)
    tensors = point.tensors_of(made)
    for site in point.sites:
        LoneSync().sync(site, *tensors)
    assert [spec.name for spec in REGISTRY.site(point.sites[0]).tensors] == [
        "predict",
        "accept_index",
        "num_correct_drafts",
    ]
    assert [id(tensor) for tensor in tensors] == [id(made.result[place]) for place in (0, 2, 1)]


@pytest.mark.parametrize(
    ("platform", "version", "all_greedy", "draft_probs", "site"),
    [
        ("cuda", "0.5.17", True, None, "eagle-verify-greedy"),
        ("cuda", "0.5.17", False, None, "eagle-verify-sample"),
        ("cpu", "0.5.17", False, None, "eagle-verify-greedy"),
        ("rocm", "0.5.17", False, None, "eagle-verify-greedy"),
        ("rocm", "0.5.17", False, "probabilities", "eagle-verify-greedy"),
        # The engine broadcasts these by itself, as it does what it sampled: no second broadcast.
        ("rocm", "0.5.18", True, None, "eagle-verify-sample"),
        ("rocm", "0.5.23", False, None, "eagle-verify-sample"),
        ("cuda", "0.5.23", False, "probabilities", "eagle-verify-sample"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_the_site_is_that_of_the_path_which_the_verify_took(platform, version, all_greedy, draft_probs, site, by_name):
    (point,) = points(platform, version)["rocm" if platform == "rocm" else "eagle"]
    assert point.site_of(call(all_greedy=all_greedy, draft_probs=draft_probs, by_name=by_name)) == site


def test_an_idle_batch_is_left_alone():
    (point,) = points("rocm")["rocm"]
    assert point.site_of(call(all_greedy=True, batch=0)) is None
