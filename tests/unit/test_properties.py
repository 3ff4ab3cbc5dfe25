"""Properties of what is decided at start-up: policies, files, registries, plans, groups. Oracles are written from the
documentation, in the plainest Python."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specsync_core.errors import GroupError, PolicyError, RegistryError
from specsync_core.facts import Facts
from specsync_core.groups import ParallelGroups, consensus_group, select_group
from specsync_core.manager import PluginManager
from specsync_core.plan import Plan, resolve_plan
from specsync_core.policy import parse_policy
from specsync_core.policy_file import PolicyFile, PolicyTables, read_policy_file
from specsync_core.registry import Registry
from specsync_core.registry_files import RegistryFile, builtin_registry, merge_registries, read_registry

REGISTRY = merge_registries([builtin_registry()])
NAMES = sorted(name for name in REGISTRY.words if not name.isdecimal())
NUMBERS = sorted(name for name in REGISTRY.words if name.isdecimal())
MODES = ["sync", "audit", "off"]


# --- the policy grammar -----------------------------------------------------------------------------


def oracle(text: str) -> dict[str, str] | None:
    """What a policy says, as the published grammar tells it; None where it is refused."""
    modes: dict[str, str] = {}
    for token in text.lower().replace("_", "-").split(","):
        token = "".join(token.split())
        if not token:
            continue
        removes = token[0] == "-"
        word, *suffixes = token[removes:].split(":")
        if word.isascii() and word.isdecimal():
            word = str(int(word))
        if word not in REGISTRY.words or len(suffixes) > 1 or (removes and suffixes):
            return None
        if suffixes and suffixes[0] not in MODES:
            return None
        mode = "off" if removes else suffixes[0] if suffixes else "sync"
        for site in REGISTRY.words[word].sites:
            modes[site.slug] = mode
    return modes


def modes_of(text: str) -> dict[str, str] | None:
    try:
        return {slug: choice.mode for slug, choice in parse_policy(text, REGISTRY, "test").items()}
    except PolicyError:
        return None


WORDS = st.one_of(st.sampled_from(NAMES), st.sampled_from(NUMBERS), st.sampled_from(NUMBERS).map("0{}".format))
TOKENS = st.builds(
    "{}{}{}".format, st.sampled_from(["", "-", "_"]), WORDS, st.sampled_from(["", "", *map(":{}".format, MODES)])
)
NEARLY = st.text(alphabet="-_:,. 01789adeflmnprstu\t", max_size=12)


@settings(max_examples=400)
@given(st.lists(st.one_of(TOKENS, TOKENS, TOKENS, NEARLY), max_size=7).map(",".join))
@example("-:sync")
@example("all,--7")
@example("7:,8")
@example("00,7")
def test_a_policy_selects_what_the_grammar_says_or_is_refused(text: str) -> None:
    assert modes_of(text) == oracle(text)


@given(st.dictionaries(st.sampled_from([site.slug for site in REGISTRY.sites]), st.sampled_from(MODES)))
def test_every_choice_of_modes_can_be_written_and_read_back(modes: dict[str, str]) -> None:
    assert modes_of(",".join(f"{slug}:{mode}" for slug, mode in modes.items())) == modes
    assert modes_of("all:audit," + ",".join(f"{slug}:{mode}" for slug, mode in modes.items())) == {
        site.slug: modes.get(site.slug, "audit") for site in REGISTRY.sites
    }


# --- TOML that others write -------------------------------------------------------------------------


def toml(value: Any) -> str:
    """Write a value as TOML does: strings, numbers, flags, and inline arrays and tables of those."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value) if value == value and abs(value) != float("inf") else "nan"
    return json.dumps(value)


def document(tables: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in tables.items())


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.sampled_from(["all", "rng:audit", "off", "auto", "group", "dspark", "dspark-plan", "int64", "B", "toy", ""]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab-_", max_size=4), inner, max_size=3)
)
POLICY_KEYS = ["sites", "transport", "timeout_s", "counters", "presets", "algorithms", "models", "sitez"]
SITE_KEYS = ["number", "algorithm", "phase", "kind", "cause", "tensors", "graph", "platforms", "summary", "colour"]
FILES = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def plan_of(policy_file: PolicyFile | None = None, registry: Registry = REGISTRY, **environ: str) -> Plan:
    nothing = PolicyFile("nothing.toml", PolicyTables(), {})
    facts = Facts(model="toy-model", platform="cuda")
    return resolve_plan(registry, environ, policy_file or nothing, facts, PluginManager())


@FILES
@given(st.binary(max_size=200))
def test_any_bytes_are_a_file_or_a_clear_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "specsync.toml"
    path.write_bytes(content)
    with suppress(PolicyError):
        read_policy_file(path)
    with suppress(RegistryError):
        read_registry(path, "somebody")


@FILES
@given(st.dictionaries(st.sampled_from(POLICY_KEYS), VALUES, max_size=4))
@example({"algorithms": {"dspark": {"sites": "rng"}}, "models": {"toy*": {"sites": "all:audit"}}})
@example({"presets": {"a": "b", "b": "a"}})
@example({"presets": {"a": "all"}, "sites": "-a"})
def test_any_policy_file_is_a_plan_or_a_policy_error(tmp_path: Path, tables: dict[str, Any]) -> None:
    path = tmp_path / "specsync.toml"
    path.write_text(document(tables), encoding="utf-8")
    with suppress(PolicyError):
        plan = plan_of(read_policy_file(path))
        assert set(plan.sites) == {site.slug for site in REGISTRY.sites}
        assert "sitez" not in tables, "an unknown key was dropped in silence"


GOOD_SITE = {
    "number": 1000,
    "algorithm": "toy",
    "phase": "accept",
    "kind": "broadcast",
    "cause": "rng",
    "tensors": [{"name": "x", "shape": ["B"], "dtypes": ["int64"]}],
    "graph": False,
    "platforms": ["cuda"],
    "summary": "a site",
}


@FILES
@given(
    st.dictionaries(st.sampled_from(SITE_KEYS), VALUES, max_size=3),
    st.sets(st.sampled_from(SITE_KEYS), max_size=2),
    st.sampled_from(["toy-accept", "other", "dspark-plan", "Toy", "toy accept", "rng"]),
)
@example({}, set(), "toy-accept")
def test_any_registry_is_merged_or_a_registry_error(
    tmp_path: Path, changes: dict[str, Any], without: set[str], slug: str
) -> None:
    entry = {key: value for key, value in {**GOOD_SITE, **changes}.items() if key not in without}
    path = tmp_path / "sites.toml"
    path.write_text(f"[site.{json.dumps(slug)}]\n{document(entry)}", encoding="utf-8")
    refusal = ""
    try:
        merged = merge_registries([builtin_registry(), read_registry(path, "toy-dist")])
    except RegistryError as error:
        refusal = str(error)
    if refusal:
        assert str(path) in refusal, "a message names the file"
        assert changes or without or slug != "toy-accept"
    else:
        assert merged.site(slug).slug == slug
        assert "colour" not in entry


def test_nesting_without_end_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "specsync.toml"
    path.write_text("sites = " + "[" * 50_000)
    with pytest.raises(PolicyError, match="not valid TOML"):
        read_policy_file(path)
    with pytest.raises(RegistryError, match="not valid TOML"):
        read_registry(path, "somebody")


# --- merging and plans ------------------------------------------------------------------------------


def registry_file(number: int) -> RegistryFile:
    """A third party's registry, with a site, a preset over everybody's sites, and a handle."""

    class Text:
        def read_bytes(self) -> bytes:
            entry = {
                **GOOD_SITE,
                "number": 1000 + number,
                "algorithm": f"toy{number}",
                "cause": ["rng", "host"][number % 2],
            }
            return (
                f"[site.toy{number}-accept]\n{document(entry)}"
                f'[preset.mine{number}]\nsummary = ""\nsites = ["toy{number}-accept", "dspark-plan"]\n'
                f'[handle.old{number}]\nstatus = "alias"\nsites = ["toy{number}-accept"]\nsummary = ""\n'
            ).encode()

        def __str__(self) -> str:
            return f"{number}.toml"

    return read_registry(Text(), f"dist-{number}")


@settings(max_examples=30)
@given(st.sets(st.integers(0, 6), max_size=4).flatmap(lambda numbers: st.permutations([-1, *sorted(numbers)])))
def test_registries_merge_alike_in_every_order(order: list[int]) -> None:
    def merged(numbers: list[int]) -> Registry:
        return merge_registries([builtin_registry() if number < 0 else registry_file(number) for number in numbers])

    one, other = merged(order), merged(sorted(order))
    assert one == other
    assert one.sources == other.sources
    assert {word: named.sites for word, named in one.words.items()} == {
        word: named.sites for word, named in other.words.items()
    }
    assert plan_of(registry=one).digest == plan_of(registry=other).digest


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["toy0", "toy1"]), min_size=2, max_size=2), st.integers(0, 1), st.integers(0, 1))
def test_a_collision_is_refused_in_every_order(names: list[str], left: int, right: int) -> None:
    files = [registry_file(left), registry_file(right)]
    files = [
        RegistryFile(name, f"{i}.toml", f.sites, f.presets, f.handles)
        for i, (name, f) in enumerate(zip(names, files, strict=True))
    ]
    messages = []
    for order in itertools.permutations([builtin_registry(), *files]):
        try:
            merge_registries(order)
            messages.append("merged")
        except RegistryError as error:
            messages.append(str(error))
    assert len(set(messages)) == 1
    assert (messages[0] == "merged") == (left != right)
    if left == right:
        assert all(name in messages[0] for name in names), "both distributions are named"


ENVIRONS = st.fixed_dictionaries(
    {},
    optional={
        "SPECSYNC_SITES": st.lists(TOKENS.filter(oracle), max_size=3).map(",".join),
        "SPECSYNC_COUNTERS": st.sampled_from(["on", "off", "1"]),
        "SPECSYNC_TRANSPORT": st.sampled_from(["auto", "group", "AUTO"]),
        "SPECSYNC_TIMEOUT_S": st.sampled_from(["5", "30"]),
    },
)


def decisions(plan: Plan) -> Any:
    """Everything by which ranks could act differently."""
    sites = {slug: (at.mode.value, at.group.value, at.transport.value, at.site) for slug, at in plan.sites.items()}
    return plan.counters, sites


@given(ENVIRONS, ENVIRONS)
@example({"SPECSYNC_SITES": "7"}, {"SPECSYNC_SITES": "dspark-plan:sync"})
@example({"SPECSYNC_TIMEOUT_S": "5"}, {})
@example({"SPECSYNC_SITES": "all:audit"}, {})
def test_digests_are_equal_exactly_when_the_decisions_are(left: dict[str, str], right: dict[str, str]) -> None:
    one, other = plan_of(**left), plan_of(**right)
    assert (one.digest == other.digest) == (decisions(one) == decisions(other))
    assert (one == other) == (one.digest == other.digest)
    assert (one.differences(other) == []) == (one == other)


# --- groups -----------------------------------------------------------------------------------------


class Fake:
    cpu_group = None

    def __init__(self, world_size: int, rank_in_group: int) -> None:
        self.world_size, self.rank_in_group = world_size, rank_in_group

    def broadcast(self, tensor: Any, src: int = 0) -> Any:
        return tensor


TOPOLOGIES = [
    (tp, attn, rank, dp_attention)
    for tp in range(1, 9)
    for attn in [None, *range(1, 9)]
    for rank in range(tp)
    for dp_attention in (False, True)
]


def test_group_selection_over_every_small_topology() -> None:
    """Who broadcasts with whom, and who agrees: of each of the 648 topologies, from every rank's seat."""
    for size, attn_size, rank, dp_attention in TOPOLOGIES:
        tp = Fake(size, rank)
        attn = None if attn_size is None else Fake(attn_size, rank % attn_size)
        if (attn is not None and attn.world_size > size) or (attn is None and dp_attention):
            with pytest.raises(GroupError):
                ParallelGroups(tp=tp, attn_tp=attn, dp_attention=dp_attention)
            continue
        groups = ParallelGroups(tp=tp, attn_tp=attn, dp_attention=dp_attention)
        assert select_group(groups) is (attn if dp_attention else tp)
        assert consensus_group(groups) is tp
        for chosen in filter(None, (tp, attn)):
            if chosen.world_size == 1 and size > 1:
                with pytest.raises(GroupError, match="decides nothing while the tensor-parallel group has"):
                    consensus_group(groups, chosen)
            else:
                assert consensus_group(groups, chosen) is chosen
    assert len(TOPOLOGIES) == 648
