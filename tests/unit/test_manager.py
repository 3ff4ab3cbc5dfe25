"""Plugins: how they are found, how they are held to the hooks, and how each failure names its plugin."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specsync_core.algorithm import Algorithm
from specsync_core.engines.start import find_points
from specsync_core.errors import PluginError, RegistryError
from specsync_core.facts import EngineFacts, Facts
from specsync_core.hookspecs import BroadcastPoint, Specs, hookimpl
from specsync_core.manager import HOOKS, PluginInfo, PluginManager, load_registry, plugin_manager

Install = Callable[..., Path]

BUILT_IN = ["dflash", "dspark", "eagle", "eagle-rocm", "vllm"]

POLICY = """
from specsync_core import hookimpl

@hookimpl
def specsync_policy(facts):
    return "rng"
"""


def refusal(install: Install, source: str, **how: str) -> str:
    install("bad", source, **how)
    with pytest.raises(PluginError) as caught:
        plugin_manager({})
    return str(caught.value)


def asked(plugin: object) -> PluginManager:
    manager = PluginManager()
    manager.register(plugin, "bad", "dist-bad", "3.0")
    return manager


def names(manager: PluginManager) -> list[str]:
    return [info.name for info in manager.plugins()]


def test_the_built_in_algorithms_come_through_the_same_door() -> None:
    manager = plugin_manager({})
    assert names(manager) == BUILT_IN
    assert {(info.distribution, info.status) for info in manager.plugins()} == {("specsync-core", "active")}
    assert set(manager.algorithms()) == {"dflash", "dspark", "eagle"}


def test_every_hook_is_known() -> None:
    assert HOOKS == ("specsync_algorithm", "specsync_broadcast_points", "specsync_policy", "specsync_sites")
    assert all(hasattr(Specs, hook) for hook in HOOKS)


def test_an_installed_plugin_is_found(install_plugin: Install) -> None:
    install_plugin("other", POLICY, distribution="specsync-other", version="1.2")
    manager = plugin_manager({})
    assert (
        PluginInfo("other", "specsync-other", "1.2", "specsync_other_other_plugin", hooks=("specsync_policy",))
        in manager.plugins()
    )
    assert [(info.name, policy) for info, policy in manager.policies(Facts())] == [("other", "rng")]


def test_an_entry_point_may_name_an_object(install_plugin: Install) -> None:
    source = POLICY.replace("def", "class Plugin:\n    @hookimpl\n    def").replace("@hookimpl\nclass", "class")
    install_plugin(
        "other",
        source.replace("(facts):\n    return", "(self, facts):\n        return") + "\nplugin = Plugin()",
        value="{}:plugin",
    )
    assert [policy for _, policy in plugin_manager({}).policies(Facts())] == ["rng"]


def test_a_disabled_plugin_is_not_imported(install_plugin: Install) -> None:
    install_plugin("bad", "raise RuntimeError")
    manager = plugin_manager({"SPECSYNC_DISABLE": "bad,eagle-rocm"})
    status = {info.name: info.status for info in manager.plugins()}
    assert status == {
        "bad": "disabled",
        "dflash": "active",
        "dspark": "active",
        "eagle": "active",
        "eagle-rocm": "disabled",
        "vllm": "active",
    }


def test_the_processs_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_DISABLE", "eagle")
    assert "eagle" not in plugin_manager().algorithms()


def test_a_misspelt_plugin_in_the_disable_list() -> None:
    with pytest.raises(PluginError) as caught:
        plugin_manager({"SPECSYNC_DISABLE": "eagel"})
    assert str(caught.value) == (
        "SPECSYNC_DISABLE: unknown plugin 'eagel' (did you mean 'eagle'?)."
        " Installed: dflash, dspark, eagle, eagle-rocm, vllm. List them with `specsync plugins`."
    )


def test_a_plugin_in_the_disable_list_that_is_not_installed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="specsync"):
        plugin_manager({"SPECSYNC_DISABLE": "something-else"})
    (message,) = caplog.messages
    assert re.fullmatch(
        r"SPECSYNC_DISABLE: plugin 'something-else' is not installed\. Installed: .*\beagle\b.*\.", message
    )


def test_a_plugin_that_cannot_be_imported(install_plugin: Install) -> None:
    message = refusal(install_plugin, "import no_such_module", distribution="dist-bad", version="0.3")
    assert message == (
        "plugin 'bad' of dist-bad 0.3 (entry point dist_bad_bad_plugin): it cannot be imported:"
        " ModuleNotFoundError: No module named 'no_such_module'.\n"
        "  Mend or remove it, or leave it out with SPECSYNC_DISABLE=bad."
    )


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "def (", "1 / 0", "raise Exception"])
def test_however_the_import_fails(install_plugin: Install, source: str) -> None:
    assert "it cannot be imported: " in refusal(install_plugin, source)


def test_an_entry_point_that_names_nothing(install_plugin: Install) -> None:
    assert "it cannot be imported: AttributeError" in refusal(install_plugin, "", value="{}:plugin")


def test_an_entry_point_that_names_a_class(install_plugin: Install) -> None:
    assert "it names the class Plugin; name a module, or an instance of the class." in refusal(
        install_plugin, "class Plugin: pass", value="{}:Plugin"
    )


def test_two_distributions_with_one_name(install_plugin: Install) -> None:
    install_plugin("other", POLICY, distribution="dist-a")
    install_plugin("other", POLICY, distribution="dist-b")
    with pytest.raises(
        PluginError, match=r"plugin 'other' of dist-. .*: the name is taken already by the plugin 'other' of dist-"
    ):
        plugin_manager({})


def test_a_misspelt_hook(install_plugin: Install) -> None:
    message = refusal(install_plugin, POLICY.replace("specsync_policy", "specsync_polcy"))
    assert "plugin 'bad' of specsync-bad 1.0 " in message
    assert "unknown hook specsync_polcy (did you mean 'specsync_policy'?). Known hooks: specsync_algorithm, " in message
    assert "SPECSYNC_DISABLE=bad" in message


def test_a_misspelt_hook_without_the_prefix(install_plugin: Install) -> None:
    assert "unknown hook policy" in refusal(install_plugin, POLICY.replace("specsync_policy", "policy"))


def test_a_hook_that_is_not_marked(install_plugin: Install) -> None:
    assert "function specsync_policy is not marked as a hook. Put @hookimpl above it." in refusal(
        install_plugin, POLICY.replace("@hookimpl", "")
    )


def test_a_misspelt_hook_that_is_not_marked(install_plugin: Install) -> None:
    source = POLICY.replace("@hookimpl", "").replace("specsync_policy", "specsync_polcy")
    assert "unknown hook specsync_polcy (did you mean 'specsync_policy'?)." in refusal(install_plugin, source)


def test_a_wrong_argument_shows_the_right_signature(install_plugin: Install) -> None:
    assert (
        "hook specsync_policy: unknown argument 'fcats' (did you mean 'facts'?)."
        " The hook is specsync_policy(facts: Facts) -> str | None."
        in refusal(install_plugin, POLICY.replace("(facts)", "(fcats)"))
    )


def test_an_argument_where_the_hook_has_none(install_plugin: Install) -> None:
    source = POLICY.replace("specsync_policy(facts)", "specsync_sites(facts)")
    assert "hook specsync_sites: unknown argument 'facts'. The hook is specsync_sites() -> " in refusal(
        install_plugin, source
    )


def test_what_only_pluggy_sees_is_told_with_the_plugin(install_plugin: Install) -> None:
    source = POLICY.replace("@hookimpl", "@hookimpl(wrapper=True)")  # a wrapper must be a generator
    message = refusal(install_plugin, source)
    assert message.startswith("plugin 'bad' of specsync-bad 1.0 ")
    assert "specsync_policy" in message


def test_a_hook_may_take_fewer_arguments_and_defaults(install_plugin: Install) -> None:
    install_plugin("other", POLICY.replace("(facts)", "(extra=1, *args, **kwargs)"))
    assert [policy for _, policy in plugin_manager({}).policies(Facts())] == ["rng"]


def test_a_plugin_without_hooks_is_logged(install_plugin: Install, caplog: pytest.LogCaptureFixture) -> None:
    install_plugin("other", "")
    with caplog.at_level(logging.WARNING, logger="specsync"):
        plugin_manager({})
    assert caplog.messages == [
        "plugin 'other' of specsync-other 1.0 (entry point other_other_plugin) implements no hook."
    ]


def test_broken_plugins_can_be_collected(install_plugin: Install) -> None:
    install_plugin("bad", "import no_such_module")
    install_plugin("worse", POLICY.replace("specsync_policy", "specsync_polcy"))
    manager = PluginManager(keep_going=True)
    manager.load()
    assert {info.name for info in manager.plugins() if info.status == "broken"} == {"bad", "worse"}
    assert len(manager.problems) == 2


class Hooks:
    """A plugin that answers what it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def give(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Policy(Hooks):
    @hookimpl
    def specsync_policy(self) -> Any:
        return self.give()


class Sites(Hooks):
    @hookimpl
    def specsync_sites(self) -> Any:
        return self.give()


class Points(Hooks):
    @hookimpl
    def specsync_broadcast_points(self, engine: EngineFacts) -> Any:
        return self.give()


class Offers(Hooks):
    @hookimpl
    def specsync_algorithm(self) -> Any:
        return self.give()


def point(target: str, **options: Any) -> BroadcastPoint:
    known = {
        "when": "after",
        "sites": ("dspark-plan",),
        "site_of": lambda call: None,
        "tensors_of": lambda call: (),
        "versions": ">=1",
        "signature": (),
    }
    return BroadcastPoint(target, **{**known, **options})


def test_a_hook_that_raises_names_its_plugin() -> None:
    with pytest.raises(PluginError) as caught:
        asked(Policy(KeyError("model"))).policies(Facts())
    assert str(caught.value) == (
        "plugin 'bad' of dist-bad 3.0 (entry point Policy): hook specsync_policy raises KeyError: 'model'.\n"
        "  Mend or remove it, or leave it out with SPECSYNC_DISABLE=bad."
    )
    assert isinstance(caught.value.__cause__, KeyError)


class Leaves:
    @hookimpl
    def specsync_policy(self) -> str:
        sys.exit(4)


def test_a_hook_that_exits_names_its_plugin() -> None:
    with pytest.raises(PluginError, match=r"plugin 'bad' .* hook specsync_policy raises SystemExit: 4"):
        asked(Leaves()).policies(Facts())


@pytest.mark.parametrize(
    ("plugin", "ask", "expected"),
    [
        (Policy(7), lambda manager: manager.policies(Facts()), "specsync_policy returns 7, not a policy or None."),
        (
            Sites("sites.toml"),
            lambda manager: manager.registry_files(),
            "specsync_sites returns 'sites.toml', not a path.",
        ),
        (Offers("x"), lambda manager: manager.algorithms(), "specsync_algorithm returns 'x', not an Algorithm."),
        (
            Points(["x"]),
            lambda manager: manager.broadcast_points(EngineFacts()),
            "specsync_broadcast_points returns ['x'], not a list of BroadcastPoint.",
        ),
    ],
)
def test_answers_of_the_wrong_type(plugin: object, ask: Callable[[PluginManager], object], expected: str) -> None:
    with pytest.raises(PluginError) as caught:
        ask(asked(plugin))
    assert f"plugin 'bad' of dist-bad 3.0 (entry point {type(plugin).__name__}): hook {expected}" in str(caught.value)


def test_no_answer_is_an_answer() -> None:
    manager = asked(Policy(None))
    manager.register(Sites(None), "more")
    assert manager.policies(Facts()) == []
    assert manager.registry_files() == []


def algorithm(name: str) -> Algorithm:
    return Algorithm(name, "", "block", lambda context: None)  # type: ignore[arg-type,return-value]


def test_an_unknown_word_in_a_point_names_it_and_the_known_ones() -> None:
    class Late(Hooks):
        @hookimpl
        def specsync_broadcast_points(self, engine: EngineFacts) -> Any:
            return [point("x.y", when="afterwards")]

    with pytest.raises(PluginError) as caught:
        asked(Late(None)).broadcast_points(EngineFacts())
    assert "plugin 'bad' of dist-bad 3.0 (entry point Late): BroadcastPoint at x.y: unknown when 'afterwards'" in str(
        caught.value
    )
    assert "Known: before, after, callback, engine." in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"when": "aftr"},
            r"x\.y: unknown when 'aftr' \(did you mean 'after'\?\)\. Known: before, after, callback, eng",
        ),
        ({"capture": "yes"}, r"x\.y: unknown capture 'yes'\. Known: never, any-communicator, engine-communicator\."),
        ({"op": "mean"}, r"x\.y: unknown op 'mean'.*Known: min, max, all, any, root\."),
    ],
)
def test_a_point_takes_known_words_only(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PluginError, match=problem):
        point("x.y", **options)


def test_versions_that_cannot_be_read_name_the_plugin_and_the_point() -> None:
    with pytest.raises(PluginError, match=r"plugin 'bad' .*BroadcastPoint at x\.y: engine versions '>>9'"):
        find_points(asked(Points([point("x.y", versions=">>9")])), EngineFacts(version="1.0"), ("1.0",))


@pytest.mark.parametrize(
    ("name", "kind", "problems"),
    [
        ("dspark", "block", []),
        (
            "dsparks",
            "block",
            ["algorithm 'dsparks' has no site (did you mean 'dspark'?): the plugin's sites belong to "],
        ),
        (
            "dspark",
            "blocks",
            ["algorithm 'dspark': unknown draft_kind 'blocks' (did you mean 'block'?). Known: block, "],
        ),
    ],
)
def test_an_algorithm_must_own_sites_and_know_its_network(name: str, kind: Any, problems: list[str]) -> None:
    offered = Algorithm(name, "", kind, lambda context: None)  # type: ignore[arg-type,return-value]
    manager = asked(Offers(offered))
    found = [problem for _, problem in manager.algorithm_problems(load_registry(manager))]
    assert len(found) == len(problems)
    assert all(said.startswith(start) for said, start in zip(found, problems, strict=True))


def test_two_plugins_with_one_algorithm() -> None:
    manager = asked(Offers(algorithm("x")))
    manager.register(Offers(algorithm("x")), "worse", "dist-worse")
    with pytest.raises(
        PluginError, match=r"plugin 'worse' of dist-worse .*: algorithm 'x' is offered already by the plugin 'bad'"
    ):
        manager.algorithms()


def test_broadcast_points_come_in_the_order_of_their_plugins() -> None:
    manager = PluginManager()
    manager.register(Points([point("b")]), "b")
    manager.register(Points((point("a"),)), "a")
    assert [found.target for found in manager.broadcast_points(EngineFacts())] == ["a", "b"]


def test_the_name_of_a_plugin_is_taken_once() -> None:
    manager = asked(Policy(None))
    with pytest.raises(PluginError, match=r"taken already by the plugin 'bad' of dist-bad 3\.0"):
        manager.register(Policy(None), "bad", "dist-worse")


def test_one_plugin_under_two_names_is_refused() -> None:
    plugin = ModuleType("plugin")
    plugin.specsync_policy = hookimpl(lambda facts: None)  # type: ignore[attr-defined]
    manager = asked(plugin)
    with pytest.raises(PluginError, match="already registered"):
        manager.register(plugin, "again")


SITES = """\
[site.other-accept]
number = {number}
algorithm = "other"
phase = "accept"
kind = "broadcast"
cause = "rng"
tensors = [{{ name = "bonus", shape = ["B"], dtypes = ["int64"] }}]
graph = false
platforms = ["cuda"]
summary = "a site"
"""

SITES_PLUGIN = """
from pathlib import Path
from specsync_core import hookimpl

@hookimpl
def specsync_sites():
    return Path(__file__).with_suffix(".toml")
"""


def install_sites(install: Install, name: str, text: str) -> Path:
    toml = install(name, SITES_PLUGIN, distribution=f"dist-{name}").with_suffix(".toml")
    toml.write_text(text)
    return toml


def test_an_installed_plugins_sites_join_the_registry(install_plugin: Install) -> None:
    install_sites(install_plugin, "other", SITES.format(number=1000))
    registry = load_registry()
    assert registry.sources["other-accept"] == "dist-other"
    assert registry.sources["dspark-plan"] == "specsync-core"
    assert registry.site(1000) in registry.preset_sites("rng")


def test_without_plugins_the_registry_is_the_built_in_one() -> None:
    algorithms = {site.algorithm for site in load_registry(PluginManager()).sites}
    assert algorithms == {"dflash", "dspark", "eagle", "state", "vllm"}


def test_a_collision_names_both_distributions(install_plugin: Install) -> None:
    install_sites(install_plugin, "a", SITES.format(number=1000))
    install_sites(install_plugin, "b", SITES.format(number=1000).replace("other-accept", "other-b"))
    with pytest.raises(RegistryError, match=r"\(dist-b\): .* number '1000' is taken already by .* \(dist-a\)"):
        load_registry()


def test_a_wrong_registry_of_a_plugin_tells_the_way_out(install_plugin: Install) -> None:
    toml = install_sites(install_plugin, "other", SITES.format(number='"x"'))
    with pytest.raises(RegistryError) as caught:
        load_registry()
    assert str(caught.value).startswith(f"{toml} (dist-other): [site.other-accept]: key 'number': ")
    assert str(caught.value).endswith("\n  Mend it, or leave it out with SPECSYNC_DISABLE=other.")
