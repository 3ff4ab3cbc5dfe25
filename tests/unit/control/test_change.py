"""What a request means under a plan."""

import pytest

from specsync_core import Facts, load_registry, resolve_plan
from specsync_core.control.change import CONSENSUS, some_sites, whole_policy
from specsync_core.errors import ControlError, PolicyError

REGISTRY = load_registry()


def plan_of(policy: str = "all", config=None):
    return resolve_plan(REGISTRY, {"SPECSYNC_SITES": policy}, config, facts=Facts(platform="cpu"))


CONSENSUS_SITES = {site.slug for site in REGISTRY.sites if site.kind == "consensus"}


def test_a_policy_decides_about_every_site_that_can_change():
    change = whole_policy("all,-dspark-plan,dflash:audit", plan_of(), {})
    assert change.modes["dspark-plan"] == "off"
    assert set(change.modes) == {"dspark-plan"} | {
        site.slug for site in REGISTRY.sites if site.algorithm == "dflash" and site.kind != "consensus"
    }
    assert change.kept == {"dflash-mem": CONSENSUS}


def test_what_a_policy_does_not_name_goes_off_and_gates_stay():
    change = whole_policy("dspark-plan", plan_of(), {"eagle-draft": "not here"})
    assert "dspark-plan" not in change.modes
    assert change.modes["dspark-target"] == "off"
    assert change.kept == dict.fromkeys(CONSENSUS_SITES, CONSENSUS) | {"eagle-draft": "not here"}


def test_some_sites_leave_all_others_alone():
    change = some_sites("dspark-plan, 8", "Audit", plan_of("all,8:audit"), {})
    assert (dict(change.modes), dict(change.kept)) == ({"dspark-plan": "audit"}, {})
    assert list(some_sites("all", "off", plan_of(), {}).modes) == [
        site.slug for site in REGISTRY.sites if site.kind != "consensus"
    ]


def test_presets_of_the_policy_file_are_known(tmp_path):
    file = tmp_path / "specsync.toml"
    file.write_text('[presets]\nwatch = "all,dspark-plan:audit"\n')
    plan = resolve_plan(REGISTRY, {}, file, facts=Facts(platform="cpu"))
    assert dict(whole_policy("watch", plan, {}).modes) == {"dspark-plan": "audit"}


@pytest.mark.parametrize("policy", ["all,-dspark-mem", "all,dspark-mem:audit", "all,-1", "all,-01", "all,-DSPARK_MEM"])
def test_a_site_that_must_stay_is_refused_when_it_is_named(policy):
    with pytest.raises(ControlError, match=r"^dspark-mem stays sync: a host agreement stays as it was at the start"):
        whole_policy(policy, plan_of(), {})
    assert not whole_policy("all,dspark-mem", plan_of(), {}).modes


def test_every_refusal_is_told_at_once():
    with pytest.raises(ControlError) as caught:
        some_sites("dspark-mem,dspark-plan,dspark-target", "off", plan_of(), {"dspark-plan": "the engine has it"})
    assert str(caught.value).splitlines() == [
        f"dspark-mem stays sync: {CONSENSUS}.",
        "dspark-plan stays sync: the engine has it.",
        "  Leave it out, and it stays as it is.",
    ]


def test_an_unknown_word_names_the_known_ones():
    with pytest.raises(PolicyError) as caught:
        whole_policy("all,-dspark-plam", plan_of(), {})
    assert "unknown token 'dspark-plam' (did you mean 'dspark-plan'?)" in str(caught.value)
    assert "Presets: all, init, none, off, rng." in str(caught.value)
    assert str(caught.value).endswith(", ".join(site.slug for site in REGISTRY.sites) + ".")


@pytest.mark.parametrize(
    ("words", "mode", "error"),
    [
        ("dspark-plan", "of", r"unknown mode 'of' \(did you mean 'off'\?\)\. Modes: sync, audit, off\."),
        (
            "dspark-plan:audit",
            "off",
            "'dspark-plan:audit' is no name of sites. Give names here, and one mode",
        ),
        ("-dspark-plan", "off", "'-dspark-plan' is no name of sites."),
        (" , ", "off", "no site is named. List the sites with `specsync sites`."),
    ],
)
def test_malformed_requests_for_a_mode(words, mode, error):
    with pytest.raises(ControlError, match=error):
        some_sites(words, mode, plan_of(), {})


@pytest.mark.parametrize("policy", ["", " ", ",,"])
def test_an_empty_policy_is_a_mistake(policy):
    with pytest.raises(ControlError, match=r"the policy is empty\. Write 'off' to turn every site off that can be\."):
        whole_policy(policy, plan_of(), {})


def test_modes_make_another_plan_and_the_way_back_is_the_same_plan():
    plan = plan_of()
    other = plan.with_modes({"dspark-plan": "off"}, "specsync ctl at step 3")
    assert other.digest != plan.digest
    assert other["dspark-plan"].mode.origin == "specsync ctl at step 3"
    assert other["dspark-plan"].mode.rejected == (("sync", "SPECSYNC_SITES (preset all)"),)
    assert other.with_modes({"dspark-plan": "sync"}, "x") == plan
