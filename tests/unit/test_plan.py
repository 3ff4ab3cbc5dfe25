"""The plan: precedence, origins, groups, digest, and what the operator is told."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsync_core.errors import GroupError, PolicyError, RegistryError
from specsync_core.facts import Facts
from specsync_core.hookspecs import hookimpl
from specsync_core.manager import PluginManager, load_registry
from specsync_core.plan import Plan, resolve_plan
from specsync_core.policy_file import PolicyFile, PolicyTables, read_policy_file
from specsync_core.registry import Registry
from specsync_core.registry_files import builtin_registry, merge_registries, read_registry

REGISTRY = merge_registries([builtin_registry()])
DSPARK = {site.slug for site in REGISTRY.sites if site.algorithm == "dspark"}
EVERY = {site.slug for site in REGISTRY.sites}


class Proposes:
    """A plugin with a policy hook."""

    def __init__(self, policy: str | None) -> None:
        self.policy = policy

    @hookimpl
    def specsync_policy(self, facts: Facts) -> str | None:
        return self.policy


def manager_of(**policies: str | None) -> PluginManager:
    manager = PluginManager()
    for name, policy in policies.items():
        manager.register(Proposes(policy), name, f"dist-{name}", "2.0")
    return manager


def policy_file(tmp_path: Path, text: str) -> PolicyFile:
    path = tmp_path / "specsync.toml"
    path.write_text(text)
    return read_policy_file(path)


def plan_of(
    environ: Mapping[str, str] | None = None,
    config: Path | PolicyFile | None = None,
    facts: Facts | None = None,
    manager: PluginManager | None = None,
    registry: Registry = REGISTRY,
) -> Plan:
    nothing = PolicyFile("nothing.toml", PolicyTables(), {})
    return resolve_plan(registry, environ or {}, config or nothing, facts, manager or manager_of())


def sites_in(plan: Plan, mode: str = "sync") -> set[str]:
    return {slug for slug in plan.sites if plan.mode(slug) == mode}


def test_the_default_is_every_site() -> None:
    plan = plan_of()
    assert sites_in(plan) == EVERY
    assert plan["dspark-plan"].mode.origin == "default (preset all)"
    assert plan.narrowing_warning() is None


def test_sites_come_in_the_order_of_their_numbers() -> None:
    assert [planned.site for planned in plan_of().sites.values()] == list(REGISTRY.sites)


def test_a_site_is_found_by_slug_number_and_itself() -> None:
    plan = plan_of({"SPECSYNC_SITES": "all:audit"})
    assert plan["dspark_plan"] is plan[7] is plan[REGISTRY.site(7)]
    assert plan.mode(7) == "audit"
    with pytest.raises(RegistryError, match="unknown site 'dspark-plam'"):
        plan["dspark-plam"]


def test_a_plan_is_frozen() -> None:
    with pytest.raises(TypeError):
        plan_of().sites["dspark-plan"] = None  # type: ignore[index]


def opt_in_registry(tmp_path: Path) -> Registry:
    path = tmp_path / "sites.toml"
    path.write_text(
        '[site.other-gate]\nnumber = 1000\nalgorithm = "other"\nphase = "plan"\nkind = "consensus"\ncause = "host"\n'
        'tensors = []\ngraph = false\nplatforms = ["cuda"]\nsummary = ""\n'
    )
    return merge_registries([builtin_registry(), read_registry(path, "other-dist")])


def test_the_default_is_narrowed_by_the_sites_platforms(tmp_path: Path) -> None:
    registry = opt_in_registry(tmp_path)
    assert plan_of(registry=registry, facts=Facts(platform="cuda")).mode(1000) == "sync"
    assert plan_of(registry=registry, facts=Facts(platform=None)).mode(1000) == "sync"
    on_rocm = plan_of(registry=registry, facts=Facts(platform="rocm"))
    assert on_rocm.mode(1000) == "off"
    assert on_rocm[1000].mode.origin == "default (on rocm the site is opt-in)"
    chosen = plan_of({"SPECSYNC_SITES": "all"}, registry=registry, facts=Facts(platform="rocm"))
    assert chosen.mode(1000) == "sync"


def test_precedence_and_what_was_rejected(tmp_path: Path) -> None:
    manager = manager_of(other="rng")
    by_plugin = plan_of(manager=manager)["dspark-plan"].mode
    assert (by_plugin.value, by_plugin.origin) == ("off", "plugin other of dist-other (not selected)")
    assert by_plugin.rejected == (("sync", "default (preset all)"),)
    assert plan_of(manager=manager)["dspark-target"].mode.origin == "plugin other of dist-other (preset rng)"

    config = policy_file(tmp_path, 'sites = "all:audit"')
    by_file = plan_of(config=config, manager=manager)["dspark-plan"].mode
    assert (by_file.value, by_file.origin) == ("audit", f"{tmp_path / 'specsync.toml'}:1 (preset all:audit)")

    by_variable = plan_of({"SPECSYNC_SITES": "7"}, config, manager=manager)["dspark-plan"].mode
    assert (by_variable.value, by_variable.origin) == ("sync", "SPECSYNC_SITES (dspark-plan)")
    assert by_variable.rejected == (
        ("audit", f"{tmp_path / 'specsync.toml'}:1 (preset all:audit)"),
        ("off", "plugin other of dist-other (not selected)"),
        ("sync", "default (preset all)"),
    )


def test_a_stronger_source_replaces_the_weaker_one_whole(tmp_path: Path) -> None:
    config = policy_file(tmp_path, 'sites = "all"')
    plan = plan_of({"SPECSYNC_SITES": "init"}, config)
    assert sites_in(plan) == {"dspark-mem", "dflash-mem"}
    assert plan["dspark-plan"].mode.origin == "SPECSYNC_SITES (not selected)"


def test_an_empty_policy_turns_everything_off() -> None:
    assert sites_in(plan_of({"SPECSYNC_SITES": ""}), "off") == EVERY


def test_the_published_variable() -> None:
    plan = plan_of({"SGLANG_SPEC_TP_SYNC": "all,-dspark_plan"})
    assert sites_in(plan) == EVERY - {"dspark-plan"}
    assert plan["dspark-plan"].mode.origin == "SGLANG_SPEC_TP_SYNC (-dspark-plan)"


def test_files_are_found_by_variable_and_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specsync.toml").write_text('\nsites = "rng"')
    (tmp_path / "other.toml").write_text('sites = "init"')
    here = resolve_plan(REGISTRY, {}, manager=manager_of())
    assert here["dspark-mem"].mode.origin == "specsync.toml:2 (preset rng)"
    named = resolve_plan(REGISTRY, {"SPECSYNC_CONFIG": "other.toml"}, manager=manager_of())
    assert named["dspark-mem"].mode.origin == "other.toml:1 (preset init)"
    given = resolve_plan(REGISTRY, {"SPECSYNC_CONFIG": "none.toml"}, config="other.toml", manager=manager_of())
    assert given == named


def test_the_processs_own_environment_and_plugins_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_SITES", "init")
    plan = resolve_plan(REGISTRY)
    assert sites_in(plan) == {"dspark-mem", "dflash-mem"}
    assert [plugin.name for plugin in plan.plugins] == ["dflash", "dspark", "eagle", "eagle-rocm", "vllm"]


def test_algorithm_tables_decide_about_their_own_sites_only(tmp_path: Path) -> None:
    plan = plan_of(config=policy_file(tmp_path, '[algorithms.dspark]\nsites = "all:audit,-dspark-plan"'))
    assert sites_in(plan, "audit") == DSPARK - {"dspark-plan"}
    assert sites_in(plan, "off") == {"dspark-plan"}
    assert sites_in(plan) == EVERY - DSPARK


def test_algorithm_tables_are_stronger_than_the_files_own_policy(tmp_path: Path) -> None:
    plan = plan_of(config=policy_file(tmp_path, 'sites = "init"\n[algorithms.DSPARK]\nsites = "all"'))
    assert sites_in(plan) == DSPARK | {"dflash-mem"}
    plan = plan_of({"SPECSYNC_SITES": "none"}, policy_file(tmp_path, '[algorithms.dspark]\nsites = "all"'))
    assert sites_in(plan) == set()


MODELS = """\
sites = "all"
[algorithms.dspark]
sites = "off"
[models."*qwen*"]
sites = "rng"
transport = "group"
[models."*qwen*".algorithms.eagle]
sites = "all:audit"
[models."*qwen3*"]
transport = "grouped"
[models."*qwen3*".algorithms.eagle]
sites = "eagle-target"
"""


def test_models_are_stronger_than_algorithms_and_later_models_than_earlier(tmp_path: Path) -> None:
    config = policy_file(tmp_path, MODELS)
    other = plan_of(config=config, facts=Facts(model="Llama"))
    assert (other.mode("dspark-mem"), other.mode("eagle-draft"), other[7].transport.value) == ("off", "sync", "auto")

    qwen = plan_of(config=config, facts=Facts(model="Org/Qwen-2"))
    assert (qwen.mode("dspark-mem"), qwen.mode("dspark-plan"), qwen.mode("eagle-draft")) == ("sync", "off", "audit")
    assert qwen[7].transport.value == "group"

    qwen3 = plan_of(config=config, facts=Facts(model="Org/Qwen3"))
    assert (qwen3.mode("dspark-mem"), qwen3.mode("eagle-draft"), qwen3.mode("eagle-target")) == ("sync", "off", "sync")
    assert qwen3[7].transport.rejected[0] == ("group", f"{tmp_path / 'specsync.toml'}:6")


def test_model_tables_without_a_known_model_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="specsync"):
        plan_of(config=policy_file(tmp_path, MODELS))
    (message,) = caplog.messages
    assert message.endswith("specsync.toml: the model is not known here, so none of the tables [models] applies.")


def test_user_presets_serve_file_and_environment(tmp_path: Path) -> None:
    config = policy_file(tmp_path, 'sites = "Careful_One"\n[presets]\ncareful_one = "all,-dspark-plan"')
    assert sites_in(plan_of(config=config)) == EVERY - {"dspark-plan"}
    assert sites_in(plan_of({"SPECSYNC_SITES": "careful-one:audit"}, config), "audit") == EVERY - {"dspark-plan"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('sites = "dspark-plam"', ":1: unknown token 'dspark-plam' (did you mean 'dspark-plan'?)."),
        ('[presets]\nrng = "all"', ":2: 'rng' is the name of a registry's preset. Choose another."),
        ('[presets]\nmine = "dspark-plam"', ":2: unknown token 'dspark-plam'"),
        ('[presets]\n"a b" = "all"', ":2: preset 'a b': a name is words of letters and digits joined by '-'."),
        ('[presets]\na-b = "all"\na_b = "all"', ":3: preset 'a_b' is the same as the one in "),
        (
            '[algorithms.dsprak]\nsites = "all"',
            ":1: unknown algorithm 'dsprak' (did you mean 'dspark'?). Known: dflash,",
        ),
        ('[algorithms.dspark]\nsites = "eagle-draft"', ":2: token 'eagle-draft' names no site of algorithm 'dspark'."),
        ('[models.never]\nsites = "dspark-plam"', ":2: unknown token 'dspark-plam'"),
        ('[models.never.algorithms.dsprak]\nsites = "all"', ":1: unknown algorithm 'dsprak'"),
    ],
)
def test_every_policy_in_a_file_is_checked(tmp_path: Path, text: str, expected: str) -> None:
    config = policy_file(tmp_path, text)
    with pytest.raises(PolicyError) as caught:
        plan_of({"SPECSYNC_SITES": "all"}, config, Facts(model="x"))
    assert str(caught.value).startswith(f"{tmp_path / 'specsync.toml'}{expected}")


def test_every_problem_is_told(tmp_path: Path) -> None:
    config = policy_file(tmp_path, 'sites = "typo-one"\n[algorithms.dspark]\nsites = "typo-two"')
    with pytest.raises(PolicyError, match=r"(?s)typo-one.*typo-two.*typo-three.*typo-four.*SPECSYNC_DISABLE=other\.$"):
        plan_of({"SPECSYNC_SITES": "typo-three"}, config, manager=manager_of(other="typo-four"))


def test_plugins_that_agree_and_plugins_without_an_answer() -> None:
    plan = plan_of(manager=manager_of(a="rng", b=" RNG,", c=None, d="init,rng"))
    assert sites_in(plan) == {site.slug for site in REGISTRY.preset_sites("rng")}


def test_plugins_that_disagree(tmp_path: Path) -> None:
    manager = manager_of(a="rng", b="all:audit")
    with pytest.raises(PolicyError) as caught:
        plan_of(manager=manager)
    assert str(caught.value) == (
        "plugins propose different policies: plugin a of dist-a says 'rng'; plugin b of dist-b says 'all:audit'.\n"
        "  Decide with SPECSYNC_SITES or the policy file's key 'sites', or leave plugins out with SPECSYNC_DISABLE."
    )
    with pytest.raises(PolicyError, match="plugins propose different policies"):
        plan_of(config=policy_file(tmp_path, '[algorithms.dspark]\nsites = "all"'), manager=manager)


def test_plugins_may_disagree_where_something_stronger_decides(tmp_path: Path) -> None:
    manager = manager_of(a="rng", b="all:audit")
    assert sites_in(plan_of({"SPECSYNC_SITES": "7"}, manager=manager)) == {"dspark-plan"}
    plan = plan_of(config=policy_file(tmp_path, 'sites = "7"'), manager=manager)
    assert plan[7].mode.rejected[:2] == (
        ("audit", "plugin b of dist-b (preset all:audit)"),
        ("off", "plugin a of dist-a (not selected)"),
    )


def test_scalars_and_their_origins(tmp_path: Path) -> None:
    plan = plan_of()
    assert (plan.timeout_s, plan.timeout.origin, plan.counters, plan.counting.origin) == (
        30,
        "default",
        True,
        "default",
    )
    config = policy_file(tmp_path, 'transport = "group"\ntimeout_s = 5\ncounters = false')
    plan = plan_of(config=config)
    assert (plan.timeout_s, plan.counters, plan[7].transport.value) == (5, False, "group")
    assert plan.timeout.origin.endswith("specsync.toml:2")
    environ = {"SPECSYNC_TIMEOUT_S": "7", "SPECSYNC_COUNTERS": "on", "SPECSYNC_TRANSPORT": "grouped"}
    plan = plan_of(environ, config)
    assert (plan.timeout_s, plan.counters, plan[7].transport.value) == (7, True, "grouped")
    assert (plan.timeout.origin, plan.counting.origin) == ("SPECSYNC_TIMEOUT_S", "SPECSYNC_COUNTERS")
    assert plan[7].transport.rejected == (("group", f"{tmp_path / 'specsync.toml'}:1"), ("auto", "default"))


def test_groups() -> None:
    unknown, on, off = (plan_of(facts=Facts(dp_attention=flag)) for flag in (None, True, False))
    assert (unknown[7].group.value, unknown[7].group.origin) == ("tp", "dp attention is not known yet")
    assert (off[7].group.value, off[7].group.origin) == ("tp", "dp attention is off")
    assert (on[7].group.value, on[7].group.origin) == ("attn_tp", "dp attention is on")
    assert on[7].group.rejected == (("tp", "idle DP ranks would not take part"),)
    assert {plan["dspark-mem"].group.value for plan in (unknown, on, off)} == {"capture"}


def test_other_host_agreements_go_over_the_whole_group(tmp_path: Path) -> None:
    plan = plan_of(registry=opt_in_registry(tmp_path), facts=Facts(dp_attention=True))
    assert plan["other-gate"].group.value == "tp"


def test_groups_are_bound_when_they_are_known() -> None:
    bound = plan_of().with_dp_attention(True)
    assert bound.facts.dp_attention is True
    assert bound == plan_of(facts=Facts(dp_attention=True))
    assert bound[7].group == plan_of(facts=Facts(dp_attention=True))[7].group
    assert bound.with_dp_attention(True) == bound
    assert plan_of().with_dp_attention(False).digest == plan_of().digest


@pytest.mark.parametrize(
    ("known", "words"), [(True, "dp attention on, but .* it off"), (False, "dp attention off, but .* it on")]
)
def test_groups_that_contradict_the_facts(known: bool, words: str) -> None:
    with pytest.raises(GroupError, match=words):
        plan_of(facts=Facts(dp_attention=known)).with_dp_attention(not known)


def test_plans_are_equal_when_their_decisions_are() -> None:
    by_default, by_variable = plan_of(), plan_of({"SPECSYNC_SITES": "all", "SPECSYNC_TIMEOUT_S": "3"})
    assert by_default == by_variable
    assert hash(by_default) == hash(by_variable)
    assert re.fullmatch("[0-9a-f]{64}", by_default.digest)
    assert by_default != "all"


@pytest.mark.parametrize(
    "environ",
    [
        {"SPECSYNC_SITES": "all,-7"},
        {"SPECSYNC_SITES": "all,7:audit"},
        {"SPECSYNC_TRANSPORT": "group"},
        {"SPECSYNC_COUNTERS": "off"},
    ],
)
def test_every_decision_is_in_the_digest(environ: dict[str, str]) -> None:
    assert plan_of(environ) != plan_of()


def test_groups_and_declarations_are_in_the_digest(tmp_path: Path) -> None:
    assert plan_of(facts=Facts(dp_attention=True)) != plan_of()
    registry = opt_in_registry(tmp_path)
    gate = registry.site("other-gate")
    changed = [site.model_copy(update={"summary": "another"}) if site == gate else site for site in registry.sites]
    other = Registry(tuple(changed), registry.presets, registry.handles, registry.sources)
    assert plan_of(registry=other) != plan_of(registry=registry)


def test_the_summary_is_json() -> None:
    summary = plan_of().summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["sites"]["dspark-plan"].keys() == {"mode", "group", "transport", "declaration"}


def test_the_digest_is_the_same_in_every_process() -> None:
    code = "from specsync_core import load_registry, resolve_plan; print(resolve_plan(load_registry(), {}).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {f"{resolve_plan(load_registry(), {}).digest}\n"}


def test_differences_name_site_and_values() -> None:
    mine = plan_of({"SPECSYNC_COUNTERS": "off"}, manager=manager_of(a=None, b=None))
    theirs = plan_of(
        {"SPECSYNC_SITES": "all,-7,8:audit", "SPECSYNC_TRANSPORT": "group"}, manager=manager_of(a=None, c=None)
    )
    lines = mine.differences(theirs.summary(), "on group rank 0", "on group rank 1")
    assert "dspark-plan mode: sync on group rank 0, off on group rank 1" in lines
    assert "dspark-accept-greedy mode: sync on group rank 0, audit on group rank 1" in lines
    assert "dspark-plan transport: auto on group rank 0, group on group rank 1" in lines
    assert "counters: False on group rank 0, True on group rank 1" in lines
    assert "plugins b: dist-b 2.0 on group rank 0, absent on group rank 1" in lines
    assert "plugins c: absent on group rank 0, dist-c 2.0 on group rank 1" in lines
    assert mine.differences(mine) == []


def test_differences_name_sites_that_only_one_side_has(tmp_path: Path) -> None:
    more = plan_of(registry=opt_in_registry(tmp_path))
    assert plan_of().differences(more) == ["other-gate: absent here, present there"]


def test_plugin_versions_differ_although_the_decisions_are_equal() -> None:
    old, new = PluginManager(), PluginManager()
    old.register(Proposes(None), "a", "dist-a", "1.0")
    new.register(Proposes(None), "a", "dist-a", "2.0")
    assert plan_of(manager=old) == plan_of(manager=new)
    assert plan_of(manager=old).differences(plan_of(manager=new)) == ["plugins a: dist-a 1.0 here, dist-a 2.0 there"]


def warning_of(environ: Mapping[str, str]) -> str:
    warning = plan_of(environ).narrowing_warning()
    assert warning is not None
    return " ".join(warning.split())


def test_the_warning_tells_how_many_which_why_and_what_to_do() -> None:
    warning = warning_of({"SPECSYNC_SITES": "all,-7,-8,9:audit"})
    count = len(REGISTRY.sites)
    assert warning.startswith(f"the plan is narrower than 'all': 3 of {count} sites are not synchronised.")
    assert "off by SPECSYNC_SITES (-dspark-plan): dspark-plan " in warning
    assert "off by SPECSYNC_SITES (-dspark-accept-greedy): dspark-accept-greedy " in warning
    assert "audit by SPECSYNC_SITES (dspark-accept-sample:audit): dspark-accept-sample " in warning
    assert "At a site that is off, ranks may decide differently; the group then hangs" in warning
    assert "At a site in audit, ranks are compared and differences counted, but not healed." in warning
    assert "Set SPECSYNC_SITES=all to synchronise everything" in warning
    assert "to compare every site and change no value, set SPECSYNC_SITES=all:audit" in warning


def test_the_warning_groups_sites_by_reason_and_never_breaks_a_slug() -> None:
    warning = plan_of({"SPECSYNC_SITES": "init"}).narrowing_warning()
    assert warning is not None
    assert warning.count("SPECSYNC_SITES (not selected)") == 1
    assert max(map(len, warning.splitlines())) <= 110
    assert all(slug in warning for slug in EVERY - {"dspark-mem", "dflash-mem"})


def test_in_audit_alone_nothing_is_said_about_sites_that_are_off() -> None:
    warning = warning_of({"SPECSYNC_SITES": "all:audit"})
    assert "site that is off" not in warning
    assert "all:audit" not in warning.split("Set SPECSYNC_SITES")[1]


def test_a_policy_that_begins_by_removing_is_explained() -> None:
    explained = (
        "SPECSYNC_SITES: a policy starts empty, so '-dspark-plan' removes from nothing: write 'all,-dspark-plan'."
    )
    assert explained in warning_of({"SPECSYNC_SITES": "-DSpark_Plan"})
    assert "starts empty" not in warning_of({"SPECSYNC_SITES": "all,-dspark-plan"})


def test_only_policies_in_force_are_explained(tmp_path: Path) -> None:
    config = policy_file(tmp_path, 'sites = "-dspark-plan"')
    assert plan_of(config=config).advice[0].startswith(f"{tmp_path / 'specsync.toml'}:1: a policy starts empty")
    assert plan_of({"SPECSYNC_SITES": "7"}, config).advice == ()


def test_the_way_out_of_the_published_variable() -> None:
    assert "Unset SGLANG_SPEC_TP_SYNC and set SPECSYNC_SITES=all" in warning_of({"SGLANG_SPEC_TP_SYNC": "rng"})


@given(st.lists(st.sampled_from(sorted(REGISTRY.words))))
def test_a_plan_says_what_its_policy_says(words: list[str]) -> None:
    selected = frozenset().union(*(REGISTRY.words[word].sites for word in words)) if words else frozenset()
    plan = plan_of({"SPECSYNC_SITES": ",".join(words)})
    assert sites_in(plan) == {site.slug for site in selected}
    assert (plan.narrowing_warning() is None) == (selected == set(REGISTRY.sites))
